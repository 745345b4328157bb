"""Which forms (forms.py) a session's graphs take, and a graph in such a form.

Apart from the forms, which need onnx: a session whose graphs were kept does without it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

from .contract import GraphSpec
from .ort_forms.interface import MOST, spec_with_beam_positions, specs_with_transposed_keys

CHAIN_CANDIDATES = 8  # of a step of greedy search on a device: rules may ban six of them


@dataclass(frozen=True)
class OrtForm:
    """Which forms a session's graphs take."""

    transposed_keys: bool = False
    flash_heads: int = 0  # heads of an encoder without padding, whose attention becomes one operator; 0: unchanged
    int8_products: bool = False
    beam_positions: bool = False  # a position for every beam: speculative decoding
    attention_layers: int = 0  # decoder layers whose cross-attention weights are outputs: all or none
    cross_rows: bool = False  # a source without padding: beams attend to it one by one
    shortlist: tuple[int, ...] | None = None  # the only tokens that have logits
    screened: bool = False  # a further input: how many candidates to output instead of logits; 0: logits
    complete: bool = True  # a screened step outputs all logits as well, where 0 candidates are asked for
    drafts: bool = False  # weights in 8 and 4 bits, the best token is the only output: drafts for the fp32 session
    gemm: bool = False  # the output projection and its bias are one node, in fp32
    counted: bool = False  # a further input: how many candidates to output, so that no node computes a shape
    greedy: bool = False  # no candidates: the step makes the next one's inputs (device_graphs/whole_step.py)
    invariant_sums: bool = False  # sums over the vocabulary have the same bits in every row of a batch
    kernels: bool = False  # fused operators of the kernel library, for fp32 and w8a8 on the CPU
    program: bool = False  # a graph of fused operators alone becomes one operator
    keeps_mask: bool = False  # first: the step computes its mask from the latest one (device_graphs/whole_step.py)

    def specs(self, specs: dict[str, GraphSpec]) -> dict[str, GraphSpec]:
        """Inputs and outputs of the two graphs, as in the contract."""
        if self.transposed_keys:
            specs = specs_with_transposed_keys(specs)
        if self.beam_positions:
            specs = {**specs, "decoder_step": spec_with_beam_positions(specs["decoder_step"])}
        return specs

    def with_shortlist(self, tokens: Sequence[int]) -> OrtForm:
        """The same with a shortlist; without screening, which would not make it faster."""
        return dataclasses.replace(self, shortlist=tuple(tokens), screened=False)

    def for_candidates(self, count: int) -> OrtForm:
        """The form of steps that output so many candidates (0: all logits) and nothing else.

        In int8 one graph does both. In fp32 screening reads a table of its own, and all logits a packed copy of the
        output table, so there is a graph for each: few searches need both.
        """
        if not self.screened or self.int8_products or self.kernels:
            return self
        return (
            dataclasses.replace(self, complete=False)
            if 0 < count <= MOST
            else dataclasses.replace(self, screened=False)
        )

    @property
    def by_nodes(self) -> OrtForm:
        """The same computation with a node for every operator, as it is traced and looked into."""
        return dataclasses.replace(self, program=False)

    @property
    def outputs_candidates(self) -> bool:
        """Whether a step's logits are those of its candidates alone, where it is asked for candidates."""
        return self.takes_wanted or self.drafts

    @property
    def takes_wanted(self) -> bool:
        """Whether a step has the input `wanted`: how many candidates to output, 0 for all logits."""
        return (self.screened or self.kernels) and not self.drafts

    @property
    def changes_encoder(self) -> bool:
        return self.transposed_keys or self.flash_heads > 0 or self.int8_products or self.kernels


@dataclass(frozen=True)
class FileWeight:
    """A weight that stays in a file beside the portable graph."""

    name: str
    file: str
    dtype: str
    dims: tuple[int, ...]
    offset: int  # in bytes


@dataclass(frozen=True)
class FormedGraph:
    """A serialised graph in some form; `weights` are those that its fused operators read from files."""

    graph: bytes
    weights: tuple[FileWeight, ...] = ()

    def to_bytes(self) -> bytes:
        """A line of JSON that lists the weights, and the graph."""
        weights = [dataclasses.asdict(weight) for weight in self.weights]
        return json.dumps(weights).encode() + b"\n" + self.graph


def formed_from_bytes(stored: bytes) -> FormedGraph:
    weights, _, graph = stored.partition(b"\n")
    found = tuple(FileWeight(**{**fields, "dims": tuple(fields["dims"])}) for fields in json.loads(weights))
    return FormedGraph(graph, found)

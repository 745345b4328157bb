"""The one chain of forms by which every ONNX Runtime session gets its graphs from the portable ones.

    encoder       transposed keys -> flash attention -> int8 products
    decoder step  transposed keys -> beam positions -> attention outputs -> cross rows -> shortlist -> int8 products
                  -> top candidates -> screened argmax -> Gemm projection
    draft step    transposed keys -> shortlist -> draft step, for speculative decoding

Where the kernel library is there, fused operators (kernel_forms) take the place of int8 products, top candidates,
screened argmax and Gemm projection.

Each form is one module. A session applies it or not; the order never changes. So a session with cross-attention
outputs computes the same numbers as one without.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from .contract import GraphSpec
from .kernel_forms.step import kernel_encoder, kernel_layers, kernel_step
from .ort_forms.attention_outputs import attention_graph
from .ort_forms.beam_positions import beam_positions, spec_with_beam_positions
from .ort_forms.cross_rows import cross_rows
from .ort_forms.draft_step import draft_graph
from .ort_forms.flash_attention import flash_attention
from .ort_forms.gemm_projection import gemm_projection
from .ort_forms.int8_matmul import row_products
from .ort_forms.narrow_table import NarrowTable
from .ort_forms.screened_argmax import MOST, screened_graph
from .ort_forms.shortlist import shortlist_graph
from .ort_forms.top_candidates import candidate_graph
from .ort_forms.transposed_keys import specs_with_transposed_keys, transposed_keys


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


def encoder_form(model: onnx.ModelProto, form: OrtForm) -> onnx.ModelProto:
    """The portable encoder -> the one that a session runs."""
    if form.transposed_keys:
        model = transposed_keys(model)
    if form.flash_heads:
        model = flash_attention(model, form.flash_heads)
    if form.kernels:
        return kernel_encoder(model)
    return row_products(model) if form.int8_products else model


def step_form(
    model: onnx.ModelProto, form: OrtForm, folder: Path, narrow: NarrowTable | None = None
) -> onnx.ModelProto:
    """The portable decoder step -> the one that a session runs. Weights that are not loaded are in `folder`.

    A `narrow` table is for a step that drafts.
    """
    if form.transposed_keys:
        model = transposed_keys(model)
    if form.beam_positions:
        model = beam_positions(model)
    if form.attention_layers:
        model = attention_graph(model, form.attention_layers)
    if form.cross_rows:
        model = cross_rows(model)
    if form.shortlist is not None:
        model = shortlist_graph(model, form.shortlist, folder)
    if form.drafts:
        return draft_graph(kernel_layers(model) if form.kernels else model, folder, narrow)
    if form.kernels:
        return kernel_step(model, screened=form.screened)
    if form.int8_products:
        model = row_products(model)
    if form.greedy:
        return model
    by_softmax = form.int8_products and not form.invariant_sums
    model = candidate_graph(model, form.counted, form.invariant_sums, by_softmax)
    if form.screened:
        model = screened_graph(model, folder, form.complete)
    return gemm_projection(model) if form.gemm else model

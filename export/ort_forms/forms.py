"""The one chain of forms by which every ONNX Runtime session gets its graphs from the portable ones.

    encoder       transposed keys -> int8 products
    decoder step  transposed keys -> beam positions -> attention outputs -> shortlist -> int8 products
                  -> candidates -> screened argmax

Each form is its own module, and is in the chain or not; the order never changes. So a session that also puts out its
cross-attention weights computes the same numbers as one that does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from ..contract import GraphSpec
from .attention_outputs import attention_graph
from .beam_positions import beam_positions, spec_with_beam_positions
from .int8_matmul import row_products
from .screened_argmax import screened_graph
from .shortlist import shortlist_graph
from .top_candidates import candidate_graph
from .transposed_keys import specs_with_transposed_keys, transposed_keys


@dataclass(frozen=True)
class OrtForm:
    """Which forms a session's graphs take."""

    transposed_keys: bool = False
    int8_products: bool = False
    beam_positions: bool = False  # a position for every beam: speculative decoding
    attention_layers: int = 0  # decoder layers whose cross-attention weights are outputs, all of them or none
    shortlist: tuple[int, ...] | None = None  # the only tokens that have logits
    screened: bool = False  # an input says how many candidates are wanted, if they are all that is

    def specs(self, specs: dict[str, GraphSpec]) -> dict[str, GraphSpec]:
        """What goes into and comes out of the two graphs, as far as the contract has it."""
        if self.transposed_keys:
            specs = specs_with_transposed_keys(specs)
        if self.beam_positions:
            specs = {**specs, "decoder_step": spec_with_beam_positions(specs["decoder_step"])}
        return specs

    def with_shortlist(self, tokens: Sequence[int]) -> OrtForm:
        """A shortlist is no less work with a screen."""
        return dataclasses.replace(self, shortlist=tuple(tokens), screened=False)

    @property
    def changes_encoder(self) -> bool:
        return self.transposed_keys or self.int8_products


def encoder_form(model: onnx.ModelProto, form: OrtForm) -> onnx.ModelProto:
    """The portable encoder -> the one that a session runs."""
    if form.transposed_keys:
        model = transposed_keys(model)
    return row_products(model) if form.int8_products else model


def step_form(model: onnx.ModelProto, form: OrtForm, folder: Path) -> onnx.ModelProto:
    """The portable decoder step -> the one that a session runs. Weights that are not loaded lie in `folder`."""
    if form.transposed_keys:
        model = transposed_keys(model)
    if form.beam_positions:
        model = beam_positions(model)
    if form.attention_layers:
        model = attention_graph(model, form.attention_layers)
    if form.shortlist is not None:
        model = shortlist_graph(model, form.shortlist, folder)
    if form.int8_products:
        model = row_products(model)
    model = candidate_graph(model)
    return screened_graph(model, folder) if form.screened else model

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

from pathlib import Path

import numpy as np
import onnx

from .artifact.graph_files import graph_from_file
from .device_graphs.whole_step import step_with_greedy, step_with_mask
from .kernel_forms.program import as_program
from .kernel_forms.step import kernel_encoder, kernel_layers, kernel_step
from .kernel_forms.weights import file_weights
from .ort_form import CHAIN_CANDIDATES, FormedGraph, OrtForm
from .ort_forms.attention_outputs import attention_graph
from .ort_forms.beam_positions import beam_positions
from .ort_forms.cross_rows import cross_rows
from .ort_forms.draft_step import draft_graph, projection_arrays
from .ort_forms.flash_attention import flash_attention
from .ort_forms.gemm_projection import gemm_projection
from .ort_forms.int8_matmul import row_products
from .ort_forms.narrow_table import NarrowTable, narrow_table
from .ort_forms.screened_argmax import screened_graph
from .ort_forms.shortlist import shortlist_graph
from .ort_forms.top_candidates import candidate_graph, vocab_of
from .ort_forms.transposed_keys import transposed_keys


def encoder_form(model: onnx.ModelProto, form: OrtForm) -> onnx.ModelProto:
    """The portable encoder -> the one that a session runs."""
    if form.transposed_keys:
        model = transposed_keys(model)
    if form.flash_heads:
        model = flash_attention(model, form.flash_heads)
    if form.kernels:
        made = kernel_encoder(model)
        return as_program(made) if form.program else made
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
        made = kernel_step(model, screened=form.screened)
        return as_program(made) if form.program else made
    if form.int8_products:
        model = row_products(model)
    if form.greedy:
        return model
    by_softmax = form.int8_products and not form.invariant_sums
    model = candidate_graph(model, form.counted, form.invariant_sums, by_softmax)
    if form.screened:
        model = screened_graph(model, folder, form.complete)
    return gemm_projection(model) if form.gemm else model


def formed_graph(name: str, path: Path, form: OrtForm, narrow: NarrowTable | None = None) -> FormedGraph | None:
    """The graph of a file in that form; its weights stay in the file's folder. None: the form does not change it."""
    if name == "decoder_step":
        made = step_form(graph_from_file(path), form, path.parent, narrow)
        if form.greedy:
            made = step_with_greedy(made, vocab_of(made), CHAIN_CANDIDATES)
        elif form.keeps_mask:
            made = step_with_mask(made)
    elif form.changes_encoder:
        made = encoder_form(graph_from_file(path), form)
    else:
        return None
    return FormedGraph(made.SerializeToString(), file_weights(made.graph))


def narrow_table_of(path: Path, states: np.ndarray) -> NarrowTable | None:
    """A narrow output table for a decoder step, as narrow as these states [N,D] allow; None where none will do."""
    return narrow_table(*projection_arrays(graph_from_file(path), path.parent), states)

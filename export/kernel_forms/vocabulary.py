"""The output projection of a decoder step and the search of its best tokens as one operator.

    x [B,K,D] [* smoothing] -> MatMul(table [D,V] or Transpose(table [V,D])) -> Add(bias) -> logits [B,K,V]
    becomes
    x, table, bias, wanted [1] -> Candidates -> logits [B,K,W], exp_sum [B,K], best_logits, best_tokens [B,K,C]

`wanted` 0: all logits, and K+1 candidates. n: the n best tokens of every beam, and nothing else. -n: the n best, and
exp_sum over the vocabulary. A table in int8 makes CandidatesInt8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper

from ..audit import axes_of
from ..ort_forms.int8_matmul import SIGNED, Steps, activations_of
from ..ort_forms.interface import CANDIDATES, WANTED
from . import ops
from .graph_view import Fusion, GraphView, Mismatch, check_attributes, drop_unread_nodes, replace_fused, require
from .linear import smoothing_of
from .shapes import shapes_of
from .weights import StoredWeight, stored_weight

LOGITS = "logits"
WORTH_WORDS = (
    8_000_000  # numbers of a table: 32 MB in fp32 are more than most caches hold, from which words gain nothing
)


@dataclass(frozen=True)
class Projection:
    """What makes the logits: its nodes and the operator's inputs; `smoothing` and `bias` may be empty."""

    name: str
    nodes: tuple[NodeProto, ...]
    x: str
    smoothing: str
    weight: StoredWeight
    by_rows: bool
    bias: str
    steps: Steps


def fits(model: onnx.ModelProto) -> bool:
    """Whether a decoder step's logits are a product with a stored table, so that `fuse_vocabulary` changes it."""
    return projection_of(model) is not None


def fuse_vocabulary(model: onnx.ModelProto, *, screened: bool) -> None:
    """Replaces the output projection of a decoder step, in place; another one stays as it is, without candidates.

    `screened`: a float table by rows has an int8 copy, by which the library finds the tokens to multiply exactly; and
    one in 16 bits where sums are asked for as well, if it is large.
    """
    found = projection_of(model)
    if found is None:
        return
    screened = screened and found.by_rows
    made = ops.candidates(
        found.name,
        [LOGITS, *(tensor.name for tensor in CANDIDATES)],
        x=found.x,
        table=found.weight.name,
        scale=found.weight.scale,
        bias=found.bias,
        wanted=WANTED.name,
        smoothing=found.smoothing,
        by_rows=found.by_rows,
        screened=screened,
        words=screened and math.prod(found.weight.dims) >= WORTH_WORDS,
        steps=found.steps,
    )
    replace_fused(model.graph, [Fusion(found.nodes, made)])
    drop_unread_nodes(model.graph)  # the transposed table
    declare(model.graph)


def projection_of(model: onnx.ModelProto) -> Projection | None:
    view = GraphView(model.graph, shapes_of(model))
    try:
        last = view.maker(LOGITS, "MatMul", "Add")
        bias = next((name for name in last.input if name in view.weights), "") if last.op_type == "Add" else ""
        product = view.maker(view.other(last, bias) if bias else LOGITS, "MatMul")
        if bias:
            view.reader(product.output[0], "Add")
        x, (weight, by_rows) = product.input[0], stored_table(view, product.input[1])
        width, vocab = weight.dims[::-1] if by_rows else weight.dims
        require(x not in view.weights and (not bias or view.is_weight(bias, vocab)))
        check_output(view, model.graph, vocab)
    except Mismatch:
        return None
    smooth = smoothing_of(view, x, width)
    nodes = (product, last) if bias else (product,)
    steps = activations_of(model.graph).get(x, SIGNED)
    if smooth is None:
        return Projection(product.name, nodes, x, "", weight, by_rows, bias, steps)
    x, smoothing = smooth.input
    return Projection(product.name, (smooth, *nodes), x, smoothing, weight, by_rows, bias, steps)


def stored_table(view: GraphView, name: str) -> tuple[StoredWeight, bool]:
    """A product's weight, and whether it is stored by rows [V,D] and transposed in the graph."""
    made = view.makers.get(name)
    if made is None or made.op_type != "Transpose":
        return stored_weight(view, name, outputs=1), False
    check_attributes(made, perm=[1, 0])
    return stored_weight(view, made.input[0], outputs=0), True


def check_output(view: GraphView, graph: onnx.GraphProto, vocab: int) -> None:
    """Logits are an output [B,K,V] in fp32 that no node reads."""
    values = [value for value in graph.output if value.name == LOGITS]
    require(len(values) == 1 and not view.readers.get(LOGITS))
    require(values[0].type.tensor_type.elem_type == TensorProto.FLOAT and axes_of(values[0]) == ("B", "K", vocab))


def declare(graph: onnx.GraphProto) -> None:
    """The input and the outputs that the operator adds."""
    (logits,) = [value for value in graph.output if value.name == LOGITS]
    logits.CopyFrom(helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, ["B", "K", "W"]))
    graph.input.append(helper.make_tensor_value_info(WANTED.name, TensorProto.INT64, WANTED.axes))
    for tensor in CANDIDATES:
        element = helper.np_dtype_to_tensor_dtype(np.dtype(tensor.dtype))
        graph.output.append(helper.make_tensor_value_info(tensor.name, element, tensor.axes))

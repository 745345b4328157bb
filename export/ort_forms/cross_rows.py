"""Cross-attention over a window of audio in a decoder step, with the row of every beam multiplied on its own.

    q [B,K,D] -> heads [B,H,K,E] * scale @ k^T -> Where -> Softmax -> @ v -> merged heads [B,K,D]         becomes
    q [B,K,D] * scale -> heads [B,H,G,R,E] @ k^T [B,H,1,E,S] -> Softmax -> @ v -> merged heads [B,K,D]

The K rows are G groups of R. ONNX Runtime copies a matrix into another order before it multiplies a few rows by it, but
not for a single row that is not scaled: so each of a few beams is a group, and the keys of a head, 384 kB of 1,500
frames, are read from memory once and then from the processor's cache. The many rows of a prompt are one group. A window
has no padding, so the mask hides nothing and is left out. A form for ONNX Runtime on the CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from seq2engine.errors import ExportError

from ..audit import axes_of
from ..graph_index import (
    PrimitiveAttention,
    copy_of,
    drop_unread_weights,
    find_attentions,
    makers_of,
    readers_of,
    replace_nodes,
)

MOST_BEAMS = 8  # rows up to which each is multiplied on its own


def path(name: str) -> str:
    return f"cross_rows/{name}"


def cross_rows(model: onnx.ModelProto) -> onnx.ModelProto:
    """A decoder step whose source mask is always true, its weights loaded or not -> the same with single rows."""
    made = copy_of(model)
    graph = made.graph
    makers, readers = makers_of(graph.node), readers_of(graph.node)
    shown = {value.name for value in graph.output}  # cross-attention weights may be among them
    unread: set[str] = set()
    changed: dict[str, list[NodeProto]] = {}  # at the place of the last node that they replace
    for attention in find_attentions(made):
        if attention.is_self:
            continue
        cutting = cut_nodes(attention, makers)
        (merging,) = readers[attention.output]
        (flat,) = readers[merging.output[0]]
        inner = [graph.node[place] for place in attention.nodes]
        unread |= {node.name for node in (*inner, *cutting, merging)}
        (softmax,) = [node for node in inner if node.op_type == "Softmax"]
        changed[flat.name] = row_nodes(attention, cutting[0].input[0], softmax, flat, softmax.output[0] in shown)
        scale = attention.scale
    nodes = [one for node in graph.node if node.name not in unread for one in changed.get(node.name, [node])]
    if changed:
        nodes = [*shape_nodes(), *nodes]
        graph.initializer.extend(constants(*head_sizes(graph), scale))
    replace_nodes(graph, nodes)
    drop_unread_weights(graph)
    return made


def cut_nodes(attention: PrimitiveAttention, makers: dict[str, NodeProto]) -> tuple[NodeProto, NodeProto]:
    """Reshape and Transpose, by which a product becomes the heads of q."""
    transpose = makers.get(attention.q)
    reshape = None if transpose is None else makers.get(transpose.input[0])
    kinds = [None if node is None else node.op_type for node in (reshape, transpose)]
    if reshape is None or transpose is None or kinds != ["Reshape", "Transpose"]:
        raise ExportError(
            f"{attention.output} reads heads made by {kinds}, expected Reshape and Transpose: it is not a decoder step "
            "of ours; export the checkpoint again with: seq2engine export CHECKPOINT DIR"
        )
    return reshape, transpose


def head_sizes(graph: onnx.GraphProto) -> tuple[int, int]:
    """Heads and the width of one."""
    (keys,) = [value for value in graph.input if value.name == "cross_k.0"]
    _, heads, _, width = axes_of(keys)
    assert isinstance(heads, int)
    assert isinstance(width, int)
    return heads, width


def shape_nodes() -> list[NodeProto]:
    """Once a step: R is 1 for a few beams, else K; shapes of heads and of cross-attention weights."""
    return [
        node("Shape", ["tokens"], path("rows"), start=1, end=2),
        node("Greater", [path("rows"), path("most")], path("many")),
        node("Where", [path("many"), path("rows"), path("one")], path("of_group")),
        node("Concat", [path("batch_groups"), path("of_group"), path("head")], path("heads"), axis=0),
        node("Concat", [path("batch_heads"), path("rows"), path("last")], path("ungrouped"), axis=0),
    ]


def constants(heads: int, width: int, scale: float) -> list[TensorProto]:
    arrays = {
        "one": np.array([1]),
        "most": np.array([MOST_BEAMS]),
        "group": np.array([2]),  # an axis
        "batch_groups": np.array([0, -1]),
        "head": np.array([heads, width]),
        "batch_heads": np.array([0, 0]),
        "last": np.array([-1]),
        "flat": np.array([0, -1, heads * width]),
        "scale": np.array(scale, dtype=np.float32),
    }
    return [numpy_helper.from_array(array, path(name)) for name, array in arrays.items()]


def row_nodes(
    attention: PrimitiveAttention, x: str, softmax: NodeProto, flat: NodeProto, shown: bool
) -> list[NodeProto]:
    """q [B,K,D] -> merged heads [B,K,D]. `shown`: the weights are an output too, [B,H,K,S]."""
    scope, weights = attention.output.rpartition("/")[0], softmax.output[0]

    def name(part: str) -> str:
        return f"{scope}/rows/{part}"

    grouped = name("weights") if shown else weights
    return [
        node("Mul", [x, path("scale")], name("scaled")),
        node("Reshape", [name("scaled"), path("heads")], name("cut")),  # [B, G, R, H, E]
        node("Transpose", [name("cut")], name("q"), perm=[0, 3, 1, 2, 4]),
        node("Unsqueeze", [attention.k, path("group")], name("k")),
        node("Transpose", [name("k")], name("k_transposed"), perm=[0, 1, 2, 4, 3]),
        node("MatMul", [name("q"), name("k_transposed")], name("scores")),  # [B, H, G, R, S]
        node("Softmax", [name("scores")], grouped, axis=-1),
        *([node("Reshape", [grouped, path("ungrouped")], weights)] if shown else []),
        node("Unsqueeze", [attention.v, path("group")], name("v")),
        node("MatMul", [grouped, name("v")], attention.output),
        node("Transpose", [attention.output], name("merged"), perm=[0, 2, 3, 1, 4]),
        node("Reshape", [name("merged"), path("flat")], flat.output[0]),
    ]


def node(op: str, inputs: list[str], output: str, **attributes: Any) -> NodeProto:
    return helper.make_node(op, inputs, [output], name=f"{output}/{op}", **attributes)

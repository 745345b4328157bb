"""Cross-attention keys stored with the source along their last axis, the fastest layout for a matmul with one row.

    encoder       ... -> cross_k [B,H,S,E] -> Transpose -> cross_k [B,H,E,S]
    decoder step  q * scale -> heads -> MatMul <- Transpose <- cross_k     becomes     MatMul <- cross_k

ONNX Runtime multiplies one row by a matrix without copying the matrix first if it is not transposed and the product is
not scaled: so q is scaled before it is cut into heads. A form for ONNX Runtime on the CPU.
"""

from __future__ import annotations

import onnx
from onnx import NodeProto, helper

from seq2engine.errors import ExportError

from ..audit import axes_of
from ..graph_index import copy_of, makers_of, replace_nodes
from .interface import KEYS, TRANSPOSED


def transposed_keys(model: onnx.ModelProto) -> onnx.ModelProto:
    """An encoder or a decoder step, its weights loaded or not -> the same with transposed keys."""
    made = copy_of(model)
    graph = made.graph
    keys = [value for value in (*graph.input, *graph.output) if value.name.startswith(KEYS)]
    for value in keys:
        axes = axes_of(value)
        element = value.type.tensor_type.elem_type
        value.CopyFrom(helper.make_tensor_value_info(value.name, element, [axes[axis] for axis in TRANSPOSED]))
    written = [value.name for value in keys if value in graph.output]
    nodes = writing(list(graph.node), written) if written else reading(list(graph.node))
    replace_nodes(graph, nodes)
    return made


def writing(nodes: list[NodeProto], keys: list[str]) -> list[NodeProto]:
    """Transposes the keys where they leave the encoder."""
    for node in nodes:
        node.output[:] = [f"{name}/untransposed" if name in keys else name for name in node.output]
    return [
        *nodes,
        *(
            helper.make_node("Transpose", [f"{k}/untransposed"], [k], name=f"{k}/Transpose", perm=TRANSPOSED)
            for k in keys
        ),
    ]


def reading(nodes: list[NodeProto]) -> list[NodeProto]:
    """Moves the scale before the split into heads, and removes the transpose of the keys."""
    makers = makers_of(nodes)
    unread: list[NodeProto] = []
    early: dict[str, NodeProto] = {}  # scales, by the node that they now precede
    for product in nodes:
        transpose = makers.get(product.input[1]) if product.op_type == "MatMul" else None
        if transpose is None or transpose.op_type != "Transpose" or not transpose.input[0].startswith(KEYS):
            continue
        scaling = makers.get(product.input[0])
        heads = scaling
        if scaling is not None and scaling.op_type == "Mul":
            heads = makers.get(scaling.input[0])
        cut = None if heads is None else makers.get(heads.input[0])
        kinds = [None if one is None else one.op_type for one in (heads, cut)]
        if scaling is None or heads is None or cut is None or kinds != ["Transpose", "Reshape"]:
            raise ExportError(
                f"{product.name} multiplies keys by {kinds}, expected a Transpose of a Reshape, scaled or not: it is "
                "no decoder step of ours; export the checkpoint again with: seq2engine export CHECKPOINT DIR"
            )
        product.input[:] = [heads.output[0], transpose.input[0]]
        unread.append(transpose)
        if scaling is not heads:
            scaling.input[0], cut.input[0] = cut.input[0], scaling.output[0]
            early[cut.name] = scaling
    moved = {scaling.name for scaling in early.values()}
    return [
        one
        for node in nodes
        if node not in unread and node.name not in moved
        for one in ([early[node.name], node] if node.name in early else [node])
    ]

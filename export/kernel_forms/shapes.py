"""Shapes of all tensors of a graph, by ONNX's own inference; fused attention stands in it as a node of the same shape.

qkv [B,K,3D] -> SelfAttention -> context [B,K,D]        is inferred as        qkv -> Split -> context
qkv [B,S,3D] -> EncoderAttention -> context [B,S,D]                           qkv -> Split -> context
q [B,K,D] -> CrossAttention -> context [B,K,D]                                q -> Identity -> context
"""

from __future__ import annotations

import onnx
from onnx import NodeProto, helper, shape_inference

from ..audit import axes_of, without_weight_data
from ..graph_index import replace_nodes
from . import ops

Shape = tuple[str | int, ...]
AS_FIRST_THIRD = (ops.SELF_ATTENTION, ops.ENCODER_ATTENTION)
AS_FIRST_INPUT = (ops.CROSS_ATTENTION, "MultiHeadAttention")


def shapes_of(model: onnx.ModelProto) -> dict[str, Shape]:
    """Tensor -> its axes, numbers and letters; tensors of which not all axes are known are left out.

    Axes of the same letter have the same size, whether the letter is the contract's or one of the inference's own.
    """
    probe = without_weight_data(model)
    nodes = [stand_in(node) for node in probe.graph.node]
    replace_nodes(probe.graph, [node for node in nodes if not node.domain])
    inferred = shape_inference.infer_shapes(probe).graph
    values = (*inferred.input, *inferred.value_info, *inferred.output)
    found = {value.name: axes_of(value) for value in values if value.type.tensor_type.HasField("shape")}
    return {name: axes for name, axes in found.items() if all(axes)}


def stand_in(node: NodeProto) -> NodeProto:
    """A node of ONNX whose first output has the same shape."""
    if node.op_type in AS_FIRST_INPUT:
        return helper.make_node("Identity", [node.input[0]], [node.output[0]])
    if node.op_type in AS_FIRST_THIRD:
        parts = [node.output[0], *(f"{node.output[0]}/{part}" for part in "kv")]
        return helper.make_node("Split", [node.input[0]], parts, axis=-1, num_outputs=3)
    return node

"""Writes the static cache once per step, for all layers together.

A step's new keys and values need not be in the cache to be attended to: attention reads the old cache and the new slots
side by side, and the slots they will be written to are masked. Where positions are relative, slot_position is widened
likewise.

    self_k.i ------------------+
    new keys ----+-------------+--Concat--> attention, under a mask of L+K slots
                 +--TensorScatter--> new_self_k.i, which nothing in the graph reads

TensorRT joins all the writes that nothing waits for into one launch, and reads both parts of the Concat inside the
attention kernel. Writing before reading costs a launch a layer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ..graph_index import rename_inputs, replace_nodes

SLOT_AXIS = 2


def write_late(model: onnx.ModelProto, beams: int, slots: int) -> None:
    """Makes attentions read cache and new slots side by side, in place."""
    graph = model.graph
    masking, positions = mask_nodes(graph, beams, slots), position_nodes(graph, beams)
    renamed = {"self_mask": masking[-1].output[0]}
    if positions:
        renamed["slot_position"] = positions[-1].output[0]
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if "slot_position" in node.input:
            nodes += positions
            positions = []
        if "self_mask" in node.input:  # not earlier: TensorRT then fuses less of the first layer
            nodes += masking
            masking = []
        rename_inputs([node], renamed)
        nodes.append(node)
        if node.op_type == "TensorScatter":
            cache, new, _ = node.input
            renamed[node.output[0]] = joined = f"trt/{node.output[0]}"
            nodes.append(helper.make_node("Concat", [cache, new], [joined], name=f"{joined}/Concat", axis=SLOT_AXIS))
    replace_nodes(graph, nodes)


def position_nodes(graph: onnx.GraphProto, beams: int) -> list[onnx.NodeProto]:
    """slot_position [B,L] -> [B,L+K]: the new slots have the step's position. None for absolute positions."""
    if not any(value.name == "slot_position" for value in graph.input):
        return []
    new, joined = "trt/new_position", "trt/slot_position"
    graph.initializer.append(numpy_helper.from_array(np.array([1], dtype=np.int64), f"{new}/axis"))
    return [
        helper.make_node("Unsqueeze", ["position", f"{new}/axis"], [new], name=f"{new}/Unsqueeze"),
        helper.make_node("Concat", ["slot_position", *[new] * beams], [joined], name=f"{joined}/Concat", axis=1),
    ]


def mask_nodes(graph: onnx.GraphProto, beams: int, slots: int) -> list[onnx.NodeProto]:
    """self_mask [B,K,L] -> [B,K,L+K]: slots about to be overwritten are masked, and their mask moves to the new
    slots."""
    constants = {
        "slots": np.arange(slots).reshape(1, 1, -1),
        "beams": np.broadcast_to(np.arange(beams), (1, beams, beams)),
        "count": np.array(beams),
        "row_axes": np.array((1, 2)),
    }
    for name, array in constants.items():
        graph.initializer.append(numpy_helper.from_array(array.astype(np.int64), f"trt/{name}"))

    def node(op: str, inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
        return helper.make_node(op, inputs, [f"trt/{output}"], name=f"trt/{output}/{op}", **attributes)

    return [
        node("Unsqueeze", ["write_index", "trt/row_axes"], "first"),  # [B,1,1]
        node("Add", ["trt/first", "trt/count"], "end"),
        node("GreaterOrEqual", ["trt/slots", "trt/first"], "not_before"),
        node("Less", ["trt/slots", "trt/end"], "not_after"),
        node("And", ["trt/not_before", "trt/not_after"], "overwritten"),  # [B,1,L]
        node("Not", ["trt/overwritten"], "kept"),
        node("And", ["self_mask", "trt/kept"], "old_mask"),
        node("Add", ["trt/first", "trt/beams"], "places"),  # [B,K,K]
        node("GatherElements", ["self_mask", "trt/places"], "new_mask", axis=SLOT_AXIS),
        node("Concat", ["trt/old_mask", "trt/new_mask"], "self_mask", axis=SLOT_AXIS),
    ]

"""The decoder step with a position of its own for every beam: a form for speculative decoding in ONNX Runtime.

    position [B] -> Unsqueeze -> [B,1] -> ...        becomes        position [B,K] -> ...

The K tokens of one step may then be a token and its drafted successors, each at its own position and masked to the
tokens before it. Everything after the positions broadcasts over beams anyway.
"""

from __future__ import annotations

import onnx
from onnx import helper

from seq2engine.errors import ExportError

from ..graph_index import copy_of, rename_inputs, replace_nodes
from .interface import POSITION


def beam_positions(model: onnx.ModelProto) -> onnx.ModelProto:
    """A decoder step, with or without its weights loaded -> the same with `position` [B,K]."""
    made = copy_of(model)
    graph = made.graph
    readers = [node for node in graph.node if POSITION.name in node.input]
    if not readers or any(node.op_type != "Unsqueeze" for node in readers):
        kinds = ", ".join(sorted({node.op_type for node in readers})) or "nothing"
        raise ExportError(
            f"graph {graph.name} reads its positions by {kinds}, expected Unsqueeze: it is not a decoder step of ours; "
            "export the checkpoint again with: seq2engine export CHECKPOINT DIR"
        )
    renamed = {node.output[0]: POSITION.name for node in readers}
    kept = [node for node in graph.node if POSITION.name not in node.input]
    rename_inputs(kept, renamed)
    replace_nodes(graph, kept)
    place = next(i for i, value in enumerate(graph.input) if value.name == POSITION.name)
    graph.input[place].CopyFrom(helper.make_tensor_value_info(POSITION.name, onnx.TensorProto.INT64, POSITION.axes))
    return made

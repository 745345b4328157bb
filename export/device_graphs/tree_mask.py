"""The next mask of the tree cache from the latest one and the beams' parents: rows of the mask never cross the bus.

    self_mask [B,K,L] -- row parents[b,k] --+-- Or --> new_self_mask [B,K,L]
    write_index [B] + beam [K] == slot -----+

A parent of -1 is an empty row: its source begins again. `beam` is 0, 1, ..., K-1, sent once, so that no node computes a
shape. A model with relative positions also knows at which position each slot was written. All slots from `write_index`
on get the current one; those after the K new ones are not attended to and get theirs when they are written.
"""

from __future__ import annotations

import numpy as np
import onnx

from ..contract import GraphSpec, TensorSpec
from .candidates import node
from .tiny_graph import tiny_graph


def tree_mask(slots: int | str, positions: bool = False) -> tuple[onnx.ModelProto, GraphSpec]:
    """The graph for a static cache of `slots` slots. With `positions`, for a model that reads `slot_position` [B,L].

    With the letter L for the number, caches of any number are served, and `slots`, 0, 1, ..., L-1, is sent like `beam`.
    """
    inputs = [
        TensorSpec("self_mask", "bool", ("B", "K", slots)),
        TensorSpec("parents", "int64", ("B", "K")),
        TensorSpec("write_index", "int64", ("B",)),
        TensorSpec("beam", "int64", ("K",)),
    ]
    outputs = [TensorSpec("new_self_mask", "bool", ("B", "K", slots))]
    nodes = [
        node("Max", ["parents", "zero"], "row"),
        node("Unsqueeze", ["row", "two"], "rows"),
        node("GatherND", ["self_mask", "rows"], "inherited", batch_dims=1),  # [B, K, L]
        node("GreaterOrEqual", ["parents", "zero"], "goes_on"),
        node("Unsqueeze", ["goes_on", "two"], "going_on"),
        node("And", ["inherited", "going_on"], "ancestors"),
        node("Unsqueeze", ["write_index", "one"], "first_slot"),
        node("Add", ["first_slot", "beam"], "own_slot"),  # [B, K]
        node("Unsqueeze", ["own_slot", "two"], "own_slots"),
        node("Equal", ["slots", "own_slots"], "own"),
        node("Or", ["ancestors", "own"], "new_self_mask"),
    ]
    if positions:
        inputs += [TensorSpec("position", "int64", ("B",)), TensorSpec("slot_position", "int64", ("B", slots))]
        outputs.append(TensorSpec("new_slot_position", "int64", ("B", slots)))
        nodes += [
            node("Unsqueeze", ["position", "one"], "positions"),
            node("GreaterOrEqual", ["slots", "first_slot"], "written_now"),
            node("Where", ["written_now", "positions", "slot_position"], "new_slot_position"),
        ]
    constants = {"zero": np.array([0]), "one": np.array([1]), "two": np.array([2])}
    if isinstance(slots, int):
        constants["slots"] = np.arange(slots)
    else:
        inputs.append(TensorSpec("slots", "int64", (slots,)))
    spec = GraphSpec("tree_mask", tuple(inputs), tuple(outputs))
    return tiny_graph(spec, nodes, constants), spec

"""Graphs that move the state of a decode on its device: sources leave, slots are compacted, new sources take rows.

Each graph moves any number of tensors, `NAME` -> `new_NAME`, in one call. Standard ops, no shapes computed: nothing in
them is left to the host, on any provider. Beside the contract's letters: R rows taken, T slots taken, N newcomers, W
the new source length.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper

from ..contract import GraphSpec, TensorSpec
from .tiny_graph import tiny_graph

ROWS = TensorSpec("rows", "int64", ("R",))
SLOTS = TensorSpec("slots", "int64", ("R", "T"))
PLACES = TensorSpec("rows", "int64", ("B",))
COLUMNS = TensorSpec("columns", "int64", ("W",))
NEW_COLUMNS = TensorSpec("new_columns", "int64", ("W",))


def gather_rows(tensors: Sequence[TensorSpec]) -> tuple[onnx.ModelProto, GraphSpec]:
    """Tensors [B,...] and rows [R] -> [R,...]."""
    moved = [moved_tensor(tensor, {"B": "R"}) for tensor in tensors]
    spec = GraphSpec("gather_rows", (*tensors, ROWS), tuple(moved))
    nodes = [
        helper.make_node("Gather", [tensor.name, ROWS.name], [f"new_{tensor.name}"], f"{tensor.name}/rows", axis=0)
        for tensor in tensors
    ]
    return tiny_graph(spec, nodes), spec


def gather_slots(tensors: Sequence[TensorSpec]) -> tuple[onnx.ModelProto, GraphSpec]:
    """Caches [B,H,L,E], rows [R] and slots [R,T] -> [R,H,T,E].

        rows [R] -> [R,1,1,1] * (1,0,0)    \\
        heads       [1,H,1,1] * (0,1,0)      + -> places [R,H,T,3] -> GatherND, a copy of E numbers each
        slots [R,T] -> [R,1,T,1] * (0,0,1) /
    """
    heads = tensors[0].axes[1]
    assert isinstance(heads, int)
    assert all(tensor.axes[1] == heads for tensor in tensors)
    moved = [moved_tensor(tensor, {"B": "R", "L": "T", "M": "T"}) for tensor in tensors]
    spec = GraphSpec("gather_slots", (*tensors, ROWS, SLOTS), tuple(moved))
    row, head, slot = np.eye(3, dtype=np.int64)
    constants = {
        "row_axes": np.array([1, 2, 3]),
        "slot_axes": np.array([1, 3]),
        "row": row,
        "slot": slot,
        "heads": np.arange(heads)[None, :, None, None] * head,
    }
    nodes = [
        helper.make_node("Unsqueeze", [ROWS.name, "row_axes"], ["row_column"], "places/row"),
        helper.make_node("Unsqueeze", [SLOTS.name, "slot_axes"], ["slot_column"], "places/slot"),
        helper.make_node("Mul", ["row_column", "row"], ["row_places"], "places/rows"),
        helper.make_node("Mul", ["slot_column", "slot"], ["slot_places"], "places/slots"),
        helper.make_node("Add", ["row_places", "heads"], ["head_places"], "places/heads"),
        helper.make_node("Add", ["head_places", "slot_places"], ["places"], "places"),
        *(
            helper.make_node("GatherND", [tensor.name, "places"], [f"new_{tensor.name}"], f"{tensor.name}/slots")
            for tensor in tensors
        ),
    ]
    return tiny_graph(spec, nodes, constants), spec


def put_rows(tensors: Sequence[TensorSpec]) -> tuple[onnx.ModelProto, GraphSpec]:
    """Tensors [B,...,S,...] and newcomers `put_NAME` [N,...,P,...] -> [B,...,W,...], each row from one of the two.

    Row b of the output is row `rows[b]` of the tensor and, after its B rows, of the newcomers. Column w is column
    `columns[w]` of the tensor and `new_columns[w]` of the newcomers; -1: zeros.

        tensor    -> one column of zeros appended -> columns     \\
                                                                  concatenated -> rows
        newcomers -> one column of zeros appended -> new_columns /
    """
    moved = [moved_tensor(tensor, {"S": "W"}) for tensor in tensors]
    newcomers = [TensorSpec(f"put_{t.name}", t.dtype, renamed(t.axes, {"B": "N", "S": "P"})) for t in tensors]
    spec = GraphSpec("put_rows", (*tensors, *newcomers, PLACES, COLUMNS, NEW_COLUMNS), tuple(moved))
    nodes, constants = [], {}
    for tensor in tensors:
        name, axis = tensor.name, tensor.axes.index("S")
        behind = [0] * (2 * len(tensor.axes))
        behind[len(tensor.axes) + axis] = 1
        pads = f"{name}/pads"
        constants[pads] = np.array(behind)
        for part, columns in ((name, COLUMNS.name), (f"put_{name}", NEW_COLUMNS.name)):
            nodes.append(helper.make_node("Pad", [part, pads], [f"{part}/padded"], f"{part}/pad"))
            nodes.append(
                helper.make_node("Gather", [f"{part}/padded", columns], [f"{part}/fit"], f"{part}/columns", axis=axis)
            )
        both = [f"{name}/fit", f"put_{name}/fit"]
        nodes.append(helper.make_node("Concat", both, [f"{name}/both"], f"{name}/both", axis=0))
        nodes.append(helper.make_node("Gather", [f"{name}/both", PLACES.name], [f"new_{name}"], f"{name}/rows", axis=0))
    return tiny_graph(spec, nodes, constants), spec


def put_places(batch: int, rows: np.ndarray) -> np.ndarray:
    """Rows [N] that new sources take in a batch of this size -> `rows` of `put_rows`, [B]."""
    places = np.arange(batch)
    places[rows] = batch + np.arange(len(rows))
    return places


def put_columns(length: int, width: int) -> np.ndarray:
    """The columns that make a source of some length one of `width`: `columns` or `new_columns` of `put_rows`, [W]."""
    columns = np.arange(width)
    columns[length:] = -1
    return columns


def moved_tensor(tensor: TensorSpec, letters: dict[str, str]) -> TensorSpec:
    return TensorSpec(f"new_{tensor.name}", tensor.dtype, renamed(tensor.axes, letters))


def renamed(axes: tuple[str | int, ...], letters: dict[str, str]) -> tuple[str | int, ...]:
    return tuple(letters.get(axis, axis) if isinstance(axis, str) else axis for axis in axes)

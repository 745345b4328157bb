"""Weights as operators read them: float as stored, or int8 with the scales of their outputs.

weight.int8, weight.scale -> DequantizeLinear -> weight -> MatMul        an operator reads what is stored
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx
from onnx import NodeProto, TensorProto, helper

from ..artifact.graph_files import external_of
from ..ort_form import FileWeight
from .graph_view import GraphView, attributes_of, require
from .ops import DOMAIN, PROGRAMS


@dataclass(frozen=True)
class StoredWeight:
    """The names of a weight and, if it is int8, of its scales; its shape."""

    name: str
    scale: str
    dims: tuple[int, int]


def stored_weight(view: GraphView, name: str, outputs: int) -> StoredWeight:
    """The weight that a tensor is or is restored from; `outputs` is the axis of the product's outputs."""
    if name in view.weights:
        rows, columns = dims_of(view, name, TensorProto.FLOAT)
        return StoredWeight(name, "", (rows, columns))
    restoring = view.maker(name, "DequantizeLinear")
    require(len(restoring.input) == 2 and attributes_of(restoring).get("axis", 1) == outputs)
    numbers, scale = restoring.input
    dims = dims_of(view, numbers, TensorProto.INT8)
    require(view.is_weight(scale, dims[outputs]))  # of blocks they have two axes
    return StoredWeight(numbers, scale, dims)


def dims_of(view: GraphView, name: str, element: int) -> tuple[int, int]:
    weight = view.weights.get(name)
    dims = () if weight is None or weight.data_type != element else tuple(weight.dims)
    require(len(dims) == 2)
    rows, columns = dims
    return rows, columns


def weights_read(node: NodeProto) -> list[str]:
    """The weights that an operator, or those of a program, packs: the second input of each."""
    if node.op_type not in PROGRAMS:
        return list(node.input[1:2])
    wires = [value.decode() for name, value in attributes_of(node).items() if name.endswith(".inputs")]
    places = {int(places[1]) for places in (text.split() for text in wires) if len(places) > 1}
    return [node.input[place] for place in sorted(places) if 0 <= place < len(node.input)]


def file_weights(graph: onnx.GraphProto) -> tuple[FileWeight, ...]:
    """The weights of fused operators that are in files beside the graph."""
    read = {name for node in graph.node if node.domain == DOMAIN for name in weights_read(node)}
    found = []
    for tensor in graph.initializer:
        if tensor.name in read and tensor.data_location == TensorProto.EXTERNAL:
            file, offset, _ = external_of(tensor)
            kind = helper.tensor_dtype_to_np_dtype(tensor.data_type).name
            found.append(FileWeight(tensor.name, file, kind, tuple(tensor.dims), offset))
    return tuple(found)

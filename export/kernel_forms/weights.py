"""Weights as operators read them: float as stored, or int8 with the scales of their outputs.

weight.int8, weight.scale -> DequantizeLinear -> weight -> MatMul        an operator reads what is stored
"""

from __future__ import annotations

from dataclasses import dataclass

from onnx import TensorProto

from .graph_view import GraphView, attributes_of, require


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

"""A graph as passes of fused operators read it: who makes and who reads a tensor, and what small constants contain.

A pass follows a pattern node by node. Where the graph has another node than the pattern, `Mismatch` ends the search,
and the nodes stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from ..graph_index import makers_of, readers_of, replace_nodes
from .shapes import Shape

SMALL = 16  # most numbers of a constant that is read


class Mismatch(Exception):
    """The graph is not as the pattern has it."""


def require(fits: bool) -> None:
    if not fits:
        raise Mismatch


@dataclass(frozen=True)
class Fusion:
    """Nodes of a graph, and the one that takes their place."""

    replaced: tuple[NodeProto, ...]
    node: NodeProto


class GraphView:
    """Makers, readers, constants and, where they are given, shapes of a graph that is not changed meanwhile."""

    def __init__(self, graph: onnx.GraphProto, shapes: Mapping[str, Shape] | None = None):
        self.shapes = shapes or {}
        self.makers = makers_of(graph.node)
        self.readers = readers_of(graph.node)
        self.outputs = {value.name for value in graph.output}
        self.weights = {weight.name: weight for weight in graph.initializer}
        self.ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in graph.input}

    def maker(self, name: str, *kinds: str) -> NodeProto:
        """The node of one of these kinds that makes a tensor."""
        found = self.makers.get(name)
        if found is None or found.op_type not in kinds or found.domain:
            raise Mismatch
        return found

    def reader(self, name: str, *kinds: str) -> NodeProto:
        """The node of one of these kinds that alone reads a tensor, which is no output of the graph."""
        found = self.readers.get(name, [])
        if name in self.outputs or len(found) != 1 or found[0].op_type not in kinds or found[0].domain:
            raise Mismatch
        return found[0]

    def numbers(self, name: str) -> np.ndarray:
        """A small constant. Weights are never read: they may not be loaded."""
        weight = self.weights.get(name)
        if weight is None or weight.data_location == TensorProto.EXTERNAL or prod(weight.dims) > SMALL:
            raise Mismatch
        return numpy_helper.to_array(weight)

    def ints(self, name: str) -> list[int]:
        """A small constant of integers."""
        return [int(number) for number in self.numbers(name).reshape(-1)]

    def sizes(self, reshape: NodeProto) -> list[int]:
        """The constant shape of a Reshape; 0 is an axis that it keeps."""
        require(not attributes_of(reshape).get("allowzero", 0))
        return self.ints(reshape.input[1])

    def is_weight(self, name: str, *sizes: int, element: int = TensorProto.FLOAT) -> bool:
        """Whether it is a stored weight of this type and shape."""
        weight = self.weights.get(name)
        return weight is not None and weight.data_type == element and tuple(weight.dims) == sizes

    def other(self, node: NodeProto, name: str) -> str:
        """The other one of a node's two inputs."""
        require(len(node.input) == 2 and name in node.input)
        return node.input[1] if node.input[0] == name else node.input[0]

    def scaled(self, name: str) -> tuple[str, float, list[NodeProto]]:
        """A tensor that may be another one times a constant -> that one, the constant, the node that multiplies."""
        made = self.makers.get(name)
        if made is None or made.op_type != "Mul" or made.input[1] not in self.weights:
            return name, 1.0, []
        factor = self.numbers(made.input[1])
        require(factor.size == 1 and factor.dtype == np.float32)
        return made.input[0], float(factor.reshape(())), [made]

    def check_closed(self, nodes: Collection[NodeProto], result: str, shown: Collection[str] = ()) -> None:
        """Other nodes read only the `result` of these. Those `shown` may be outputs of the graph, as it may."""
        inside = {node.output[0] for node in nodes}
        for name in (name for node in nodes for name in node.output if name != result):
            require(name in shown or name not in self.outputs)
            require(all(reader.output[0] in inside for reader in self.readers.get(name, [])))


def attributes_of(node: NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def check_attributes(node: NodeProto, **wanted: Any) -> None:
    have = attributes_of(node)
    require(all(have.get(name) == value for name, value in wanted.items()))


def replace_fused(graph: onnx.GraphProto, fusions: Iterable[Fusion]) -> None:
    """Puts fused nodes at the places of the last nodes that they replace, in place: all they read is made by then."""
    places = {node.output[0]: place for place, node in enumerate(graph.node)}
    made: dict[int, NodeProto] = {}
    unread: set[int] = set()
    for fusion in fusions:
        taken = [places[node.output[0]] for node in fusion.replaced]
        unread.update(taken)
        made[max(taken)] = fusion.node
    nodes = [made.get(place, node) for place, node in enumerate(graph.node) if place in made or place not in unread]
    replace_nodes(graph, nodes)


def drop_unread_nodes(graph: onnx.GraphProto) -> None:
    """Removes nodes of which nobody reads anything, in place."""
    read = {value.name for value in graph.output}
    kept: list[NodeProto] = []
    for node in reversed(graph.node):
        if read.intersection(node.output):
            kept.append(node)
            read.update(node.input)
    replace_nodes(graph, reversed(kept))

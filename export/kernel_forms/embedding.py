"""The embedding of tokens, scaled and with positions, as one operator.

    tokens [B,Q] -> Gather(table [V,D]) -> Mul(factor) -> Add -> x [B,Q,D]
    place        -> Gather(positions [P,D]) -------------/       (Shape -> Range -> place: counted by the operator)
    becomes
    tokens, table, positions, place -> Embedding -> x

Factor and positions are optional. A table in int8 makes EmbeddingInt8.

    table.int8, table.scale -> DequantizeLinear -> table        is read by the operator as it is stored
"""

from __future__ import annotations

from typing import Any

import onnx
from onnx import NodeProto, TensorProto

from . import ops
from .graph_view import (
    Fusion,
    GraphView,
    Mismatch,
    attributes_of,
    check_attributes,
    drop_unread_nodes,
    replace_fused,
    require,
)
from .weights import stored_weight


def fuse_embeddings(graph: onnx.GraphProto) -> None:
    """Replaces all lookups of tokens in a stored table, in place. Only inputs of the graph are looked up: those are
    ids of tokens, [B,Q]."""
    view = GraphView(graph)
    fusions = []
    for lookup in [node for node in graph.node if node.op_type == "Gather" and view.ranks.get(node.input[1]) == 2]:
        try:
            fusions.append(fused_embedding(view, lookup))
        except Mismatch:
            continue
    replace_fused(graph, fusions)
    drop_unread_nodes(graph)  # DequantizeLinear, and what made a place


def fused_embedding(view: GraphView, lookup: NodeProto) -> Fusion:
    """A lookup and what follows it; raises Mismatch if it is none of a table by rows."""
    check_rows(lookup)
    table = stored_weight(view, lookup.input[0], outputs=0)
    arguments: dict[str, Any] = {"tokens": lookup.input[1], "table": table.name, "scale": table.scale}
    nodes, end = [lookup], lookup.output[0]
    for follow in (factor, positions):
        try:
            link, found = follow(view, end, table.dims[1])
        except Mismatch:
            continue
        nodes += link
        end = link[-1].output[0]
        arguments |= found
    return Fusion(tuple(nodes), ops.embedding(lookup.name, end, **arguments))


def check_rows(lookup: NodeProto) -> None:
    require(attributes_of(lookup).get("axis", 0) == 0)


def factor(view: GraphView, end: str, width: int) -> tuple[list[NodeProto], dict[str, Any]]:
    node = view.reader(end, "Mul")
    found = view.numbers(view.other(node, end))
    require(found.size == 1 and found.dtype == "float32")
    return [node], {"factor": float(found.reshape(()))}


def positions(view: GraphView, end: str, width: int) -> tuple[list[NodeProto], dict[str, Any]]:
    """Rows of a stored table. A place [B] for all tokens of a source need not get an axis of its own."""
    add = view.reader(end, "Add")
    lookup = view.maker(view.other(add, end), "Gather")
    check_rows(lookup)
    view.reader(lookup.output[0], "Add")
    table, place = lookup.input
    weight = view.weights.get(table)
    require(weight is not None and weight.data_type == TensorProto.FLOAT and list(weight.dims[1:]) == [width])
    for shorter in (of_sources, of_columns):
        try:
            place = shorter(view, place)
            break
        except Mismatch:
            pass  # it has an axis for the tokens
    return [lookup, add], {"positions": table, "place": place}


def of_sources(view: GraphView, place: str) -> str:
    """A place [B] for all tokens of a source, as it is before it gets an axis of its own."""
    widened = view.maker(place, "Unsqueeze")
    require(view.ints(widened.input[1]) == [1] and view.ranks.get(widened.input[0]) == 1)
    return widened.input[0]


def of_columns(view: GraphView, place: str) -> str:
    """Nothing, where places are 0, 1, 2, ... of all columns of an input [B,S]."""
    widened = view.maker(place, "Unsqueeze")
    counted = view.maker(widened.input[0], "Range")
    first, end, step = counted.input
    require(view.ints(widened.input[1]) == [0] and view.ints(first) == [0] and view.ints(step) == [1])
    shape = view.maker(view.maker(end, "Squeeze").input[0], "Shape")
    check_attributes(shape, start=1, end=2)
    require(view.ranks.get(shape.input[0]) == 2)
    return ""

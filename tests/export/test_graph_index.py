"""Makers, readers and edits of a graph, on one of four nodes that can be followed by eye."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from seq2engine.export.graph_index import (
    copy_of,
    drop_unread_weights,
    makers_of,
    names_read,
    readers_of,
    rename_inputs,
    rename_outputs,
    replace_nodes,
)


def small_model():
    """x -> a -> (b, c) -> y, with weights v (of b) and w (of no node)."""
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="make_a"),
        helper.make_node("Add", ["a", "v"], ["b"], name="make_b"),
        helper.make_node("Neg", ["a"], ["c"], name="make_c"),
        helper.make_node("Mul", ["b", "c"], ["y"], name="make_y"),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    weights = [numpy_helper.from_array(np.ones(1, np.float32), name) for name in ("v", "w")]
    return helper.make_model(helper.make_graph(nodes, "small", values[:1], values[1:], weights))


def test_makers_and_readers():
    nodes = small_model().graph.node
    assert {name: node.name for name, node in makers_of(nodes).items()} == {n: f"make_{n}" for n in "abcy"}
    assert [node.name for node in readers_of(nodes)["a"]] == ["make_b", "make_c"]
    assert "y" not in readers_of(nodes)
    assert names_read(nodes) == {"x", "a", "v", "b", "c"}


def test_edits_of_a_copy_leave_the_graph_alone():
    model = small_model()
    made = copy_of(model)
    rename_inputs(made.graph.node, {"a": "z"})
    rename_outputs(made.graph.node, {"a": "z"})
    assert "a" not in makers_of(made.graph.node)
    assert [node.name for node in readers_of(made.graph.node)["z"]] == ["make_b", "make_c"]
    assert model == small_model()


def test_a_graph_may_be_given_nodes_of_its_own():
    graph = small_model().graph
    replace_nodes(graph, (node for node in graph.node if node.name != "make_c"))
    assert [node.name for node in graph.node] == ["make_a", "make_b", "make_y"]


def test_only_weights_that_are_read_stay():
    graph = small_model().graph
    drop_unread_weights(graph)
    assert [weight.name for weight in graph.initializer] == ["v"]

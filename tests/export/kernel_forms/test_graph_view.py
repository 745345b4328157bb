"""Following patterns through a graph, and putting fused nodes into it."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from seq2engine.export.kernel_forms import ops
from seq2engine.export.kernel_forms.graph_view import Fusion, GraphView, Mismatch, drop_unread_nodes, replace_fused

TEXT = """
g (float[N] x, float[N] z) => (float[N] y, float[N] b) {
    a = Relu(x) unread = Neg(z) also = Abs(unread) b = Mul(a, half) c = Neg(z) y = Add(b, c)
}
"""


@pytest.fixture
def model(graph_of) -> onnx.ModelProto:
    return graph_of(TEXT, half=np.array([0.5], dtype=np.float32), large=(40,))


def test_makers_and_readers_are_of_a_kind_or_there_is_no_match(model):
    view = GraphView(model.graph)
    assert view.maker("b", "Add", "Mul").output == ["b"]
    assert view.reader("a", "Mul").output == ["b"]
    for name in ("x", "b", "nothing"):
        with pytest.raises(Mismatch):
            view.maker(name, "Relu")
    with pytest.raises(Mismatch):
        view.reader("z", "Neg")  # by two nodes
    with pytest.raises(Mismatch):
        view.reader("b", "Add")  # an output as well


def test_only_small_constants_in_the_graph_are_read(model):
    view = GraphView(model.graph)
    assert view.numbers("half") == [0.5]
    assert view.scaled("b") == ("a", 0.5, [view.makers["b"]])
    assert view.scaled("a") == ("a", 1.0, [])
    with pytest.raises(Mismatch):
        view.numbers("large")
    model.graph.initializer[0].data_location = TensorProto.EXTERNAL
    with pytest.raises(Mismatch):
        view.numbers("half")


def test_a_fused_node_stands_where_all_it_reads_is_made(model):
    view = GraphView(model.graph)
    made = ops.node("Fused", ["x", "c", ""], ["y"], "fused")
    assert list(made.input) == ["x", "c"]
    replace_fused(model.graph, [Fusion((view.makers["a"], view.makers["y"]), made)])
    assert [node.output[0] for node in model.graph.node] == ["unread", "also", "b", "c", "y"]
    assert model.graph.node[-1] == made


def test_nodes_that_nobody_reads_are_dropped(model):
    drop_unread_nodes(model.graph)
    assert [node.output[0] for node in model.graph.node] == ["a", "b", "c", "y"]

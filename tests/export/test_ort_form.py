"""A formed graph and the list of its weights survive being kept."""

from __future__ import annotations

from seq2engine.export.ort_form import FileWeight, FormedGraph, formed_from_bytes


def test_a_formed_graph_is_read_back_as_it_was():
    weights = FileWeight("a", "step.onnx.data", "float32", (4, 6), 64), FileWeight("ü", "x", "int8", (2,), 0)
    for graph in (FormedGraph(b"\n\0one\ntwo", weights), FormedGraph(b"", weights[:1]), FormedGraph(b"{}")):
        assert formed_from_bytes(graph.to_bytes()) == graph

"""A graph that cannot be put into a form, opened or run is a finding with its place: a report is written."""

from __future__ import annotations

import dataclasses
import json

import pytest
from onnx import helper
from support.fuzzing.hashes import mend_hashes
from support.mutations import Mutation, before, good_bundle, node, wrong_copy
from support.parity_cases import SMALL
from support.weight_mutations import WEIGHT_MUTATIONS

from seq2engine.common.reports import latest_report
from seq2engine.errors import GraphError
from seq2engine.runtime.opening import open_session

SMALLEST = dataclasses.replace(SMALL, encoder_layers=1)
FLAGS = ("--count", 2, "--max-length", 4, "--beam", 2, "--threads", 1, "--quiet")


def no_such_op(graph):
    node(graph, "encoder.0.self_attn/Softmax").op_type = "NoSuchOp"


def heads_by_another_way(graph):
    """The key-transposing form expects heads that are a Transpose of a Reshape."""
    product = next(n for n in graph.node if n.name.startswith("decoder.1.cross_attn/MatMul"))
    before(graph, product, helper.make_node("Identity", [product.input[0]], ["aside"], name="aside"))
    product.input[0] = "aside"


STOPPING = {  # the level that fails besides weights, and where the fault is
    "cannot run": (WEIGHT_MUTATIONS["cross keys and values swapped"], "steps", "decoder.1.cross_attn/Transpose.1"),
    "cannot be opened": (Mutation("encoder", no_such_op, "encoder.0", ()), "graphs", "encoder.0.self_attn/Softmax"),
    "no form": (Mutation("decoder_step", heads_by_another_way, "decoder.1", ()), "graphs", "decoder.1.cross_attn/"),
}


@pytest.mark.parametrize("name", STOPPING)
def test_a_graph_that_stops_has_a_verdict_and_a_report(tmp_path, cli, name):
    mutation, level, where = STOPPING[name]
    wrong = wrong_copy(good_bundle(SMALLEST, mutation, tmp_path / "good"), tmp_path / "wrong", mutation)
    code, out, err = cli("parity", wrong.root, *FLAGS)
    assert code == 1
    assert "Traceback" not in err
    assert "parity FAILED" in out, err
    assert where in next(line for line in out.splitlines() if line.startswith("located: "))
    values = json.loads(latest_report(wrong.root, "parity", ".json").read_text())
    assert values["stopped"]["level"] == level
    assert values["finding"]["layer"] == mutation.layer
    assert latest_report(wrong.root, "parity", ".html").exists()


def test_a_file_that_holds_no_graph_has_a_verdict_and_a_report(tmp_path, cli):
    mutation = STOPPING["cannot be opened"][0]
    wrong = wrong_copy(good_bundle(SMALLEST, mutation, tmp_path / "good"), tmp_path / "wrong", mutation)
    wrong.graph_path("fp32", "encoder").write_bytes(b"\xff" * 100)
    mend_hashes(wrong.root)
    code, out, err = cli("parity", wrong.root, *FLAGS)
    assert (code, err) == (1, "")
    assert "encoder.onnx cannot be used as a graph (it is not an ONNX file)" in out
    assert latest_report(wrong.root, "parity", ".html").exists()


def test_a_session_names_the_node_that_cannot_run(tmp_path):
    mutation = WEIGHT_MUTATIONS["cross keys and values swapped"]
    wrong = wrong_copy(good_bundle(SMALLEST, mutation, tmp_path / "good"), tmp_path / "wrong", mutation)
    from seq2engine.runtime.generate import generate

    with (
        open_session(wrong, "onnxruntime", "fp32", threads=1) as session,
        pytest.raises(GraphError, match="cannot run the decoder_step") as caught,
    ):
        generate(session, [[5, 6, 7]])
    assert (caught.value.graph, caught.value.node) == ("decoder_step", "decoder.1.cross_attn/CrossAttention")

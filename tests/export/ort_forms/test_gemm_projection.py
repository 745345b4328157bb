"""The output projection as one Gemm: the same logits, with or without a bias, tied or not, in a branch or not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.rounding import sum_error

from seq2engine.export.ort_forms.gemm_projection import branches_of, gemm_projection
from seq2engine.export.ort_forms.screened_argmax import screened_graph
from seq2engine.export.ort_forms.top_candidates import candidate_graph

WIDTH, VOCAB = 24, 301


def step_of(tied: bool, biased: bool) -> onnx.ModelProto:
    """A decoder step that only projects, as the exporter writes it: a tied table is [V,D], any other weight [D,V]."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(VOCAB, WIDTH) if tied else (WIDTH, VOCAB)).astype(np.float32)
    transpose = helper.make_node("Transpose", ["w"], ["output/Transpose"], name="output/Transpose", perm=[1, 0])
    product = "output/MatMul" if biased else "logits"
    nodes = [
        *([transpose] if tied else []),
        helper.make_node("MatMul", ["x", "output/Transpose" if tied else "w"], [product], name="output/MatMul"),
        *([helper.make_node("Add", [product, "bias"], ["logits"], name="output/Add")] if biased else []),
    ]
    graph = helper.make_graph(
        nodes,
        "decoder_step",
        [
            helper.make_tensor_value_info("tokens", TensorProto.INT64, ["B", "K"]),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", "K", WIDTH]),
        ],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", "K", VOCAB])],
        [
            numpy_helper.from_array(weight, "w"),
            *([numpy_helper.from_array(rng.normal(size=VOCAB).astype(np.float32), "bias")] if biased else []),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def run(model: onnx.ModelProto, given: dict[str, np.ndarray]) -> np.ndarray:
    onnx.checker.check_model(model)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(["logits"], given)[0]


def kinds_of(graph: onnx.GraphProto) -> list[str]:
    return [node.op_type for part in (graph, *branches_of(graph)) for node in part.node]


FORMS = [(False, False), (True, False), (True, True)]  # only tables that are stored by rows are screened


@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("tied", "screened"), FORMS, ids=["", "tied", "screened"])
def test_logits_are_the_same_with_one_product(tied: bool, biased: bool, screened: bool) -> None:
    plain = candidate_graph(step_of(tied, biased))
    given = {"tokens": np.zeros((3, 2), dtype=np.int64)}
    given["x"] = np.random.default_rng(1).normal(size=(3, 2, WIDTH)).astype(np.float32)
    expected = run(plain, given)
    before = screened_graph(plain, Path("/nowhere")) if screened else plain
    made = gemm_projection(before)
    if screened:
        given["wanted"] = np.array([0])
    found = run(made, given)
    assert found.shape == (6, VOCAB), "a Reshape to an output would copy it"
    found = found.reshape(expected.shape)
    weight = numpy_helper.to_array(plain.graph.initializer[0])
    lengths = np.linalg.norm(weight, axis=int(tied)) * np.linalg.norm(given["x"], axis=-1, keepdims=True)
    assert (np.abs(found - expected) <= sum_error(WIDTH + 1) * (lengths + np.abs(expected))).all()
    kinds = kinds_of(made.graph)
    assert kinds.count("Gemm") == kinds_of(before.graph).count("Gemm") + 1
    assert "Transpose" not in kinds, "the table is read as it is stored"


def test_other_logits_stay_as_they_are() -> None:
    model = step_of(tied=False, biased=False)
    model.graph.node[0].op_type = "Add"
    made = gemm_projection(model)
    assert made.SerializeToString(deterministic=True) == model.SerializeToString(deterministic=True)

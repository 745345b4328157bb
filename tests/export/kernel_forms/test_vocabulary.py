"""The output projection as one node that finds the best tokens: the same logits and candidates as without it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.kernel_checks import SCALED, attributes, check_nodes, fused_nodes, run_kernels
from support.rounding import FP32, apart, exp_sum_error, sum_error

from seq2engine.export.kernel_forms import vocabulary
from seq2engine.export.kernel_forms.vocabulary import fits, fuse_vocabulary
from seq2engine.export.ort_forms.int8_matmul import STEPS_OF, row_products
from seq2engine.export.ort_forms.interface import CANDIDATES, WANTED
from seq2engine.export.ort_forms.shortlist import shortlist_graph
from seq2engine.export.ort_forms.top_candidates import candidate_graph
from seq2engine.export.precision.quantise import quantised_graph

WIDTH, VOCAB = 24, 301
NAMES = ["logits", *(tensor.name for tensor in CANDIDATES)]


def step_of(tied: bool, biased: bool, before: str = "") -> onnx.ModelProto:
    """A decoder step that only projects, as the exporter writes it: a tied table is [V,D], any other weight [D,V].

    `before`: x is multiplied by a constant of that name first.
    """
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(VOCAB, WIDTH) if tied else (WIDTH, VOCAB)).astype(np.float32)
    arrays = {
        "output.weight": weight,
        "output.bias": rng.normal(size=VOCAB).astype(np.float32),
        "smoothing": np.exp2(rng.integers(-2, 3, WIDTH)).astype(np.float32),
        "number": np.array(0.25, dtype=np.float32),
    }
    product = "output/MatMul" if biased else "logits"
    read = "output/Transpose" if tied else "output.weight"
    nodes = [
        *([node("Transpose", ["output.weight"], "output/Transpose", perm=[1, 0])] if tied else []),
        *([node("Mul", ["x", before], "scaled")] if before else []),
        node("MatMul", ["scaled" if before else "x", read], product, name="output/MatMul"),
        *([node("Add", [product, "output.bias"], "logits", name="output/Add")] if biased else []),
    ]
    used = {name for one in nodes for name in one.input}
    inputs = {"tokens": (TensorProto.INT64, ["B", "K"]), "x": (TensorProto.FLOAT, ["B", "K", WIDTH])}
    graph = helper.make_graph(
        nodes,
        "decoder_step",
        [helper.make_tensor_value_info(name, *value) for name, value in inputs.items()],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", "K", VOCAB])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items() if name in used],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def node(op: str, inputs: list[str], output: str, name: str = "", **options) -> onnx.NodeProto:
    return helper.make_node(op, inputs, [output], name=name or output, **options)


def feeds_of(beams: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(1).normal(size=(3, beams, WIDTH)).astype(np.float32)
    return {"tokens": np.zeros((3, beams), dtype=np.int64), "x": x}


def fused(model: onnx.ModelProto, screened: bool = True) -> onnx.ModelProto:
    made = onnx.ModelProto()
    made.CopyFrom(model)
    fuse_vocabulary(made, screened=screened)
    made.opset_import.append(helper.make_opsetid("seq2engine", 1))
    onnx.checker.check_model(made)
    return made


@pytest.mark.parametrize("int8", [False, True], ids=["fp32", "w8a8"])
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
@pytest.mark.parametrize("wanted", [0, 3, -3])
def test_candidates_are_those_of_all_logits(tied, biased, int8, wanted, run_onnx):
    plain = step_of(tied, biased)
    plain = quantised_graph(plain, "w8a8") if int8 else plain
    assert fits(plain)
    made = fused(plain)
    assert [one.op_type for one in made.graph.node] == ["CandidatesInt8" if int8 else "Candidates"]
    assert made.graph.node[0].name == "output/MatMul"
    feeds = feeds_of(beams=2)
    before = row_products(plain) if int8 else plain
    whole = run_onnx(candidate_graph(before), feeds)
    found = run_kernels(made, {**feeds, WANTED.name: np.array([wanted])})
    assert list(found) == NAMES
    weights = {weight.name: numpy_helper.to_array(weight) for weight in step_of(tied, True).graph.initializer}
    largest = np.abs(whole["logits"]).max() + biased * np.abs(weights["output.bias"]).max()
    table = np.linalg.norm(weights["output.weight"], axis=int(tied))
    lengths = np.linalg.norm(feeds["x"], axis=-1).max() * table.max()
    near = (SCALED * largest if int8 else sum_error(WIDTH) * lengths) + apart([(2, FP32)]) * largest
    assert np.array_equal(found["best_tokens"], whole["best_tokens"]), "K+1 are 3"
    np.testing.assert_allclose(found["best_logits"], whole["best_logits"], rtol=0, atol=near)
    if wanted:
        assert np.array_equal(found["logits"], found["best_logits"])
    else:
        np.testing.assert_allclose(found["logits"], whole["logits"], rtol=0, atol=near)
    if wanted <= 0:
        # By Softmax or by blocks: a sum of exponentials, whose logits are as far apart as two of them may be.
        np.testing.assert_allclose(found["exp_sum"], whole["exp_sum"], rtol=2 * near + exp_sum_error(VOCAB))
    assert np.isfinite(found["exp_sum"]).all()


@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
def test_declared_inputs_and_outputs(tied):
    made = fused(step_of(tied, biased=True))
    assert [value.name for value in made.graph.input] == ["tokens", "x", WANTED.name]
    axes = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*made.graph.input, *made.graph.output)
    }
    assert axes["logits"] == ["B", "K", "W"]
    assert axes[WANTED.name] == [1]
    assert [axes[tensor.name] for tensor in CANDIDATES] == [list(tensor.axes) for tensor in CANDIDATES]


def test_only_float_tables_by_rows_are_screened():
    def screened(tied, int8, asked):
        model = step_of(tied, biased=False)
        (one,) = fused_nodes(fused(quantised_graph(model, "w8a8") if int8 else model, asked))
        found = attributes(one)
        assert found["by_rows"] == tied
        return found.get("screened")

    assert screened(True, False, True) == 1
    assert screened(True, False, False) == 0
    assert screened(False, False, True) == 0
    assert screened(True, True, True) is None


@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
def test_only_large_tables_by_rows_have_words(tied, monkeypatch):
    """Of the tables that are screened: a small one is in the cache in fp32, too."""
    assert vocabulary.WORTH_WORDS > VOCAB * WIDTH
    for least, worth in ((VOCAB * WIDTH, True), (VOCAB * WIDTH + 1, False)):
        monkeypatch.setattr(vocabulary, "WORTH_WORDS", least)
        for screened in (False, True):
            (one,) = fused_nodes(fused(step_of(tied, biased=False), screened))
            assert attributes(one)["words"] == (worth and tied and screened)


@pytest.mark.parametrize("int8", [False, True], ids=["fp32", "w8a8"])
@pytest.mark.parametrize("before", ["smoothing", "number"])
def test_what_x_is_multiplied_by(before, int8):
    """A factor of every channel is the operator's; a number, as T5 has it, is a node before it."""
    plain = step_of(True, True, before)
    plain = quantised_graph(plain, "w8a8") if int8 else plain
    made = fused(plain)
    (one,) = fused_nodes(made)
    assert list(one.input[5:]) == (["smoothing"] if before == "smoothing" else [])
    assert one.input[0] == ("x" if before == "smoothing" else "scaled")
    assert len(made.graph.node) == (1 if before == "smoothing" else 2)
    given = {**feeds_of(beams=1), WANTED.name: np.array([0])}
    check_nodes(row_products(plain) if int8 else plain, made, given)


def test_what_an_activation_function_makes_has_its_steps():
    plain = quantised_graph(step_of(True, False, "number"), "w8a8")
    activation = next(one for one in plain.graph.node if one.op_type == "Mul")
    activation.CopyFrom(node("Relu", ["x"], "scaled"))
    (one,) = fused_nodes(fused(plain))
    steps = STEPS_OF["Relu"]
    assert [attributes(one)[name] for name in ("above", "zero", "least")] == [steps.above, steps.zero, steps.least]


@pytest.mark.parametrize("int8", [False, True], ids=["fp32", "w8a8"])
@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
def test_a_shortlist(tied, int8):
    plain = step_of(tied, biased=True)
    plain = shortlist_graph(quantised_graph(plain, "w8a8") if int8 else plain, [5, 7, 11, 13], Path("/nowhere"))
    made = fused(plain)
    found = run_kernels(made, {**feeds_of(beams=1), WANTED.name: np.array([0])})
    assert found["logits"].shape == (3, 1, 4)
    check_nodes(row_products(plain) if int8 else plain, made, {**feeds_of(beams=1), WANTED.name: np.array([0])})


def no_product(model):
    model.graph.node[-1].op_type = "Sub"


def read_elsewhere(model):
    model.graph.node.append(node("Neg", ["logits"], "negated"))
    model.graph.output.append(helper.make_tensor_value_info("negated", TensorProto.FLOAT, None))


def product_read_elsewhere(model):
    model.graph.node.append(node("Neg", ["output/MatMul"], "negated"))
    model.graph.output.append(helper.make_tensor_value_info("negated", TensorProto.FLOAT, None))


def a_short_bias(model):
    bias = next(weight for weight in model.graph.initializer if weight.name == "output.bias")
    bias.CopyFrom(numpy_helper.from_array(np.zeros(1, dtype=np.float32), "output.bias"))


def half_logits(model):
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT16


@pytest.mark.parametrize(
    "change",
    [no_product, read_elsewhere, product_read_elsewhere, a_short_bias, half_logits],
    ids=lambda change: change.__name__,
)
def test_another_projection_does_not_fit_and_stays(change):
    model = step_of(tied=True, biased=True)
    change(model)
    before = model.SerializeToString(deterministic=True)
    assert not fits(model)
    fuse_vocabulary(model, screened=True)
    assert model.SerializeToString(deterministic=True) == before

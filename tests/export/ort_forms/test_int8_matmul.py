"""int8 products as CPUs have them: the numbers, row by row; the rest of the graph; and the model's decodes."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from support.builds import build_engines
from support.rounding import FP32, apart

from seq2engine.errors import BuildError
from seq2engine.export.ort_forms.int8_matmul import SIGNED, STEPS_OF, row_products
from seq2engine.export.precision.quantise import quantised, quantised_graph, scheme_of
from seq2engine.export.to_onnx import graphs_from_model, onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.config import ModelConfig
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.search.options import SearchOptions

# Integers are exact. One becomes a float and is multiplied by three scales, two of which are quotients.
SCALED = apart([(6, FP32)])
STEPS = SIGNED.above
SMALL = ModelConfig(2, 2, 2, 32, 64, 80, 80, max_source=24, max_target=24)


def one_product(inner: int, outer: int, seed: int) -> tuple[onnx.ModelProto, np.ndarray, np.ndarray]:
    """x @ weight with an int8 weight, and the weight's numbers and scales."""
    rng = np.random.default_rng(seed)
    numbers = quantised(rng.normal(size=(inner, outer)).astype(np.float32), 0, scheme_of("w8a8", "int8"))[0]
    scales = rng.uniform(1e-3, 1e-2, outer).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("DequantizeLinear", ["w.int8", "w.scale"], ["w"], name="w", axis=1),
            helper.make_node("MatMul", ["x", "w"], ["y"], name="product"),
        ],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", "K", inner])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", "K", outer])],
        [numpy_helper.from_array(numbers, "w.int8"), numpy_helper.from_array(scales, "w.scale")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    return model, numbers, scales


def run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 70), st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), st.integers(0, 99))
def test_a_product_is_that_of_the_rounded_numbers(inner, outer, batch, beams, seed):
    model, numbers, scales = one_product(inner, outer, seed)
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(batch, beams, inner)) * 10.0 ** rng.integers(-3, 4, (batch, beams, 1))).astype(np.float32)
    x[0, 0] = 0.0  # a row that has no scale
    largest = np.abs(x).max(axis=-1, keepdims=True)
    steps = np.rint(x / np.maximum(largest, 1e-30) * np.float32(STEPS))
    exact = (steps @ numbers.astype(np.float64)) * scales / STEPS * largest
    found = run(row_products(model), x)
    # A number halfway between two steps may go either way: one step of one input.
    slack = SCALED * np.abs(exact) + largest / STEPS * np.abs(numbers).max() * scales.max() * 1.01
    assert np.abs(found - exact).max(initial=0) <= slack.max()
    assert np.array_equal(found[0, 0], np.zeros(outer))
    typical = np.abs(found - exact) <= SCALED * np.abs(exact)
    assert typical.mean() > 0.9


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 33])  # ONNX Runtime has kernels for few rows and for many
@pytest.mark.parametrize("inner", [2, 7, 64, 256])
def test_the_widest_sums_do_not_overflow(rows, inner):
    """Neighbouring weights as large as they get together, activations all at their largest: 16 bits of AVX2 hold it."""
    rng = np.random.default_rng(inner)
    weights = rng.choice([-1.0, -0.5, 0.5, 1.0], (inner, 24)).astype(np.float32)
    weights[:, 0] = 1.0
    numbers, scales = quantised(weights, 0, scheme_of("w8a8", "int8"))
    pairs = numbers[: inner - inner % 2].astype(np.int64).reshape(-1, 2, 24).sum(axis=1)
    assert 126 <= np.abs(pairs).max() <= 128
    model, _, _ = one_product(inner, 24, 0)
    for name, array in (("w.int8", numbers), ("w.scale", scales)):
        next(w for w in model.graph.initializer if w.name == name).CopyFrom(numpy_helper.from_array(array, name))
    found = run(row_products(model), np.ones((1, rows, inner), dtype=np.float32))
    wanted = numbers.astype(np.int64).sum(axis=0) * scales
    # Where weights cancel out the sum is small, and so is what rounding its factors costs.
    assert (np.abs(found - wanted) <= SCALED * np.abs(wanted)).all()


@pytest.mark.parametrize("name", STEPS_OF)
def test_what_an_activation_function_makes_has_most_of_its_steps_above_zero(name, run_onnx):
    """No number is cut off, and the error is that of half a step, which is finer than with steps to either side."""
    steps = STEPS_OF[name]
    model, numbers, scales = one_product(64, 8, 3)
    made = {"Silu": ["Sigmoid", "Mul"]}.get(name, [name])
    nodes = [helper.make_node(made[0], ["z"], ["gate" if name == "Silu" else "x"], name=made[0])]
    nodes += [helper.make_node("Mul", ["z", "gate"], ["x"], name="Mul")] if name == "Silu" else []
    kept = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*nodes, *kept])
    model.graph.input[0].name = "z"
    rng = np.random.default_rng(4)
    z = (rng.normal(size=(1, 40, 64)) * 10.0 ** rng.uniform(-1, 1, (1, 40, 1))).astype(np.float32)
    x = {"Relu": np.maximum(z, 0), "Gelu": gelu(z), "Silu": z / (1 + np.exp(-z))}[name].astype(np.float32)
    scale = np.maximum(x.max(axis=-1, keepdims=True), steps.least)
    assert x.min() >= steps.lowest
    assert (x / scale * steps.above >= -steps.zero - 0.5).all()
    rounded = np.rint(x / scale * steps.above) * scale / steps.above
    exact = rounded.astype(np.float64) @ (numbers * scales.astype(np.float64))
    found = run_onnx(row_products(model), {"z": z})["y"]
    one_step = (scale / steps.above) * np.abs(numbers * scales).max()
    assert (np.abs(found - exact) <= SCALED * np.abs(exact) + 2 * one_step).all()
    assert np.median(np.abs(found - exact)) <= np.median(one_step) / 10  # nearly all go to the same step


def gelu(z: np.ndarray) -> np.ndarray:
    return 0.5 * z * (1 + np.vectorize(math.erf)(z / math.sqrt(2)))


@pytest.mark.parametrize("tied", [True, False])
def test_every_product_of_a_weight_becomes_int8_and_nothing_is_restored(tied):
    config = ModelConfig(1, 2, 2, 16, 24, 40, 40, max_source=8, max_target=8, tie_output=tied)
    for name, graph in graphs_from_model(random_model(config)).items():
        quantised = quantised_graph(graph, "w8a8")
        made = row_products(quantised)
        kinds = [node.op_type for node in made.graph.node]
        weights = [w for w in graph.graph.initializer if len(w.dims) == 2 and w.name.endswith(".weight")]
        products = sum(node.op_type == "MatMul" for node in graph.graph.node) - kinds.count("MatMul")
        assert kinds.count("MatMulIntegerToFloat") == products > 0
        assert "DequantizeLinear" not in kinds
        assert len(weights) > 3
        read = {tensor for node in made.graph.node for tensor in node.input}
        assert all(w.name in read for w in made.graph.initializer if w.name.endswith(".int8")), name


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return onnx_from_model(random_model(SMALL, seed=2), tmp_path_factory.mktemp("w8a8") / "bundle", ("fp32", "w8a8"))


def test_a_product_that_reads_a_looked_up_row_as_it_is(tmp_path):
    """Relative positions, no scale and no norm before the first layer: nothing stands between table and product."""
    values = {"positions": "relative", "scale_embeddings": False, "share_embeddings": False}
    config = dataclasses.replace(SMALL, encoder_layers=1, decoder_layers=1, **values)
    bundle = onnx_from_model(random_model(config, 3), tmp_path / "bundle", ("w8a8",))
    with open_session(bundle, "onnxruntime", "w8a8", threads=1) as session:
        assert len(generate(session, [[5, 6, 7]], SearchOptions(max_length=4))) == 1


def test_outputs_do_not_depend_on_neighbours(bundle):
    rng = np.random.default_rng(0)
    sources = [rng.integers(3, 80, length).tolist() for length in (8, 16, 24, 8, 16)]
    options = SearchOptions(max_length=16, beam=3)
    with open_session(bundle, precision="w8a8", threads=1) as session:
        together = [nbest[0].tokens for nbest in generate(session, sources, options)]
        assert together == [generate(session, [source], options)[0][0].tokens for source in sources]


def test_pytorch_rounds_as_the_graphs_do(bundle):
    rng = np.random.default_rng(1)
    ids, mask = rng.integers(3, 80, (6, 12)), np.ones((6, 12), dtype=bool)
    states = {}
    for backend, precision in (("onnxruntime", "w8a8"), ("torch", "w8a8"), ("torch", "fp64:w8a8")):
        with open_session(bundle, backend, precision, threads=1) as session:
            states[backend, precision] = session.tensor(session.encode(ids, mask), "encoder_states")
    exact = states["torch", "fp64:w8a8"]
    ours, theirs = (np.abs(states[name, "w8a8"] - exact) for name in ("onnxruntime", "torch"))
    assert 1e-4 < np.median(theirs) < 0.05, "activations are rounded"
    assert np.median(ours) < 1.2 * np.median(theirs)
    assert ours.max() < 2 * theirs.max()


def test_an_engine_is_refused(bundle):
    with pytest.raises(BuildError, match=r"sm89 cannot run w8a8 .*; build with: .* --precision int8"):
        build_engines(bundle, ["sm89"], precision="w8a8")

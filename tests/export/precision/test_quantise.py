"""Weights in fewer bits: how far they may move, where their scales lie, and that the graphs still run and build."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from onnx import TensorProto, helper, numpy_helper

from seq2engine.errors import ExportError
from seq2engine.export.contract import CACHE_FORMS, PRECISIONS, QUANTISED, STORED, VOCABULARY, graph_specs
from seq2engine.export.precision.passes import PASSES
from seq2engine.export.precision.quantise import (
    SCHEMES,
    block_of,
    magnitudes,
    quantised,
    quantised_graph,
    restored,
    scheme_of,
    weights_from_graph,
)
from seq2engine.export.to_onnx import graphs_from_model
from seq2engine.model.checkpoint import random_model

MODEL = random_model("tiny", 5)
NUMBERS = st.floats(-1000, 1000, width=32)


@pytest.fixture(scope="module")
def graphs():
    return {form: graphs_from_model(MODEL, form) for form in CACHE_FORMS}


@settings(deadline=None)
@given(
    array=arrays(np.float32, (32, 8), elements=NUMBERS),
    name=st.sampled_from(sorted(SCHEMES)),
    summed=st.sampled_from([0, 1]),
    blocked=st.booleans(),
)
def test_no_weight_moves_further_than_rounding(array, name, summed, blocked):
    """By half a step of the scale's largest weight, or of the least step that fp16 has."""
    block = (16 if summed == 0 else 4) if blocked else None
    numbers, scales = quantised(array, summed, SCHEMES[name], block)
    assert numbers.shape == array.shape
    assert np.array_equal(scales, scales.astype(np.float16).astype(np.float32))  # fp16 holds them as they are
    parts = {None: 1, 16: 2, 4: 2}[block]
    assert scales.size == array.shape[1 - summed] * parts
    made = restored(numbers, scales, summed if block else 1 - summed, block or 0)
    size = block or array.shape[summed]
    shape = (*array.shape[:summed], array.shape[summed] // size, size, *array.shape[summed + 1 :])
    largest = np.abs(array.reshape(shape)).max(axis=summed + 1, keepdims=True)
    room = 1.01 * SCHEMES[name].rounding * largest + 2.0**-24
    assert (np.abs(made - array).reshape(shape) <= room).all()


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize(("summed", "block"), [(0, None), (1, None), (0, 16), (1, 16)])
def test_we_restore_as_onnx_runtime_does(precision, summed, block, run_onnx):
    rng = np.random.default_rng(1)
    numbers, scales = quantised(rng.normal(size=(32, 48)).astype(np.float32), summed, SCHEMES[STORED[precision]], block)
    axis = summed if block else 1 - summed
    weights = [numpy_helper.from_array(numbers, "n"), numpy_helper.from_array(scales, "s")]
    node = helper.make_node(
        "DequantizeLinear", ["n", "s"], ["y"], axis=axis, **({"block_size": block} if block else {})
    )
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [32, 48])
    graph = helper.make_graph([node], "g", [], [output], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    np.testing.assert_array_equal(run_onnx(model, {})["y"], restored(numbers, scales, axis, block or 0))


@pytest.mark.parametrize("precision", QUANTISED)
def test_every_weight_of_the_model_is_there_once_and_rounded(precision, graphs):
    before = graphs["static"]["decoder_step"].SerializeToString(deterministic=True)
    found = {}
    for graph in graphs["static"].values():
        found |= weights_from_graph(quantised_graph(graph, precision))
    assert graphs["static"]["decoder_step"].SerializeToString(deterministic=True) == before
    tables = ("source_embedding.tokens.weight", "target_embedding.tokens.weight", "output.weight")
    wanted = {n: p.detach().numpy() for n, p in MODEL.named_parameters() if p.ndim == 2 and n.endswith(".weight")}
    assert found.keys() == wanted.keys()
    for name, stored in found.items():
        scheme = scheme_of(precision, (VOCABULARY if name in tables else STORED)[precision])
        largest = magnitudes(wanted[name], 1, scheme.paired)
        assert (np.abs(stored.array - wanted[name]) <= 1.01 * stored.furthest).all()
        assert (stored.furthest <= 1.01 * scheme.rounding * largest).all()


@settings(deadline=None)
@given(array=arrays(np.float32, (9, 4), elements=NUMBERS), summed=st.sampled_from([0, 1]))
def test_neighbours_of_w8a8_fit_sixteen_bits_and_the_others_have_all_of_int8(array, summed):
    numbers, scales = quantised(array, summed, scheme_of("w8a8", "int8"))
    by_input = (numbers if summed == 0 else numbers.T).astype(np.int64)
    pairs = by_input[: len(by_input) - len(by_input) % 2].reshape(-1, 2, by_input.shape[1]).sum(axis=1)
    assert 255 * np.abs(pairs).max() <= 2**15
    assert np.abs(by_input).max() <= 127
    furthest = np.maximum(np.abs(by_input).max(axis=0), np.abs(pairs).max(axis=0))
    assert (furthest[scales > 2.0**-14] >= 126).all()  # no step is wasted; below that, fp16's scales are coarse


@pytest.mark.each_value
@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize("cache_form", CACHE_FORMS)
@pytest.mark.parametrize("name", ["encoder", "decoder_step"])
def test_products_stay_as_they_were_and_read_restored_weights(precision, cache_form, name, graphs, run_onnx, feeds_for):
    """Above all q|k|v stay one product: TensorRT would not merge three restored weights. And ONNX Runtime runs it."""
    plain = graphs[cache_form][name]
    model = PASSES[precision](plain, ())
    products = [node.name for node in plain.graph.node if node.op_type == "MatMul"]
    assert [node.name for node in model.graph.node if node.op_type == "MatMul"] == products
    layers = {name for name in products if name.endswith("self_attn.qkv/MatMul")}
    assert len(layers) == 2
    numbers = {w.name for w in model.graph.initializer if w.name.endswith(f".{STORED[precision]}")}
    assert {f"{layer.removesuffix('/MatMul')}.weight.{STORED[precision]}" for layer in layers} <= numbers
    spec = graph_specs(MODEL.config, precision, cache_form)[name]
    feeds = feeds_for(spec, {"B": 2, "K": 2, "S": 5, "L": 8, "M": 10}, seed=3)
    wide = {name: array.astype("f4") if array.dtype == "f2" else array for name, array in feeds.items()}
    computed, exact = run_onnx(model, feeds), run_onnx(quantised_graph(plain, precision), wide)
    for tensor in spec.outputs:
        have, want = computed[tensor.name].astype(np.float64), exact[tensor.name]
        assert have.shape == want.shape
        off = np.sqrt(np.mean(np.square(have - want)) / np.mean(np.square(want)))
        assert off < 0.01  # what fp16 costs


def test_stored_types_are_the_contracts(graphs):
    for precision in QUANTISED:
        model = PASSES[precision](graphs["static"]["encoder"], ())
        kinds = {helper.tensor_dtype_to_np_dtype(w.data_type).name for w in model.graph.initializer}
        assert STORED[precision] in kinds
        assert ("float32" in kinds) == (PRECISIONS[precision] == "float32")


def test_inputs_that_no_block_divides_are_refused_with_the_nearest():
    assert [block_of("w", inputs) for inputs in (512, 192, 96, 48)] == [32, 32, 32, 16]
    with pytest.raises(
        ExportError, match=r"w has 100 inputs, which is not a multiple of 16.*export with --precision int8"
    ):
        block_of("w", 100)

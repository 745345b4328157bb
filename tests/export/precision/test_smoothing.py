"""Smoothing: the same function, with activations that round to int8 at less cost."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from support.rounding import FP32, apart

from seq2engine.export.precision.quantise import quantised_graph, weights_from_graph
from seq2engine.export.precision.smoothing import (
    error_left,
    factors_of,
    smoothed_graph,
    smoothed_inputs,
    smoothing_from_graph,
)
from seq2engine.export.to_onnx import graphs_from_model
from seq2engine.exporting import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.config import ModelConfig
from seq2engine.runtime.opening import open_session

CONFIG = ModelConfig(2, 2, 2, 32, 64, 512, 512, max_source=128, max_target=128)
OUTLIER = 3  # the channel that is much larger than the others


def with_an_outlier(norm: str = "post") -> torch.nn.Module:
    """A random model in whose residual stream one channel is 40 times as large as the others."""
    model = random_model(dataclasses.replace(CONFIG, norm=norm), seed=2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter[OUTLIER] = 40.0
    return model


def channels(graph: onnx.ModelProto, size: float = 40.0) -> dict[str, np.ndarray]:
    found = np.ones(CONFIG.d_model, dtype=np.float32)
    found[OUTLIER] = size
    return dict.fromkeys(smoothed_inputs(graph).values(), found)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("name", ["encoder", "decoder_step"])
def test_products_that_read_the_residual_stream_are_smoothed_and_compute_the_same(norm, name, run_onnx, feeds_for):
    from seq2engine.export.contract import graph_specs

    model = with_an_outlier(norm)
    graph = graphs_from_model(model)[name]
    smoothed = smoothed_graph(graph, channels(graph))
    found = smoothing_from_graph(smoothed)
    kinds = {"encoder": ("self_attn.qkv", "feed_forward.up", "cross_attn.kv")}
    kinds["decoder_step"] = ("self_attn.qkv", "cross_attn.q", "feed_forward.up")
    wanted = {path for path, _ in model.named_modules() if path.endswith(kinds[name])}
    wanted = {path for path in wanted if f"{path}.weight" in {w.name for w in graph.graph.initializer}}
    assert found.keys() == wanted
    assert all(factors[OUTLIER] < np.median(factors) for factors in found.values())
    spec = graph_specs(model.config, "fp32", "static")[name]
    feeds = feeds_for(spec, {"B": 2, "K": 2, "S": 5, "L": 8, "M": 10}, seed=3)
    plain, changed = run_onnx(graph, feeds), run_onnx(smoothed, feeds)
    for tensor in spec.outputs:  # factors are powers of two: nothing is rounded but sums in another order
        np.testing.assert_array_equal(plain[tensor.name], changed[tensor.name])


def test_factors_are_powers_of_two_and_even_out_channels() -> None:
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.normal(size=64)).astype(np.float32)
    weight = rng.normal(size=(64, 32)).astype(np.float32)
    factors = factors_of(sizes, weight)
    assert np.array_equal(np.log2(factors), np.rint(np.log2(factors)))
    assert (sizes / factors).max() / (sizes / factors).min() < sizes.max() / sizes.min()


def test_what_gains_little_or_was_not_measured_stays_as_it_is() -> None:
    graph = graphs_from_model(random_model(CONFIG, seed=2))["encoder"]
    assert smoothing_from_graph(smoothed_graph(graph, channels(graph, size=1.0))) == {}
    assert smoothing_from_graph(smoothed_graph(graph, {})) == {}
    dead = dict.fromkeys(smoothed_inputs(graph).values(), np.zeros(CONFIG.d_model, dtype=np.float32))
    assert smoothing_from_graph(smoothed_graph(graph, dead)) == {}


def test_the_error_that_is_left_is_what_rounding_leaves() -> None:
    """Against products that are really rounded, row by row."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(400, 64))
    x[:, OUTLIER] *= 30
    weight = rng.normal(size=(64, 48))
    sizes = np.abs(x).max(axis=0)
    factors = factors_of(sizes, weight)

    def error(divided: np.ndarray) -> float:
        scale = np.abs(x / divided).max(axis=1, keepdims=True)
        rounded = np.rint(x / divided / scale * 127) / 127 * scale
        return float(np.square((rounded * divided - x) @ weight).mean())

    really = error(factors) / error(np.ones(64))
    assert really < 0.2
    assert 0.5 < error_left(sizes, weight, factors) / really < 2  # rows are not all as large as the largest


def test_weights_are_read_back_without_their_factors() -> None:
    graph = graphs_from_model(with_an_outlier())["encoder"]
    wanted = {w.name: numpy_helper.to_array(w) for w in graph.graph.initializer}
    quantised = quantised_graph(smoothed_graph(graph, channels(graph)), "w8a8")
    assert smoothing_from_graph(quantised)
    for name, stored in weights_from_graph(quantised).items():
        array = wanted[name].T if "embedding" not in name else wanted[name]
        assert (np.abs(stored.array - array) <= stored.furthest * (1 + apart([(4, FP32)]))).all(), name


def test_an_export_is_calibrated_and_pytorch_rounds_as_its_graphs_do(tmp_path) -> None:
    """Random sources find the channel; the int8 products then err as PyTorch's, and far less than without smoothing."""
    model = with_an_outlier()
    bundle = onnx_from_model(model, tmp_path / "calibrated", ("fp32", "w8a8"))
    assert bundle.manifest.calibration["corpus"] == "random sources"
    from seq2engine.export import to_onnx

    plain = to_onnx.onnx_from_model(model, tmp_path / "plain", ("fp32", "w8a8"))
    rng = np.random.default_rng(1)
    ids, mask = rng.integers(3, 80, (6, 12)), np.ones((6, 12), dtype=bool)

    def errors(of, backend: str) -> np.ndarray:
        states = {}
        for name, precision in ((backend, "w8a8"), ("torch", "fp64:w8a8")):
            with open_session(of, name, precision, threads=1) as session:
                states[precision] = session.tensor(session.encode(ids, mask), "encoder_states")
        return np.abs(states["w8a8"] - states["fp64:w8a8"])

    ours, theirs, without = errors(bundle, "onnxruntime"), errors(bundle, "torch"), errors(plain, "onnxruntime")
    assert np.median(ours) < 1.2 * np.median(theirs)
    assert np.median(ours) < 0.5 * np.median(without)

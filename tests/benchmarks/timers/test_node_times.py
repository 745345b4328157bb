"""Which kinds of nodes a step's time goes to, read from a real profile."""

from __future__ import annotations

import dataclasses
import math

import pytest

from seq2engine.benchmarks.cases import Case
from seq2engine.benchmarks.timers.node_times import (
    FUSED,
    STEPS,
    WARM_UP,
    StepShares,
    kind_of,
    node_times,
    print_shares,
    shares_of_step,
)
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS

CASE = Case("2x3x5x8", batch=2, beam=3, source=5, target=8)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    model = random_model("tiny", seed=3)
    return onnx_from_model(model, tmp_path_factory.mktemp("bundle") / "tiny", precisions=("fp32", "w8a8"))


def test_steps_with_relative_positions_are_timed(tmp_path):
    config = dataclasses.replace(PRESETS["tiny"], positions="relative", max_distance=4)
    bundle = onnx_from_model(random_model(config, seed=3), tmp_path / "t5")
    assert shares_of_step(bundle, "fp32", CASE).nodes[FUSED["Candidates"]] == 1


@pytest.mark.parametrize("precision", ["fp32", "w8a8"])
def test_fused_operators_have_kinds_of_their_own(bundle, precision):
    shares = shares_of_step(bundle, precision, CASE)
    layers = bundle.config.decoder_layers
    assert shares.nodes[FUSED["Linear"]] == 6 * layers  # qkv and out, q and out, up and down
    assert shares.nodes[FUSED["Candidates"]] == 1
    assert shares.nodes["attention: scores, masks, softmax, cache"] == 2 * layers
    assert all(ms > 0 for ms in shares.kinds.values())


@pytest.mark.parametrize("precision", ["fp32", "w8a8"])
def test_every_node_of_a_step_has_a_kind(bundle, precision, without_kernels):
    shares = shares_of_step(bundle, precision, CASE)
    layers = bundle.config.decoder_layers
    assert shares.nodes["products: layers"] == 6 * layers  # qkv and out, q and out, up and down
    assert shares.nodes["product: output projection"] == 1
    assert shares.nodes["norms"] >= 3 * layers
    assert ("activations to int8, and their scales" in shares.nodes) == (precision == "w8a8")
    assert all(ms > 0 for ms in shares.kinds.values())
    assert min(shares.step_ms, shares.bytes_ms, shares.products_ms) > 0
    # A difference and a sum, each rounded by half of the last place at most.
    assert sum(shares.kinds.values()) + shares.between_ms >= shares.profiled_ms - math.ulp(shares.profiled_ms)


@pytest.mark.parametrize(
    ("op", "name", "kind"),
    [
        ("MatMul", "decoder.0.self_attn.qkv/MatMul", "products: layers"),
        ("MatMul", "decoder.0.self_attn/MatMul.1", "attention: scores, masks, softmax, cache"),
        ("TensorScatter", "decoder.0.self_attn/TensorScatter", "attention: scores, masks, softmax, cache"),
        ("Gemm", "all/logits/Gemm", "product: output projection"),
        ("MatMulIntegerToFloat", "output/MatMul/of_unit/MatMulIntegerToFloat", "product: output projection"),
        ("Mul", "output/MatMul/Mul", "activations to int8, and their scales"),
        ("TopK", "candidates/best_logits", "best tokens and sums over the vocabulary"),
        ("Add", "decoder.0/Add", "biases, residuals, embedding and others"),
    ],
)
def test_kinds_are_read_from_names(op, name, kind):
    assert kind_of(op, name) == kind


def test_a_branch_is_not_counted_beside_its_nodes():
    events = [
        {"cat": "Node", "name": "logits/If_kernel_time", "dur": 9000, "args": {"op_name": "If"}},
        {"cat": "Node", "name": "all/logits/Gemm_kernel_time", "dur": 8000, "args": {"op_name": "Gemm"}},
        {"cat": "Node", "name": "all/logits/Gemm_fence_before", "dur": 5, "args": {"op_name": "Gemm"}},
        {"cat": "Session", "name": "model_run", "dur": 9500},
    ]
    assert list(node_times(events)) == [("product: output projection", 8.0)]
    assert list(node_times(events * 2, 1)) == [("product: output projection", 8.0)], "but for the first time"


def test_the_table_names_the_limit_and_what_is_between_nodes(bundle, capsys):
    kinds, nodes = {"norms": 2.0, "products: layers": 6.0}, {"norms": 3, "products: layers": 6}
    text = StepShares("case", "fp32", 8.0, 10.0, kinds, nodes, bytes_ms=4.0, products_ms=3.0).table()
    assert "a step takes 8.00 ms" in text
    assert "50 % of the machine's limit; 10.00 ms with the profiler" in text
    assert text.splitlines()[-1].split() == ["between", "nodes", "2.00", "20", "%"]
    assert [line.split("  ")[0] for line in text.splitlines()[-3:]] == ["products: layers", "norms", "between nodes"]
    print_shares([str(bundle.root), "fp32", "1x2x4x8"])
    assert "batch 1, beam 2, source 4, output 8 fp32: a step takes" in capsys.readouterr().out
    assert STEPS > WARM_UP

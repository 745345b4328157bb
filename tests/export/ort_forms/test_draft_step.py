"""The step that drafts: weights in few bits, and the fp32 step's own best token nearly always."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from support.rounding import sum_error

from seq2engine.export.contract import graph_specs
from seq2engine.export.ort_forms import draft_step
from seq2engine.export.ort_forms import narrow_table as narrowing
from seq2engine.export.ort_forms.draft_step import draft_graph, packed, projection_arrays
from seq2engine.export.ort_forms.narrow_table import NarrowTable
from seq2engine.export.to_onnx import graphs_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS

SIZES = {"B": 1, "K": 1, "S": 5, "L": 16, "M": 16}


def unpacked(numbers: np.ndarray, scales: np.ndarray, bits: int) -> np.ndarray:
    """What the numbers stand for, by the definition of MatMulNBits: the lower half of a byte comes first."""
    if bits == 4:
        numbers = np.stack([numbers & 15, numbers >> 4], axis=-1).reshape(*numbers.shape[:2], -1)
    steps = numbers.astype(np.float64) - (1 << (bits - 1))
    return (steps * scales[..., None]).reshape(len(numbers), -1)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    bits=st.sampled_from([4, 8]),
    block=st.sampled_from([16, 32, 128]),
    kind=st.sampled_from(["normal", "positive", "zero", "outlier"]),
)
def test_no_weight_moves_by_more_than_a_step(seed: int, bits: int, block: int, kind: str) -> None:
    """By half a step, or by one at the end of the range that has one step less."""
    weights = np.random.default_rng(seed).normal(size=(7, 2 * block)).astype(np.float32)
    if kind == "positive":
        weights = np.abs(weights)
    elif kind == "zero":
        weights[3] = 0
    elif kind == "outlier":
        weights[:, 5] *= 1000
    numbers, scales = packed(weights, bits, block)
    missed = np.abs(unpacked(numbers, scales, bits) - weights).reshape(7, 2, block)
    assert (missed <= np.abs(scales)[..., None] * (1 + 2.0**-20)).all()
    assert np.median(missed / np.abs(scales)[..., None]) <= 0.5
    np.testing.assert_array_equal(unpacked(numbers, scales, bits)[3] if kind == "zero" else 0, 0)


@pytest.mark.parametrize("bits", [4, 8])
def test_onnx_runtime_reads_the_numbers_as_they_are_meant(bits: int) -> None:
    """One input at a time is 1, which int8 activations hold exactly."""
    weights = np.random.default_rng(0).normal(size=(48, 64)).astype(np.float32)
    numbers, scales = packed(weights, bits, 32)
    attributes = {"K": 64, "N": 48, "bits": bits, "block_size": 32, "accuracy_level": 4}
    graph = helper.make_graph(
        [helper.make_node("MatMulNBits", ["x", "numbers", "scales"], ["y"], domain="com.microsoft", **attributes)],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["R", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["R", 48])],
        [numpy_helper.from_array(numbers, "numbers"), numpy_helper.from_array(scales, "scales")],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(None, {"x": np.eye(64, dtype=np.float32)})[0]
    # It adds up the numbers as they are and takes `half` off afterwards: so large are the fp32 numbers in between.
    largest = 2 * (1 << (bits - 1)) * np.abs(scales).max()
    np.testing.assert_allclose(found.T, unpacked(numbers, scales, bits), rtol=0, atol=sum_error(4) * largest)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", ""])
@pytest.mark.parametrize("biased", [True, False], ids=["bias", ""])
def test_its_token_is_nearly_always_the_best_one(feeds_for, open_onnx, monkeypatch, tied: bool, biased: bool) -> None:
    monkeypatch.setattr(draft_step, "LEAST", 1)
    config = dataclasses.replace(PRESETS["tiny"], tie_output=tied, output_bias=biased, share_embeddings=False)
    model = random_model(config, seed=3)
    plain = graphs_from_model(model)["decoder_step"]
    made = draft_graph(plain, Path("/nowhere"))
    packed_ones = [node for node in made.graph.node if node.op_type == "MatMulNBits"]
    assert len(packed_ones) == 6 * config.decoder_layers + 1
    bits = {node.name: next(one.i for one in node.attribute if one.name == "bits") for node in packed_ones}
    assert [bits.pop(name) for name in list(bits) if name.startswith("output")] == [4 if tied else 8]
    assert set(bits.values()) == {8}

    spec, right = graph_specs(config)["decoder_step"], 0
    run_plain, run_draft = open_onnx(plain), open_onnx(made)
    for seed in range(40):
        feeds = feeds_for(spec, SIZES, seed)
        outputs, drafted = run_plain(feeds), run_draft(feeds)
        assert drafted["best_tokens"].shape == drafted["best_logits"].shape == drafted["logits"].shape == (1, 1, 1)
        right += int(drafted["best_tokens"].item() == outputs["logits"].argmax())
    assert right >= 36


@pytest.mark.parametrize("biased", [True, False], ids=["bias", ""])
def test_a_narrow_table_drafts_the_same_tokens(feeds_for, open_onnx, monkeypatch, biased: bool) -> None:
    monkeypatch.setattr(draft_step, "LEAST", 1)
    monkeypatch.setattr(draft_step, "WORTH_NARROWING", 1)
    monkeypatch.setattr(narrowing, "REFINED", 8)
    config = dataclasses.replace(PRESETS["tiny"], tie_output=True, output_bias=biased, share_embeddings=False)
    plain = graphs_from_model(random_model(config, seed=3))["decoder_step"]
    feeds = [feeds_for(graph_specs(config)["decoder_step"], SIZES, seed) for seed in range(40)]
    wide = open_onnx(draft_graph(plain, Path("/nowhere")))
    outputs = [wide(one) for one in feeds]
    assert outputs[0]["states"].shape == (1, 1, config.d_model)
    states = np.concatenate([one["states"][0] for one in outputs])
    table, bias = projection_arrays(plain, Path("/nowhere"))
    assert (bias is not None) == biased
    logits = states @ table.T + (0 if bias is None else bias)
    tokens = [one["best_tokens"].item() for one in outputs]
    # Two sums of the same products, with a bias as one more, in whatever order.
    near = (
        2
        * sum_error(config.d_model + 1)
        * (np.abs(states) @ np.abs(table.T) + (0 if bias is None else np.abs(bias))).max()
    )
    found = [one["best_logits"].item() for one in outputs]
    np.testing.assert_allclose(logits[np.arange(len(tokens)), tokens], found, rtol=0, atol=near)

    # All columns, turned: nothing is lost but what 4 bits lose.
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(config.d_model,) * 2))[0].astype(np.float32)
    made = draft_graph(plain, Path("/nowhere"), NarrowTable(turn, table @ turn))
    assert {output.name for output in made.graph.output}.isdisjoint({"states"})
    narrow = open_onnx(made)
    right = [
        narrow(one)["best_tokens"].item() == best["best_tokens"].item()
        for one, best in zip(feeds, outputs, strict=True)
    ]
    assert sum(right) >= 36


def test_a_small_table_is_not_narrowed() -> None:
    tied = dataclasses.replace(PRESETS["tiny"], tie_output=True)
    made = draft_graph(graphs_from_model(random_model(tied, seed=3))["decoder_step"], Path("/nowhere"))
    assert "states" not in {output.name for output in made.graph.output}


def test_the_given_graph_is_left_as_it_was() -> None:
    plain = graphs_from_model(random_model(PRESETS["tiny"], seed=3))["decoder_step"]
    before = plain.SerializeToString(deterministic=True)
    onnx.checker.check_model(draft_graph(plain, Path("/nowhere")))
    assert plain.SerializeToString(deterministic=True) == before

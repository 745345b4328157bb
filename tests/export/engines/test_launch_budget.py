"""Engines keep within the launch budget, and the budget within what was promised."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from seq2engine.common.tensorrt_module import load_tensorrt
from seq2engine.export.artifact.profiles import Range, ShapeRanges, shapes_from_ranges
from seq2engine.export.contract import CACHE_FORMS, DEVICE_GRAPHS, FOR_CPUS, GRAPHS, PRECISIONS, graph_specs
from seq2engine.export.engines.build import build_engine
from seq2engine.export.engines.kernels import kernels_from_engine
from seq2engine.export.engines.launch_budget import (
    BUDGETS,
    DEVICE_LAUNCHES,
    TOKENS,
    budget_for,
    launches_allowed,
    launches_of_token,
)
from seq2engine.export.precision.passes import PASSES
from seq2engine.export.to_onnx import graphs_from_model
from seq2engine.export.trt_forms.step import step_for_tensorrt
from seq2engine.inspection.describe import engine_text, engine_values
from seq2engine.model.checkpoint import random_model
from seq2engine.model.config import ModelConfig
from seq2engine.model.presets import PRESETS

BASE = PRESETS["base"]
TWO_LAYERS = dataclasses.replace(BASE, encoder_layers=2, decoder_layers=2)  # as the bundle "base" of conftest.py has
STEPS = [row for row in BUDGETS if row.graph == "decoder_step"]
ENCODERS = [row for row in BUDGETS if row.graph == "encoder"]


def label(row):
    return f"{row.precision}-{row.cache_form}-{'beams' if row.beams else 'one'}"


@pytest.mark.slow
@pytest.mark.parametrize("row", STEPS, ids=label)
def test_decoder_steps_keep_within_the_budget(row, built):
    """Two layers of the base model's width; launches of more layers follow from what a layer takes."""
    passport = built("base", row.cache_form, row.precision, 4 if row.beams else 1).passport
    step = passport.engines["decoder_step"]
    assert step.fused_attentions == step.attentions == 4
    assert step.launches <= row.launches(TWO_LAYERS)
    check_tokens(passport, TWO_LAYERS, row.beams)


def check_tokens(passport, config, beams):
    """What a token takes with each reduction of the logits keeps within the budget of its engines."""
    form = passport.cache_form
    assert list(passport.reductions) == list(TOKENS[form])
    for name in passport.reductions:
        launches = sum(passport.engines[engine].launches for engine in TOKENS[form][name])
        assert launches <= launches_of_token(config, name, passport.precision, form, beams)


@pytest.mark.each_value
@pytest.mark.parametrize(("precision", "beams"), [("fp16", 1), ("fp32", 1), ("fp16", 4), ("fp32", 4)])
def test_small_heads_keep_within_it_too(precision, beams, built):
    passport = built("tiny", "static", precision, beams).passport
    allowed = launches_allowed(PRESETS["tiny"], "decoder_step", precision, "static", beams > 1)
    assert allowed is not None
    assert passport.engines["decoder_step"].launches <= allowed
    check_tokens(passport, PRESETS["tiny"], beams > 1)
    for name in DEVICE_GRAPHS["static"]:
        assert passport.engines[name].launches <= DEVICE_LAUNCHES[name]


@pytest.mark.slow
@pytest.mark.parametrize("row", ENCODERS, ids=lambda row: row.precision)
def test_encoders_keep_within_the_budget(row, built):
    encoder = built("base", "static", row.precision).passport.engines["encoder"]
    assert encoder.launches <= row.launches(TWO_LAYERS)
    assert encoder.fused_attentions == (encoder.attentions if row.fused else 0)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "promised"), [("fp16", 66), ("int8", 80)])
def test_six_layers_launch_as_in_the_table(precision, promised):
    """The rows that have the least room, at the depth of the base model."""
    pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install 'seq2engine[rtx]'")
    config = ModelConfig(encoder_layers=1, source_vocab=64, target_vocab=64, max_source=64, max_target=64)
    step = PASSES[precision](graphs_from_model(random_model(config), "static")["decoder_step"])
    ranges = ShapeRanges(Range(1, 2, 4), Range(1, 1, 1), Range(1, 8, 32), Range(1, 8, 32))
    shapes = shapes_from_ranges(graph_specs(config, precision)["decoder_step"], ranges, "static", 32)
    form = step_for_tensorrt(step, "static", 1, 32)
    trt = load_tensorrt("tensorrt_rtx")
    kernels = kernels_from_engine(build_engine(trt, form, Path("step.onnx"), shapes, ["sm86"], lambda fraction: None))
    assert kernels.fused_attentions == 12
    assert kernels.launches <= launches_allowed(config, "decoder_step", precision, "static", beams=False) <= promised


T5 = dataclasses.replace(
    BASE,
    source_vocab=64,
    target_vocab=64,
    max_source=64,
    max_target=64,
    norm="pre",
    norm_kind="rms",
    positions="relative",
    biases=False,
    scale_attention=False,
    scale_embeddings=False,
    scale_output=True,
)
FLAN = dataclasses.replace(T5, gated=True, activation="gelu_tanh", scale_output=False, tie_output=False)
UMT5 = dataclasses.replace(FLAN, distances_per_layer=True)


def kernels_of(config, graph, precision, beams):
    """What an engine of one graph launches; with calibration nothing of a random model stays in fp32."""
    pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install 'seq2engine[rtx]'")
    model = PASSES[precision](graphs_from_model(random_model(config), "static")[graph])
    ranges = ShapeRanges(Range(1, 2, 4), Range(beams, beams, beams), Range(1, 8, 32), Range(1, 8, 32))
    shapes = shapes_from_ranges(graph_specs(config, precision)[graph], ranges, "static", 256)
    form = model if graph == "encoder" else step_for_tensorrt(model, "static", beams, 256)
    trt = load_tensorrt("tensorrt_rtx")
    return kernels_from_engine(build_engine(trt, form, Path(f"{graph}.onnx"), shapes, ["sm86"], lambda fraction: None))


@pytest.mark.slow
@pytest.mark.parametrize(("config", "promised"), [pytest.param(T5, 72, id="t5"), pytest.param(FLAN, 77, id="flan")])
def test_a_step_of_t5_launches_what_was_promised(config, promised):
    kernels = kernels_of(config, "decoder_step", "fp16", 1)
    assert kernels.fused_attentions == 12
    assert kernels.launches <= launches_allowed(config, "decoder_step", "fp16", "static", beams=False) <= promised


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "graph", "precision", "beams", "promised"),
    [
        (T5, "decoder_step", "fp16", 4, 79),
        (FLAN, "decoder_step", "fp16", 4, 85),
        (UMT5, "decoder_step", "fp16", 1, 77),
        (UMT5, "decoder_step", "fp16", 4, 85),
        (T5, "decoder_step", "fp32", 4, 99),
        (T5, "encoder", "fp16", 1, 58),
        (UMT5, "encoder", "fp16", 1, 64),
    ],
)
def test_engines_of_t5_launch_as_in_the_table(config, graph, precision, beams, promised):
    kernels = kernels_of(config, graph, precision, beams)
    assert kernels.fused_attentions == (6 if graph == "encoder" else 12)
    assert kernels.launches <= launches_allowed(config, graph, precision, "static", beams > 1) <= promised


@pytest.mark.parametrize(
    ("precision", "cache_form", "beams", "promised"),
    [
        ("fp16", "growing", False, 70),
        ("fp32", "growing", False, 70),
        ("fp16", "static", False, 66),
        ("fp32", "static", False, 66),
        ("int8", "static", False, 80),
        ("int8", "growing", False, 80),
        ("fp16", "static", True, 85),
        ("fp16", "growing", True, 85),
    ],
)
def test_the_budget_of_base_is_what_was_promised(precision, cache_form, beams, promised):
    assert launches_allowed(BASE, "decoder_step", precision, cache_form, beams) <= promised


@pytest.mark.parametrize(
    ("precision", "beams", "greedy", "candidates", "logits"),
    [
        ("fp32", False, 70, 69, 65),
        ("fp16", False, 71, 70, 66),
        ("bf16", False, 71, 70, 66),
        ("int8", False, 83, 82, 78),
        ("fp8", False, 83, 82, 78),
        ("fp32", True, 93, 92, 88),
        ("fp16", True, 84, 83, 79),
        ("bf16", True, 84, 83, 79),
        ("int8", True, 96, 95, 91),
        ("fp8", True, 96, 95, 91),
    ],
)
def test_what_a_token_of_base_takes_is_as_documented(precision, beams, greedy, candidates, logits):
    """The greedy search of an engine with beams runs all of them; with a range of beams, only one."""
    found = [launches_of_token(BASE, name, precision, "static", beams) for name in TOKENS["static"]]
    assert found == [greedy, candidates, logits]


def test_tiny_engines_and_their_order_are_the_contract_s():
    assert set(DEVICE_LAUNCHES) == {name for names in DEVICE_GRAPHS.values() for name in names}
    for form, tokens in TOKENS.items():
        assert {name for names in tokens.values() for name in names} <= {*GRAPHS, *DEVICE_GRAPHS[form]}


def test_every_engine_has_one_row():
    keys = [(row.graph, row.precision, row.cache_form, row.beams) for row in BUDGETS]
    built = [precision for precision in PRECISIONS if precision not in FOR_CPUS]
    steps = [("decoder_step", p, form, beams) for p in built for form in CACHE_FORMS for beams in (False, True)]
    assert sorted(keys) == sorted(steps + [("encoder", precision, "", False) for precision in built])


@pytest.mark.parametrize(
    "changes",
    [
        {"norm": "pre"},
        {"positions": "rotary"},
        {"activation": "gelu"},
        {"d_model": 2048},
        {"heads": 64},
        {"heads": 128},
    ],
)
def test_other_kinds_of_models_have_no_budget(changes):
    assert budget_for(dataclasses.replace(BASE, **changes), "decoder_step", "fp16", "static", beams=False) is None


def test_sizes_do_not_matter_but_depth():
    other = dataclasses.replace(BASE, decoder_layers=3, d_ff=64, target_vocab=500, source_vocab=500)
    rows = [launches_allowed(config, "decoder_step", "fp16", "static", beams=False) for config in (BASE, other)]
    assert rows[0] - rows[1] == 3 * 10


def test_inspect_shows_the_budget_beside_the_count(built):
    passport = built("tiny", "static", "fp16", 1).passport
    step = passport.engines["decoder_step"]
    shown = engine_values(passport, PRESETS["tiny"])["engines"]["decoder_step"]["launch_budget"]
    assert step.launches <= shown == 5 + 10 * 2
    assert re.search(rf"decoder_step +{step.launches} +{shown} +4 of 4", engine_text(passport, PRESETS["tiny"]))

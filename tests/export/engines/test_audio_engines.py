"""Engines of models that take audio: launches within their budget, attentions fused, the source never copied."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import onnx
import pytest

from seq2engine.common.tensorrt_module import load_tensorrt
from seq2engine.export.artifact.profiles import Range, ShapeRanges, check_ranges, shapes_from_ranges
from seq2engine.export.contract import graph_specs
from seq2engine.export.engines.build import build_engine
from seq2engine.export.engines.kernels import blocks_of, kernels_from_engine
from seq2engine.export.engines.launch_budget import AUDIO_BUDGETS, LaunchBudget, launches_allowed
from seq2engine.export.engines.to_engine import default_ranges
from seq2engine.export.precision.passes import PASSES
from seq2engine.export.to_onnx import graphs_from_model
from seq2engine.export.trt_forms.step import step_for_tensorrt
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS

AUDIO = dataclasses.replace(
    PRESETS["whisper-tiny.en"],
    encoder_layers=2,
    decoder_layers=3,
    heads=4,  # with two heads, TensorRT fuses no attention of one query
    d_model=256,
    d_ff=512,
    target_vocab=200,
    max_target=64,
    pad_id=0,
    start_id=1,
    end_id=2,
)
TINY_EN = dataclasses.replace(AUDIO, encoder_layers=4, decoder_layers=4, heads=6, d_model=384, d_ff=1536)
SLOTS = {1: 64, 4: 256}


@pytest.fixture(scope="module")
def portable() -> dict[str, onnx.ModelProto]:
    return graphs_from_model(random_model(AUDIO), "static")


def label(row: LaunchBudget) -> str:
    return f"{row.graph}-{row.precision}-{'beams' if row.beams else 'one'}"


@pytest.mark.slow
@pytest.mark.parametrize("row", AUDIO_BUDGETS, ids=label)
def test_engines_keep_within_the_budget(row: LaunchBudget, portable: dict[str, onnx.ModelProto]) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install 'seq2engine[rtx]'")
    beams = 4 if row.beams else 1
    graph = PASSES[row.precision](portable[row.graph], ())
    if row.graph == "decoder_step":
        graph = step_for_tensorrt(graph, "static", beams, SLOTS[beams], long_sources=True)
    fixed = AUDIO.max_source
    ranges = ShapeRanges(Range(1, 1, 2), Range(beams, beams, beams), Range(fixed, fixed, fixed), Range(1, 8, 64))
    shapes = shapes_from_ranges(graph_specs(AUDIO, row.precision)[row.graph], ranges, "static", SLOTS[beams])
    trt = load_tensorrt("tensorrt_rtx")
    engine = build_engine(trt, graph, Path("g.onnx"), shapes, ["sm86"], lambda fraction: None)
    kernels = kernels_from_engine(engine)
    attentions = sum(node.op_type == "Softmax" for node in portable[row.graph].graph.node)
    assert kernels.fused_attentions == (attentions if row.fused else 0)
    assert kernels.launches <= row.launches(AUDIO)
    if row.graph == "decoder_step":  # the source is read where it is: no other kernel has it as an argument
        reading = [line for block in blocks_of(engine) for line in block.splitlines() if b'"cross_' in line]
        assert len(reading) == AUDIO.decoder_layers
        assert all(b"name=_gemv_mha" in line for line in reading)


@pytest.mark.parametrize(("beams", "promised"), [(False, 49), (True, 56)])
def test_the_budget_of_tiny_en(beams: bool, promised: int) -> None:
    allowed = launches_allowed(TINY_EN, "decoder_step", "fp16", "static", beams)
    assert allowed is not None
    assert allowed <= promised
    assert launches_allowed(TINY_EN, "encoder", "fp16", "static", beams=False) == 40


def test_beams_of_wide_models_are_no_rows() -> None:
    wide = dataclasses.replace(TINY_EN, heads=12, d_model=768)
    assert launches_allowed(wide, "decoder_step", "fp16", "static", beams=True) == 64
    assert launches_allowed(wide, "decoder_step", "fp16", "static", beams=False) == 49


@pytest.mark.parametrize("beams", [1, 4])
def test_keys_and_values_of_the_source_are_read_where_they_are(
    beams: int, portable: dict[str, onnx.ModelProto]
) -> None:
    """Nothing joins, splits or gathers 1,500 positions in every step; a Transpose or an axis more is read through."""
    step = PASSES["fp16"](portable["decoder_step"], ())
    form = step_for_tensorrt(step, "static", beams, SLOTS[beams], long_sources=True)
    readers = {
        node.op_type
        for node in form.graph.node
        if any(name.startswith(("cross_k.", "cross_v.")) for name in node.input)
    }
    assert readers == ({"Transpose", "MatMul"} if beams == 1 else {"Unsqueeze"})


def test_a_build_by_default_takes_whole_windows() -> None:
    ranges = default_ranges(AUDIO, "fp16", "static")
    check_ranges(ranges, AUDIO)
    assert ranges.source == Range(1500, 1500, 1500)
    assert ranges.beam.fixed
    assert ranges.target.max == AUDIO.max_target
    shapes = shapes_from_ranges(graph_specs(AUDIO, "fp16")["encoder"], ranges, "static", ranges.slots)
    assert shapes["features"][2] == (8, 80, 3000)

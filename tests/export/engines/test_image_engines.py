"""Engines of models that take images: launches within their budget, attentions fused, the source never copied."""

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
from seq2engine.export.engines.launch_budget import IMAGE_BUDGETS, LaunchBudget, budget_for, launches_allowed
from seq2engine.export.engines.to_engine import default_ranges
from seq2engine.export.precision.passes import PASSES
from seq2engine.export.to_onnx import graphs_from_model
from seq2engine.export.trt_forms.step import step_for_tensorrt
from seq2engine.model.checkpoint import random_model
from seq2engine.model.config import ModelConfig
from seq2engine.model.presets import PRESETS

SMALL, BASE = PRESETS["trocr-small"], PRESETS["trocr-base"]
FEW = {"encoder_layers": 2, "decoder_layers": 2, "target_vocab": 200, "max_target": 64}
NARROW = dataclasses.replace(SMALL, **FEW)  # beams as rows
WIDE = dataclasses.replace(BASE, **FEW, encoder_width=384, encoder_heads=6, encoder_d_ff=512, d_ff=1024)
SLOTS = {1: 64, 4: 256}


def label(row: LaunchBudget) -> str:
    return f"{row.graph}-{row.precision}-{'beams' if row.beams else 'one'}"


def check_engine(config: ModelConfig, row: LaunchBudget, portable: onnx.ModelProto) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install 'seq2engine[rtx]'")
    beams = 4 if row.beams else 1
    graph = portable if row.precision == "fp32" else PASSES[row.precision](portable, ())
    if row.graph == "decoder_step":
        graph = step_for_tensorrt(graph, "static", beams, SLOTS[beams], long_sources=True)
    fixed = config.max_source
    ranges = ShapeRanges(Range(1, 1, 2), Range(beams, beams, beams), Range(fixed, fixed, fixed), Range(1, 8, 64))
    shapes = shapes_from_ranges(graph_specs(config, row.precision)[row.graph], ranges, "static", SLOTS[beams])
    trt = load_tensorrt("tensorrt_rtx")
    engine = build_engine(trt, graph, Path("g.onnx"), shapes, ["sm86"], lambda fraction: None)
    kernels = kernels_from_engine(engine)
    attentions = sum(node.op_type == "Softmax" for node in portable.graph.node)
    assert kernels.fused_attentions == (attentions if row.fused else 0)
    assert kernels.launches <= row.launches(config)
    if row.graph == "decoder_step":  # the source is read where it is: no other kernel has it as an argument
        reading = [line for block in blocks_of(engine) for line in block.splitlines() if b'"cross_' in line]
        assert len(reading) == config.decoder_layers
        assert all(b"name=_gemv_mha" in line for line in reading)


@pytest.fixture(scope="module")
def portable() -> dict[str, onnx.ModelProto]:
    return graphs_from_model(random_model(NARROW), "static")


@pytest.mark.slow
@pytest.mark.parametrize("row", IMAGE_BUDGETS, ids=label)
def test_engines_keep_within_the_budget(row: LaunchBudget, portable: dict[str, onnx.ModelProto]) -> None:
    check_engine(NARROW, row, portable[row.graph])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_beams_of_wide_models_are_grouped_and_their_query_is_folded(precision: str) -> None:
    row = budget_for(WIDE, "decoder_step", precision, "static", beams=True)
    assert row is not None
    check_engine(WIDE, row, graphs_from_model(random_model(WIDE), "static")["decoder_step"])


def test_the_budgets_of_the_published_sizes() -> None:
    """Encoder, one beam, four beams, in fp16."""
    asked = (("encoder", False), ("decoder_step", False), ("decoder_step", True))
    small, base = ([launches_allowed(c, g, "fp16", "static", beams) for g, beams in asked] for c in (SMALL, BASE))
    assert small == [106, 65, 82]
    assert base == [112, 125, 172]


@pytest.mark.parametrize(
    "changes", [{"project_states": True}, {"encoder_norm": "post"}, {"heads": 2}, {"activation": "silu"}]
)
def test_other_models_have_no_budget(changes: dict[str, object]) -> None:
    assert budget_for(dataclasses.replace(SMALL, **changes), "encoder", "fp16", "static", beams=False) is None


@pytest.mark.parametrize("beams", [1, 4])
def test_keys_and_values_of_the_source_are_read_where_they_are(
    beams: int, portable: dict[str, onnx.ModelProto]
) -> None:
    step = PASSES["fp16"](portable["decoder_step"], ())
    form = step_for_tensorrt(step, "static", beams, SLOTS[beams], long_sources=True)
    readers = {
        node.op_type
        for node in form.graph.node
        if any(name.startswith(("cross_k.", "cross_v.")) for name in node.input)
    }
    assert readers == ({"Attention"} if beams == 1 else {"Unsqueeze"})


def test_a_build_by_default_takes_whole_images() -> None:
    ranges = default_ranges(SMALL, "fp16", "static")
    check_ranges(ranges, SMALL)
    assert ranges.source == Range(578, 578, 578)
    assert ranges.beam.fixed
    shapes = shapes_from_ranges(graph_specs(SMALL, "fp16")["encoder"], ranges, "static", ranges.slots)
    assert shapes["features"] == ((1, 3, 384, 384), (1, 3, 384, 384), (8, 3, 384, 384))

"""Cross-attention with beams as rows: what the portable graph computes, and nothing of the source is moved for it."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest

from seq2engine.export.contract import graph_specs
from seq2engine.export.precision.passes import PASSES
from seq2engine.export.to_onnx import graphs_from_model
from seq2engine.export.trt_forms import beam_rows
from seq2engine.export.trt_forms.step import step_for_tensorrt
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS

AUDIO = dataclasses.replace(
    PRESETS["whisper-tiny.en"],
    encoder_layers=1,
    decoder_layers=2,
    heads=4,
    d_model=64,
    d_ff=96,
    target_vocab=256,
    max_source=20,
    max_target=64,
    pad_id=0,
    start_id=1,
    end_id=2,
)
CONFIGS = {"usual": AUDIO, "wide heads": dataclasses.replace(AUDIO, d_kv=24)}
BEAMS, SLOTS = 4, 12


def form_of(config, precision, cache_form="static"):
    step = PASSES[precision](graphs_from_model(random_model(config), cache_form)["decoder_step"], ())
    return step_for_tensorrt(step, cache_form, BEAMS, SLOTS, long_sources=True)


def ops(form):
    return [node.op_type for node in form.graph.node]


@pytest.mark.each_value
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("cache_form", ["static", "growing"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_step_computes_what_pytorch_computes(name, cache_form, precision, feeds_for, run_onnx, check_close):
    config = CONFIGS[name]
    spec = graph_specs(config, precision, cache_form)["decoder_step"]
    form = form_of(config, precision, cache_form)
    onnx.checker.check_model(form, full_check=True)
    assert ops(form).count("Softmax") == config.decoder_layers  # cross-attentions; the others are Attention ops
    assert ops(form).count("Attention") == config.decoder_layers
    for batch in (1, 3):
        sizes = {"B": batch, "K": BEAMS, "S": config.max_source, "L": SLOTS, "M": SLOTS + BEAMS}
        feeds = feeds_for(spec, sizes, seed=batch)
        check_close(run_onnx(form, feeds), random_model(config), spec, feeds, cache_form, precision)


def test_a_beam_attends_with_its_own_query(feeds_for, run_onnx):
    """Another token of one beam changes the logits of that beam alone."""
    spec, form = graph_specs(AUDIO)["decoder_step"], form_of(AUDIO, "fp32")
    feeds = feeds_for(spec, {"B": 2, "K": BEAMS, "S": AUDIO.max_source, "L": SLOTS})
    feeds["write_index"][:] = SLOTS - BEAMS
    feeds["self_mask"][:, :, SLOTS - BEAMS :] = np.eye(BEAMS, dtype=bool)  # no beam sees another's new slot
    before = run_onnx(form, feeds)["logits"]
    feeds["tokens"][1, 2] = (feeds["tokens"][1, 2] + 1) % AUDIO.target_vocab
    changed = (run_onnx(form, feeds)["logits"] != before).any(axis=-1)
    assert changed.tolist() == [[False] * BEAMS, [False, False, True, False]]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_wide_models_have_grouped_queries(precision, monkeypatch):
    monkeypatch.setattr(beam_rows, "WIDEST", AUDIO.d_model - 1)
    assert ops(form_of(AUDIO, precision)).count("Attention") == 2 * AUDIO.decoder_layers


def test_constants_are_shapes_only():
    """No weight is stored anew, so whatever accounts for weights has nothing new to trace."""
    step = PASSES["fp16"](graphs_from_model(random_model(AUDIO), "static")["decoder_step"], ())
    before = {weight.name for weight in step.graph.initializer}
    added = [weight for weight in form_of(AUDIO, "fp16").graph.initializer if weight.name not in before]
    assert {weight.data_type for weight in added} == {onnx.TensorProto.INT64}

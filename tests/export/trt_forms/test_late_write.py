"""A cache that is written late: the same outputs, and no attention waits for a write."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest
from support.rounding import tensor_error

from seq2engine.export.contract import graph_specs
from seq2engine.export.to_onnx import graphs_from_model
from seq2engine.export.trt_forms.late_write import write_late
from seq2engine.export.trt_forms.step import frozen_axes
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS

TINY = PRESETS["tiny"]
RELATIVE = dataclasses.replace(TINY, positions="relative", max_distance=9)
SLOTS = 12


@pytest.fixture(scope="module")
def step():
    return graphs_from_model(random_model(TINY), "static")["decoder_step"]


@pytest.fixture(scope="module")
def relative_step():
    return graphs_from_model(random_model(RELATIVE), "static")["decoder_step"]


def late(step, beams):
    form = onnx.ModelProto()
    form.CopyFrom(step)
    frozen_axes(form, {"L": SLOTS, "K": beams})
    write_late(form, beams, SLOTS)
    onnx.checker.check_model(form, full_check=True)
    return form


@pytest.mark.parametrize("beams", [1, 2, 5])
@pytest.mark.parametrize("seed", range(3))
def test_it_computes_what_writing_first_computes(beams, seed, step, feeds_for, run_onnx):
    """Also where a beam attends to another's new slot, which no search asks for."""
    feeds = feeds_for(graph_specs(TINY)["decoder_step"], {"B": 4, "K": beams, "S": 6, "L": SLOTS}, seed=seed)
    first, second = run_onnx(step, feeds), run_onnx(late(step, beams), feeds)
    for name in first:
        np.testing.assert_allclose(first[name], second[name], rtol=0, atol=tensor_error(TINY, first[name]))


@pytest.mark.parametrize("beams", [1, 3])
def test_new_slots_stand_where_the_step_does(beams, relative_step, feeds_for, run_onnx):
    feeds = feeds_for(graph_specs(RELATIVE)["decoder_step"], {"B": 4, "K": beams, "S": 6, "L": SLOTS}, seed=beams)
    form = late(relative_step, beams)
    first, second = run_onnx(relative_step, feeds), run_onnx(form, feeds)
    for name in first:
        np.testing.assert_allclose(first[name], second[name], rtol=0, atol=tensor_error(RELATIVE, first[name]))
    feeds["slot_position"] += 1
    assert not np.array_equal(run_onnx(form, feeds)["logits"], second["logits"])


@pytest.mark.parametrize("place", [0, SLOTS - 2])
def test_what_will_be_overwritten_is_not_looked_at(place, step, feeds_for, run_onnx):
    feeds = feeds_for(graph_specs(TINY)["decoder_step"], {"B": 2, "K": 2, "S": 6, "L": SLOTS})
    feeds["write_index"][:] = place
    feeds["self_mask"][:] = True
    form = late(step, 2)
    before = run_onnx(form, feeds)["logits"]
    for part in "kv":
        feeds[f"self_{part}.0"][:, :, place : place + 2] = 7.0
    np.testing.assert_array_equal(run_onnx(form, feeds)["logits"], before)
    feeds["self_k.0"][:, :, 5] += 1
    assert not np.array_equal(run_onnx(form, feeds)["logits"], before)


def test_nothing_reads_what_is_written(step):
    form = late(step, 2)
    written = {node.output[0] for node in form.graph.node if node.op_type == "TensorScatter"}
    assert len(written) == 2 * TINY.decoder_layers
    assert not any(name in written for node in form.graph.node for name in node.input)
    assert written == {value.name for value in form.graph.output if value.name.startswith("new_self_")}
    masks = {node.input[0] for node in form.graph.node if node.op_type == "Where"}
    assert len(masks) == 2  # one for all self-attentions

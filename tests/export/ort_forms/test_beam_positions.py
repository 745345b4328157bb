"""A position for every beam: the contract's own graph where all are equal, and tokens in a row where they are not."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper
from support.rounding import tensor_error

from seq2engine.errors import ExportError
from seq2engine.export.contract import graph_specs
from seq2engine.export.ort_forms.beam_positions import beam_positions
from seq2engine.export.ort_forms.interface import POSITION, spec_with_beam_positions
from seq2engine.export.to_onnx import graphs_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.config import ModelConfig

SMALL = ModelConfig(1, 2, 2, 32, 64, 80, 80, max_source=24, max_target=24)
SLOTS = 8


def run(model, feeds):
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def feeds_for(config, batch, beams, seed=0):
    rng = np.random.default_rng(seed)
    sizes = {"B": batch, "K": beams, "L": SLOTS, "M": SLOTS, "S": 5}
    feeds = {}
    for tensor in graph_specs(config)["decoder_step"].inputs:
        shape = tensor.shape(sizes)
        if tensor.dtype == "float32":
            feeds[tensor.name] = rng.normal(size=shape).astype(np.float32)
        elif tensor.dtype == "bool":
            feeds[tensor.name] = np.ones(shape, dtype=bool)
        else:
            feeds[tensor.name] = rng.integers(0, 4, shape)
    return feeds


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary"])
def test_equal_positions_are_one_position(positions):
    config = dataclasses.replace(SMALL, positions=positions)
    step = graphs_from_model(random_model(config, seed=1))["decoder_step"]
    feeds = feeds_for(config, batch=2, beams=3)
    spread = {**feeds, "position": np.repeat(feeds["position"][:, None], 3, axis=1)}
    expected, found = run(step, feeds), run(beam_positions(step), spread)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary"])
def test_three_tokens_in_one_step_are_three_steps(positions):
    config = dataclasses.replace(SMALL, positions=positions)
    step = graphs_from_model(random_model(config, seed=1))["decoder_step"]
    feeds = feeds_for(config, batch=1, beams=1)
    tokens = [5, 9, 33]
    expected, state = [], dict(feeds)
    for place, token in enumerate(tokens):
        state.update(tokens=np.array([[token]]), position=np.array([place]), write_index=np.array([place]))
        state["self_mask"] = (np.arange(SLOTS) <= place)[None, None]
        found = run(step, state)
        expected.append(found.pop("logits")[0, 0])
        state.update({name.removeprefix("new_"): array for name, array in found.items()})
    places = np.arange(3)
    at_once = {**feeds, "tokens": np.array([tokens]), "position": places[None], "write_index": np.array([0])}
    at_once["self_mask"] = (np.arange(SLOTS) <= places[:, None])[None]
    found = run(beam_positions(step), at_once)["logits"][0]
    assert np.allclose(found, expected, rtol=0, atol=tensor_error(config, np.stack(expected)))


def test_only_the_position_changes_in_the_contract():
    spec = graph_specs(SMALL)["decoder_step"]
    changed = spec_with_beam_positions(spec)
    assert changed.input("position") == POSITION
    assert [t.name for t in changed.inputs] == [t.name for t in spec.inputs]
    assert sum(a != b for a, b in zip(changed.inputs, spec.inputs, strict=True)) == 1


def test_another_graph_is_refused():
    position = helper.make_tensor_value_info("position", onnx.TensorProto.INT64, ["B"])
    node = helper.make_node("Identity", ["position"], ["y"])
    graph = helper.make_graph([node], "other", [position], [])
    with pytest.raises(ExportError, match="reads its positions by Identity, expected Unsqueeze"):
        beam_positions(helper.make_model(graph))

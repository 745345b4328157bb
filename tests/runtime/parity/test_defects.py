"""Defects planted in exported graphs: each is caught, and named where it first shows."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from support.fast_cases import rest_slow
from support.parity_cases import SMALL, bundle_of, parity_with

from seq2engine.runtime.ort.graphs import OrtModel
from seq2engine.runtime.ort.session import OrtSession, OrtSettings


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return bundle_of(SMALL, tmp_path_factory.mktemp("parity"))


def edited(bundle, precision, folder, edit, graph):
    """A session on a bundle's graphs, one of which was tampered with."""
    paths = {}
    for name in ("encoder", "decoder_step"):
        model = onnx.load(bundle.graph_path(precision, name))
        if name == graph:
            edit(model.graph)
        paths[name] = folder / f"{name}.onnx"
        onnx.save(model, paths[name])
    model = OrtModel(paths, bundle.specs(precision), bundle.config, precision, bundle.cache_form)
    return OrtSession(model, OrtSettings(threads=1))


def nodes_of(graph, kind, where):
    found = [node for node in graph.node if node.op_type == kind and where in node.name]
    assert found, f"no {kind} in {where}: the export has changed, plant the defect anew"
    return found


def drop_mask(graph, where):
    graph.initializer.append(numpy_helper.from_array(np.ones((1, 1, 1, 1), dtype=bool), "look"))
    for node in nodes_of(graph, "Where", where):
        node.input[0] = "look"


def shift_position(graph):
    for node in graph.node:
        node.input[:] = ["position/off" if name == "position" else name for name in node.input]
    graph.initializer.append(numpy_helper.from_array(np.array(1), "off"))
    graph.node.insert(0, helper.make_node("Add", ["position", "off"], ["position/off"], name="position/off"))


def swap_cache(graph, where):
    k, v = nodes_of(graph, "TensorScatter", where)
    k.input[1], v.input[1] = v.input[1], k.input[1]


def drop_scale(graph, where):
    (node,) = nodes_of(graph, "Mul", where)
    one = next(weight for weight in graph.initializer if weight.name == node.input[1])
    graph.initializer.append(numpy_helper.from_array(np.ones_like(numpy_helper.to_array(one)), "one"))
    node.input[1] = "one"


def perturb(graph, name):
    weight = next(weight for weight in graph.initializer if weight.name == name)
    values = numpy_helper.to_array(weight).copy()
    values[np.unravel_index(np.abs(values).argmax(), values.shape)] *= 1.01
    weight.CopyFrom(numpy_helper.from_array(values, name))


DEFECTS = {  # what is done to which graph, and where it must show first
    "encoder mask dropped": ("encoder", lambda g: drop_mask(g, "self_attn"), ("encoder", "encoder_states")),
    "cross mask dropped": ("decoder_step", lambda g: drop_mask(g, "decoder.0.cross_attn"), ("steps", "self_k.1")),
    "last cross mask dropped": ("decoder_step", lambda g: drop_mask(g, "decoder.1.cross_attn"), ("steps", "logits")),
    "position off by one": ("decoder_step", shift_position, ("steps", "self_k.0")),
    "k and v swapped": ("decoder_step", lambda g: swap_cache(g, "decoder.1.self_attn"), ("steps", "self_k.1")),
    "source scale missing": ("encoder", lambda g: drop_scale(g, "source_embedding"), ("encoder", "encoder_states")),
    "target scale missing": ("decoder_step", lambda g: drop_scale(g, "target_embedding"), ("steps", "self_k.0")),
}
LOOKED_UP = ("position off by one", "source scale missing", "target scale missing")
SLIGHT = {  # below the rounding of fp16, far above that of fp32
    "an encoder weight off by 1 %": ("encoder", "encoder.0.feed_forward.up.weight", ("encoder", "encoder_states")),
    "a cross weight off by 1 %": ("encoder", "decoder.1.cross_attn.kv.weight", ("encoder", "cross_")),
    "a decoder weight off by 1 %": ("decoder_step", "decoder.1.cross_attn.out.weight", ("steps", "logits")),
}


class TestPlantedDefects:
    @pytest.mark.slow
    @pytest.mark.parametrize("precision", ["fp32", "fp16"])
    @pytest.mark.parametrize("defect", DEFECTS)
    def test_is_caught_where_it_first_shows(self, bundle, tmp_path, defect, precision):
        graph, edit, expected = DEFECTS[defect]
        with edited(bundle, precision, tmp_path, edit, graph) as candidate:
            result = parity_with(bundle, candidate)
        assert not result
        first = next(tensor for tensor in result.tensors if not tensor and tensor.level != "coverage")
        assert (first.level, first.tensor) == expected
        level, part = result.first_failure
        if defect in LOOKED_UP:  # shows already where single tokens and positions are looked up
            assert level == "coverage"
        else:
            assert part is first
            assert result.reason.startswith(f"{level}: {first.tensor}")

    @pytest.mark.parametrize("defect", rest_slow(SLIGHT, [*SLIGHT][:1]))
    def test_a_single_weight_is_caught(self, bundle, tmp_path, defect):
        graph, name, (level, tensor) = SLIGHT[defect]
        with edited(bundle, "fp32", tmp_path, lambda g: perturb(g, name), graph) as candidate:
            result = parity_with(bundle, candidate)
        assert not result
        assert result.first_failure[0] == level
        assert result.first_failure[1].tensor.startswith(tensor)

    @pytest.mark.parametrize("positions", rest_slow(["learned", "rotary"], ["rotary"]))
    def test_a_wrong_position_is_caught_in_every_scheme(self, tmp_path, positions):
        """Rotary decodes do not change when all positions move alike; the cache does."""
        bundle = bundle_of(dataclasses.replace(SMALL, positions=positions), tmp_path)
        with edited(bundle, "fp32", tmp_path, shift_position, "decoder_step") as candidate:
            result = parity_with(bundle, candidate)
        assert result.first_failure[0] == "coverage"  # the last position has none behind it
        first = next(tensor for tensor in result.tensors if not tensor and tensor.level != "coverage")
        assert (first.level, first.tensor) == ("steps", "self_k.0")

    def test_an_unharmed_copy_passes(self, bundle, tmp_path):
        with edited(bundle, "fp32", tmp_path, lambda g: None, "encoder") as candidate:
            assert parity_with(bundle, candidate)

"""Attention of a decoder step as one node: the patterns of our forms, and that any other pattern stays as it is."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from support.kernel_checks import attributes, check_nodes, fused_nodes

from seq2engine.export.contract import attention_name, graph_specs
from seq2engine.export.kernel_forms.attention import fuse_attentions
from seq2engine.export.kernel_forms.heads import MASKED
from seq2engine.export.ort_forms.attention_outputs import attention_graph
from seq2engine.export.ort_forms.cross_rows import cross_rows
from seq2engine.export.ort_forms.interface import KEYS, TRANSPOSED
from seq2engine.export.ort_forms.transposed_keys import transposed_keys
from seq2engine.export.to_onnx import graphs_from_model
from seq2engine.model import layers
from seq2engine.model.checkpoint import random_model
from seq2engine.model.config import ModelConfig

SMALL = ModelConfig(1, 2, 2, 16, 24, 40, 40, max_source=12, max_target=12)
SIZES = {"B": 2, "K": 3, "S": 5, "L": 7}
FORMS = {
    "plain": lambda step: step,
    "transposed": transposed_keys,
    "shown": lambda step: attention_graph(step, SMALL.decoder_layers),
    "rows": cross_rows,
    "rows shown": lambda step: cross_rows(attention_graph(step, SMALL.decoder_layers)),
}


def step_of(config: ModelConfig = SMALL, cache_form: str = "static") -> onnx.ModelProto:
    return graphs_from_model(random_model(config, 4), cache_form)["decoder_step"]


def fused(model: onnx.ModelProto) -> onnx.ModelProto:
    made = onnx.ModelProto()
    made.CopyFrom(model)
    fuse_attentions(made.graph)
    return made


def kinds_of(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in fused_nodes(model)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scaled", [True, False], ids=["", "not scaled"])
def test_every_form_is_fused(form, scaled, feeds_for):
    config = dataclasses.replace(SMALL, scale_attention=scaled)
    plain = FORMS[form](step_of(config))
    made = fused(plain)
    assert kinds_of(made) == ["SelfAttention", "CrossAttention"] * config.decoder_layers
    left = {node.op_type for node in made.graph.node if not node.domain}
    assert left <= {"Unsqueeze", "Gather", "Mul", "Add", "MatMul", "LayerNormalization", "Relu", "Transpose"}
    assert sum(node.op_type == "Unsqueeze" for node in made.graph.node) == 1, "of the position; masks are read as given"
    first, second = fused_nodes(made)[:2]
    scale = np.float32(config.head_dim**-0.5 if scaled else 1.0)
    assert attributes(first) == {"heads": 2, "scale": scale}
    assert attributes(second) == {"heads": 2, "scale": scale, "transposed": int(form == "transposed")}
    assert list(first.input[1:]) == ["self_k.0", "self_v.0", "write_index", "self_mask"]
    assert list(first.output[1:]) == ["new_self_k.0", "new_self_v.0"]
    masks = [] if form.startswith("rows") else ["source_mask"]
    assert list(second.input[1:]) == ["cross_k.0", "cross_v.0", *masks]
    assert list(second.output[1:]) == ([attention_name(0)] if form.endswith("shown") else [])
    assert (first.name, second.name) == ("decoder.0.self_attn/SelfAttention", "decoder.0.cross_attn/CrossAttention")
    feeds = feeds_for(graph_specs(config)["decoder_step"], SIZES, vocab=40, positions=12)
    if form.startswith("rows"):
        feeds["source_mask"][:] = True
    if form == "transposed":
        feeds |= {name: array.transpose(TRANSPOSED) for name, array in feeds.items() if name.startswith(KEYS)}
    check_nodes(plain, made, feeds)


@pytest.mark.parametrize(
    ("changes", "cache_form"),
    [({"positions": "rotary"}, "static"), ({"positions": "relative"}, "static"), ({}, "growing")],
    ids=["rotary", "relative", "growing"],
)
def test_self_attention_of_another_kind_stays(changes, cache_form):
    plain = step_of(dataclasses.replace(SMALL, **changes), cache_form)
    made = fused(plain)
    assert kinds_of(made) == ["CrossAttention"] * SMALL.decoder_layers
    own = [node for node in plain.graph.node if ".self_attn/" in node.name]
    assert [node for node in made.graph.node if ".self_attn/" in node.name] == own


def test_masked_scores_are_those_of_the_model():
    assert MASKED == layers.MASKED


# --- graphs that are nearly ours --------------------------------------------------------------------------------------


def find(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.name == name)


def constant(model: onnx.ModelProto, array: np.ndarray) -> str:
    model.graph.initializer.append(numpy_helper.from_array(array, "other"))
    return "other"


def circular(model):
    find(model, "decoder.0.self_attn/TensorScatter").attribute.append(helper.make_attribute("mode", "circular"))


def other_mask_value(model):
    find(model, "decoder.0.self_attn/Where").input[2] = constant(model, np.array(-1e9, dtype=np.float32))


def other_mask_axes(model):
    find(model, "Unsqueeze.1").input[1] = constant(model, np.array([0]))


def other_order(model):
    split = find(model, "decoder.0.self_attn/Split")
    names = list(split.output)
    split.output[:] = [names[1], names[0], names[2]]


def cache_read_elsewhere(model):
    model.graph.node.append(helper.make_node("Neg", ["new_self_k.0"], ["negated"], name="negated"))
    model.graph.output.append(helper.make_tensor_value_info("negated", onnx.TensorProto.FLOAT, None))


def weights_read_elsewhere(model):
    model.graph.node.append(helper.make_node("Neg", ["decoder.0.self_attn/Softmax"], ["negated"], name="negated"))
    model.graph.output.append(helper.make_tensor_value_info("negated", onnx.TensorProto.FLOAT, None))


def weights_shown(model):
    name = "decoder.0.self_attn/Softmax"
    model.graph.output.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))


def a_scale_of_every_channel(model):
    find(model, "decoder.0.self_attn/Mul").input[1] = constant(model, np.ones(SMALL.head_dim, dtype=np.float32))


def two_write_indices(model):
    model.graph.node.insert(0, helper.make_node("Identity", ["write_index"], ["second_index"], name="second"))
    find(model, "decoder.0.self_attn/TensorScatter.1").input[2] = "second_index"


def merged_otherwise(model):
    find(model, "decoder.0.self_attn/Reshape.1").input[1] = constant(model, np.array([0, -1, SMALL.d_model]))


@pytest.mark.parametrize(
    "change",
    [
        circular,
        other_mask_value,
        other_mask_axes,
        other_order,
        cache_read_elsewhere,
        weights_read_elsewhere,
        weights_shown,
        a_scale_of_every_channel,
        two_write_indices,
        merged_otherwise,
    ],
    ids=lambda change: change.__name__,
)
def test_nearly_the_same_self_attention_stays(change):
    plain = step_of()
    change(plain)
    before = [node for node in plain.graph.node if node.name.startswith("decoder.0.self_attn/")]
    made = fused(plain)
    assert [node for node in made.graph.node if node.name.startswith("decoder.0.self_attn/")] == before
    assert kinds_of(made).count("CrossAttention") == SMALL.decoder_layers


def cross_mask_axes(model):
    find(model, "Unsqueeze.2").input[1] = constant(model, np.array([0, 1]))


def keys_transposed_otherwise(model):
    perm = find(model, "decoder.0.cross_attn/Transpose.1").attribute[0]
    perm.ints[:] = [0, 2, 3, 1]


def keys_made_otherwise(model):
    find(model, "decoder.0.cross_attn/Transpose.1").op_type = "Identity"


def cross_weights_read_elsewhere(model):
    model.graph.node.append(helper.make_node("Neg", ["decoder.0.cross_attn/Softmax"], ["negated"], name="negated"))
    model.graph.output.append(helper.make_tensor_value_info("negated", onnx.TensorProto.FLOAT, None))


def softmax_over_queries(model):
    find(model, "decoder.0.cross_attn/Softmax").attribute[0].i = -2


@pytest.mark.parametrize(
    "change",
    [
        cross_mask_axes,
        keys_transposed_otherwise,
        keys_made_otherwise,
        cross_weights_read_elsewhere,
        softmax_over_queries,
    ],
    ids=lambda change: change.__name__,
)
def test_nearly_the_same_cross_attention_stays(change):
    plain = step_of()
    change(plain)
    before = [node for node in plain.graph.node if node.name.startswith("decoder.0.cross_attn/")]
    made = fused(plain)
    assert [node for node in made.graph.node if node.name.startswith("decoder.0.cross_attn/")] == before
    assert kinds_of(made).count("SelfAttention") == SMALL.decoder_layers


def test_rows_with_other_shapes_stay():
    plain = FORMS["rows shown"](step_of())
    for node in plain.graph.node:
        if node.op_type == "Shape":
            node.attribute[0].i, node.attribute[1].i = 0, 1
    made = fused(plain)
    assert "CrossAttention" not in kinds_of(made)

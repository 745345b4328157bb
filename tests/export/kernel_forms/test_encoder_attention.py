"""Attention of an encoder as one node: our patterns, and that any other pattern stays as it is."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from support.kernel_checks import attributes, check_nodes, fused_nodes

from seq2engine.export.contract import graph_specs
from seq2engine.export.kernel_forms.attention import fuse_attentions
from seq2engine.export.ort_forms.flash_attention import flash_attention
from seq2engine.export.ort_forms.transposed_keys import transposed_keys
from seq2engine.export.to_onnx import graphs_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.config import ModelConfig

SMALL = ModelConfig(2, 1, 2, 16, 24, 40, 40, max_source=12, max_target=12)
SCOPE = "encoder.0.self_attn"
FORMS = {"plain": lambda encoder: encoder, "transposed": transposed_keys}


def encoder_of(config: ModelConfig = SMALL) -> onnx.ModelProto:
    return graphs_from_model(random_model(config, 4))["encoder"]


def fused(model: onnx.ModelProto) -> onnx.ModelProto:
    made = onnx.ModelProto()
    made.CopyFrom(model)
    fuse_attentions(made.graph)
    return made


def scopes_of(model: onnx.ModelProto) -> list[str]:
    return [node.name for node in fused_nodes(model)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scaled", [True, False], ids=["", "not scaled"])
def test_every_layer_is_fused(form, scaled, feeds_for):
    config = dataclasses.replace(SMALL, scale_attention=scaled)
    plain = FORMS[form](encoder_of(config))
    made = fused(plain)
    assert scopes_of(made) == [f"encoder.{layer}.self_attn/EncoderAttention" for layer in range(config.encoder_layers)]
    for node in fused_nodes(made):
        assert attributes(node) == {"heads": 2, "scale": np.float32(config.head_dim**-0.5 if scaled else 1.0)}
        assert node.input[1] == "source_mask", "as it is given: without further axes"
    left = [node.op_type for node in made.graph.node if not node.domain]
    assert not {"Softmax", "Where"} & set(left)
    assert left.count("Unsqueeze") == 1, "of the positions"
    assert left.count("Reshape") == left.count("Split") == config.decoder_layers, "of cross-attention's keys and values"
    feeds = feeds_for(graph_specs(config)["encoder"], {"B": 3, "S": 6}, vocab=40)
    assert not feeds["source_mask"].all()
    check_nodes(plain, made, feeds)


@pytest.mark.parametrize("positions", ["rotary", "relative"])
def test_attention_of_another_kind_stays(positions):
    plain = encoder_of(dataclasses.replace(SMALL, positions=positions))
    assert list(fused(plain).graph.node) == list(plain.graph.node)


def test_attention_that_is_fused_already_stays():
    plain = flash_attention(encoder_of(), SMALL.heads)
    made = fused(plain)
    assert sum(node.op_type == "MultiHeadAttention" for node in made.graph.node) == SMALL.encoder_layers
    assert not fused_nodes(made)


# --- graphs that are nearly ours --------------------------------------------------------------------------------------


def find(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.name == f"{SCOPE}/{name}")


def constant(model: onnx.ModelProto, array: np.ndarray) -> str:
    model.graph.initializer.append(numpy_helper.from_array(array, "other"))
    return "other"


def show(model: onnx.ModelProto, name: str) -> None:
    model.graph.output.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))


def other_mask_value(model):
    find(model, "Where").input[2] = constant(model, np.array(-1e9, dtype=np.float32))


def other_mask_axes(model):
    axes = constant(model, np.array([0, 1]))
    model.graph.node.insert(0, helper.make_node("Unsqueeze", ["source_mask", axes], ["other_mask"], name="other_mask"))
    find(model, "Where").input[0] = "other_mask"


def other_order(model):
    split = find(model, "Split")
    names = list(split.output)
    split.output[:] = [names[0], names[2], names[1]]


def keys_as_values(model):
    find(model, "MatMul.1").input[1] = find(model, "Transpose.1").input[0]


def keys_transposed_otherwise(model):
    find(model, "Transpose.1").attribute[0].ints[:] = [0, 2, 3, 1]


def softmax_over_queries(model):
    find(model, "Softmax").attribute[0].i = -2


def weights_read_elsewhere(model):
    model.graph.node.append(helper.make_node("Neg", [find(model, "Softmax").output[0]], ["negated"], name="negated"))
    show(model, "negated")


def weights_shown(model):
    show(model, find(model, "Softmax").output[0])


def values_read_elsewhere(model):
    model.graph.node.append(helper.make_node("Neg", [find(model, "Split").output[2]], ["negated"], name="negated"))
    show(model, "negated")


def a_scale_of_every_channel(model):
    find(model, "Mul").input[1] = constant(model, np.ones(SMALL.head_dim, dtype=np.float32))


def heads_that_are_no_thirds(model):
    find(model, "Reshape").input[1] = constant(model, np.array([0, 0, 2 * SMALL.heads, -1]))


def merged_otherwise(model):
    find(model, "Reshape.1").input[1] = constant(model, np.array([0, -1, SMALL.d_model]))


@pytest.mark.parametrize(
    "change",
    [
        other_mask_value,
        other_mask_axes,
        other_order,
        keys_as_values,
        keys_transposed_otherwise,
        softmax_over_queries,
        weights_read_elsewhere,
        weights_shown,
        values_read_elsewhere,
        a_scale_of_every_channel,
        heads_that_are_no_thirds,
        merged_otherwise,
    ],
    ids=lambda change: change.__name__,
)
def test_nearly_the_same_attention_stays(change):
    plain = encoder_of()
    change(plain)
    before = [node for node in plain.graph.node if node.name.startswith(SCOPE)]
    made = fused(plain)
    assert [node for node in made.graph.node if node.name.startswith(SCOPE)] == before
    assert scopes_of(made) == ["encoder.1.self_attn/EncoderAttention"]

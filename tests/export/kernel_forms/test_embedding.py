"""The embedding of tokens as one node: what it holds, and that lookups of another kind stay as they are."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest
from onnx import helper
from support.kernel_checks import attributes, check_nodes, fused_nodes

from seq2engine.export.contract import graph_specs
from seq2engine.export.kernel_forms.embedding import fuse_embeddings
from seq2engine.export.ort_forms.beam_positions import beam_positions
from seq2engine.export.ort_forms.interface import spec_with_beam_positions
from seq2engine.export.to_onnx import graphs_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.config import ModelConfig

SMALL = ModelConfig(1, 1, 2, 16, 24, 40, 40, max_source=12, max_target=12)
SIZES = {"B": 3, "K": 2, "S": 5, "L": 7, "M": 9}


def graph_of(name: str, config: ModelConfig = SMALL) -> onnx.ModelProto:
    return graphs_from_model(random_model(config, 3))[name]


def fused(model: onnx.ModelProto) -> onnx.ModelProto:
    made = onnx.ModelProto()
    made.CopyFrom(model)
    fuse_embeddings(made.graph)
    return made


@pytest.mark.parametrize("scaled", [True, False])
def test_a_step_has_a_position_for_all_tokens_of_a_source(scaled, feeds_for):
    plain = graph_of("decoder_step", dataclasses.replace(SMALL, scale_embeddings=scaled))
    made = fused(plain)
    (node,) = fused_nodes(made)
    assert node.op_type == "Embedding"
    assert [node.input[0], node.input[4]] == ["tokens", "position"], "position [B]: without a further axis"
    assert attributes(node) == {"factor": 4.0 if scaled else 1.0}
    assert not {"Gather", "Unsqueeze"} & {one.op_type for one in made.graph.node if "position" in one.input}
    check_nodes(plain, made, feeds_for(graph_specs(SMALL)["decoder_step"], SIZES, vocab=40, positions=12))


def test_a_position_for_every_beam(feeds_for):
    plain = beam_positions(graph_of("decoder_step"))
    made = fused(plain)
    (node,) = fused_nodes(made)
    assert node.input[4] == "position"
    spec = spec_with_beam_positions(graph_specs(SMALL)["decoder_step"])
    check_nodes(plain, made, feeds_for(spec, SIZES, vocab=40, positions=12))


def test_an_encoder_has_positions_from_0_on(feeds_for):
    plain = graph_of("encoder")
    made = fused(plain)
    (node,) = fused_nodes(made)
    assert list(node.input) == ["source_ids", "target_embedding.tokens.weight", "", "source_embedding.positions"]
    assert not {"Shape", "Squeeze", "Range"} & {one.op_type for one in made.graph.node}, "columns need no place"
    check_nodes(plain, made, feeds_for(graph_specs(SMALL)["encoder"], SIZES, vocab=40))


COUNTED = """
g (int64[B,S] tokens, bool[B,S] mask) => (float[B,S,8] y) {
    shape = Shape<start = 1, end = 2>(mask) length = Squeeze(shape) counted = Range(zero, length, one)
    place = Unsqueeze(counted, first) found = Gather<axis = 0>(table, tokens)
    where = Gather<axis = 0>(positions, place) y = Add(found, where)
}
"""
OTHERWISE = {
    "from another place": ("Range(zero,", "Range(two,"),
    "with another step": ("length, one)", "length, two)"),
    "rows": ("<start = 1, end = 2>", "<start = 0, end = 1>"),
    "another axis": ("Unsqueeze(counted, first)", "Unsqueeze(counted, last)"),
    "of no input": ("end = 2>(mask)", "end = 2>(table)"),
}


def counting(graph_of, text: str) -> onnx.ModelProto:
    numbers = {"zero": np.array(0), "one": np.array(1), "two": np.array(2), "first": np.array([0])}
    return graph_of(text, **numbers, last=np.array([1]), table=(20, 8), positions=(12, 8))


def test_counted_columns_need_no_place(graph_of):
    (node,) = fused(counting(graph_of, COUNTED)).graph.node
    assert list(node.input) == ["tokens", "table", "", "positions"]


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_is_counted_otherwise_is_a_place(graph_of, name):
    text = COUNTED.replace(*OTHERWISE[name])
    assert text != COUNTED
    made = fused(counting(graph_of, text))
    assert [node.input[4] for node in fused_nodes(made)] == ["place"]
    assert "Range" in [node.op_type for node in made.graph.node]


@pytest.mark.parametrize("positions", ["rotary", "relative"])
def test_without_positions_of_its_own(positions):
    (node,) = fused_nodes(fused(graph_of("decoder_step", dataclasses.replace(SMALL, positions=positions))))
    assert len(node.input) == 2, "tokens and table"


def test_what_others_read_too_is_not_swallowed():
    """A lookup whose rows are an output as well: only the lookup itself becomes the operator."""
    plain = graph_of("decoder_step")
    lookup = next(node for node in plain.graph.node if node.op_type == "Gather" and "tokens" in node.input)
    plain.graph.output.append(helper.make_tensor_value_info(lookup.output[0], onnx.TensorProto.FLOAT, None))
    (node,) = fused_nodes(fused(plain))
    assert node.output[0] == lookup.output[0]
    assert len(node.input) == 2


def test_columns_of_a_table_stay():
    plain = graph_of("decoder_step")
    lookup = next(node for node in plain.graph.node if node.op_type == "Gather" and "tokens" in node.input)
    del lookup.attribute[:]
    lookup.attribute.append(helper.make_attribute("axis", 1))
    assert not fused_nodes(fused(plain))

"""The audit refuses planted faults: every axis baked in, weights stored twice, foreign names, types and ops."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from seq2engine.errors import ExportError
from seq2engine.export.audit import PROBES, audit_graph
from seq2engine.export.contract import graph_specs
from seq2engine.export.precision.passes import fp16_from_fp32
from seq2engine.export.to_onnx import graphs_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS

TINY = PRESETS["tiny"]
CACHE_FORMS = ("static", "growing")


@pytest.fixture(scope="module")
def exported():
    model = random_model(TINY)
    return {cache_form: graphs_from_model(model, cache_form) for cache_form in CACHE_FORMS}


@pytest.fixture
def graphs(exported, copy_of):
    """(graph, cache form) -> a sound graph of our own export to plant a fault in, and its spec."""

    def get(name="decoder_step", cache_form="static"):
        return copy_of(exported[cache_form][name]), graph_specs(TINY, "fp32", cache_form)[name]

    return get


def node_of(model, name):
    return next(node for node in model.graph.node if node.name == name)


def constant(model, name, numbers):
    model.graph.initializer.append(numpy_helper.from_array(np.array(numbers, dtype=np.int64), name))
    return name


def put_before(model, reader, position, node):
    """Lets `node` make what the reader's input at that position was."""
    index = next(i for i, n in enumerate(model.graph.node) if n.name == reader)
    model.graph.node[index].input[position] = node.output[0]
    model.graph.node.insert(index, node)


def refusal(model, spec):
    with pytest.raises(ExportError) as error:
        audit_graph(model, spec)
    message = str(error.value)
    assert message.startswith(f"graph {spec.name} breaks the contract: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("cache_form", CACHE_FORMS)
@pytest.mark.parametrize("name", ["encoder", "decoder_step"])
def test_a_sound_graph_passes(name, cache_form, graphs):
    model, spec = graphs(name, cache_form)
    audit_graph(model, spec)
    audit_graph(fp16_from_fp32(model), graph_specs(TINY, "fp16", cache_form)[name])


def test_no_probe_size_can_stand_for_another():
    for probe in PROBES:
        assert len(set(probe.values())) == len(probe)
        assert probe["M"] == probe["L"] + probe["K"]
    first, second = PROBES
    assert all(first[letter] != second[letter] for letter in first)


# --- axes that were baked in ------------------------------------------------------------------------------------------

# Where the constant of a Reshape says how large an axis is, instead of 0 for "as it was".
RESHAPES = [
    ("encoder", "encoder.0.self_attn/Reshape", 0, "B"),
    ("encoder", "encoder.1.self_attn/Reshape.1", 0, "B"),
    ("encoder", "encoder.1.self_attn/Reshape.1", 1, "S"),
    ("encoder", "Reshape", 1, "S"),
    ("decoder_step", "decoder.0.self_attn/Reshape", 0, "B"),
    ("decoder_step", "decoder.1.cross_attn/Reshape", 0, "B"),
    ("decoder_step", "decoder.1.cross_attn/Reshape.1", 0, "B"),
    ("decoder_step", "decoder.0.cross_attn/Reshape", 1, "K"),
]


@pytest.mark.parametrize(("name", "reshape", "axis", "letter"), RESHAPES)
@pytest.mark.parametrize("cache_form", CACHE_FORMS)
def test_a_reshape_with_a_constant_size_is_refused(name, reshape, axis, letter, cache_form, graphs):
    """Whatever the constant: one that a probe has, one that none has, and 1, which broadcasting would hide."""
    for size in {1, PROBES[0][letter], PROBES[1][letter], 4}:
        model, spec = graphs(name, cache_form)
        node = node_of(model, reshape)
        shape = next(numpy_helper.to_array(w) for w in model.graph.initializer if w.name == node.input[1]).copy()
        assert shape[axis] == 0
        shape[axis] = size
        node.input[1] = constant(model, "planted", shape)
        assert "an axis is baked in" in (message := refusal(model, spec)) or "does not fit together" in message


def test_a_reshape_to_one_source_is_named(graphs):
    model, spec = graphs("encoder")
    node_of(model, "encoder.0.self_attn/Reshape.1").input[1] = constant(model, "planted", [1, 0, 64])
    message = refusal(model, spec)
    assert "encoder.0.self_attn/Reshape.1 makes [1, 5, 64] of [2, 5, 4, 16]" in message


@pytest.mark.parametrize("length", [PROBES[0]["S"], 64, PROBES[1]["S"]])
def test_an_expand_to_a_constant_source_length_is_refused(length, graphs):
    model, spec = graphs("encoder")
    mask = node_of(model, "encoder.0.self_attn/Where").input[0]
    shape = constant(model, "planted", [1, 1, 1, length])
    put_before(model, "encoder.0.self_attn/Where", 0, helper.make_node("Expand", [mask, shape], ["wide"], name="wide"))
    assert "does not fit together" in refusal(model, spec)


@pytest.mark.parametrize("length", [PROBES[0]["S"], 64, PROBES[1]["S"]])
def test_a_position_table_cut_to_the_example_is_refused(length, graphs):
    """What a tracer makes of `positions[:length]`."""
    model, spec = graphs("encoder")
    gather = node_of(model, "source_embedding/Gather")
    table = gather.input[0]
    bounds = [constant(model, "start", [0]), constant(model, "end", [length])]
    cut = helper.make_node("Slice", [table, *bounds], ["cut"], name="cut")
    put_before(model, next(n.name for n in model.graph.node if gather.output[0] in n.input), 1, cut)
    model.graph.node.remove(gather)
    assert "does not fit together" in refusal(model, spec)


@pytest.mark.parametrize(("cache_form", "letter"), [("static", "L"), ("growing", "M")])
@pytest.mark.parametrize("size", [23, 64, 512])
def test_a_mask_cut_to_a_constant_number_of_slots_is_refused(cache_form, letter, size, graphs):
    model, spec = graphs("decoder_step", cache_form)
    reader = next(node.name for node in model.graph.node if "self_mask" in node.input)
    bounds = [constant(model, "start", [0]), constant(model, "end", [size]), constant(model, "axis", [2])]
    put_before(model, reader, 0, helper.make_node("Slice", ["self_mask", *bounds], ["cut"], name="cut"))
    assert spec.input("self_mask").axes[2] == letter
    assert "does not fit together" in refusal(model, spec)


def test_an_output_of_a_constant_size_is_refused_with_both_shapes(graphs):
    model, spec = graphs("encoder")
    last = next(node for node in model.graph.node if "encoder_states" in node.output)
    last.output[0] = "whole"
    bounds = [constant(model, "start", [0]), constant(model, "end", [5]), constant(model, "axis", [1])]
    model.graph.node.append(helper.make_node("Slice", ["whole", *bounds], ["encoder_states"], name="cut"))
    for node in model.graph.node:
        node.input[:] = ["whole" if name == "encoder_states" else name for name in node.input]
    message = refusal(model, spec)
    assert "output encoder_states float32 [B, S, 64] has shape [1009, 5, 64] at" in message
    assert "expected [1009, 10007, 64]: an axis is baked in" in message


@pytest.mark.parametrize("tensor", ["tokens", "self_mask", "source_mask", "cross_k.1", "self_v.0"])
def test_an_axis_declared_as_a_number_is_refused(tensor, graphs):
    model, spec = graphs()
    value = next(value for value in model.graph.input if value.name == tensor)
    value.type.tensor_type.shape.dim[0].dim_value = 1
    expected = spec.input(tensor)
    baked = dataclasses.replace(expected, axes=(1, *expected.axes[1:]))
    assert f"input {baked}, expected {expected}" in refusal(model, spec)


def test_an_axis_with_another_letter_is_refused(graphs):
    model, spec = graphs()
    value = next(value for value in model.graph.output if value.name == "logits")
    value.type.tensor_type.shape.dim[1].dim_param = "beams"
    assert "output logits float32 [B, beams, 256], expected logits float32 [B, K, 256]" in refusal(model, spec)


# --- names and types --------------------------------------------------------------------------------------------------


def test_another_name_is_refused(graphs):
    model, spec = graphs()
    model.graph.input[1].name = "positions"
    assert "inputs differ: missing ['position'], unexpected ['positions']" in refusal(model, spec)


def test_an_output_too_few_is_refused(graphs):
    model, spec = graphs()
    del model.graph.output[-1]
    assert "outputs differ: missing ['new_self_v.1'], unexpected []" in refusal(model, spec)


def test_another_order_is_refused(graphs):
    model, spec = graphs("encoder")
    first, second = (onnx.ValueInfoProto.FromString(v.SerializeToString()) for v in model.graph.input)
    del model.graph.input[:]
    model.graph.input.extend([second, first])
    assert "inputs out of order" in refusal(model, spec)


@pytest.mark.parametrize(
    ("tensor", "element", "message"),
    [
        ("tokens", TensorProto.INT32, "input tokens int32 [B, K], expected tokens int64 [B, K]"),
        ("source_mask", TensorProto.INT64, "input source_mask int64 [B, S], expected source_mask bool [B, S]"),
        ("cross_k.0", TensorProto.FLOAT16, "input cross_k.0 float16 [B, 4, S, 16], expected cross_k.0 float32"),
    ],
)
def test_another_type_is_refused(tensor, element, message, graphs):
    model, spec = graphs()
    next(value for value in model.graph.input if value.name == tensor).type.tensor_type.elem_type = element
    assert message in refusal(model, spec)


def test_a_graph_of_another_precision_is_refused(graphs):
    model, _ = graphs()
    assert "expected cross_k.0 float16" in refusal(model, graph_specs(TINY, "fp16")["decoder_step"])


# --- ops and weights --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["If", "Loop", "Scan"])
def test_control_flow_is_refused(op, graphs):
    model, spec = graphs()
    branch = helper.make_graph([], "branch", [], [])
    bodies = {"If": {"then_branch": branch, "else_branch": branch}, "Loop": {"body": branch}, "Scan": {"body": branch}}
    model.graph.node.append(helper.make_node(op, [], [], name="planted", **bodies[op]))
    assert f"planted is an {op} (" in refusal(model, spec)


def test_an_op_that_is_not_standard_is_refused(graphs):
    model, spec = graphs()
    model.graph.node[0].domain = "com.microsoft"
    message = refusal(model, spec)
    assert f"{model.graph.node[0].name} is of com.microsoft, expected standard ops only" in message


@pytest.mark.parametrize("transposed", [False, True])
def test_a_weight_stored_twice_is_refused(transposed, graphs):
    model, spec = graphs()
    name = "target_embedding.tokens.weight"
    table = next(numpy_helper.to_array(w) for w in model.graph.initializer if w.name == name)
    again = np.ascontiguousarray(table.T) if transposed else table
    model.graph.initializer.append(numpy_helper.from_array(again, "output.tied"))
    assert f"output.tied stores the same weights as {name}" in refusal(model, spec)


def test_weights_of_equal_size_and_sum_are_not_taken_for_each_other(graphs):
    model, spec = graphs()
    table = next(numpy_helper.to_array(w) for w in model.graph.initializer if w.name == "output.weight")
    model.graph.initializer.append(numpy_helper.from_array(table[::-1].copy(), "upside.down"))
    for name in ("ones", "more.ones"):  # norms before training
        model.graph.initializer.append(numpy_helper.from_array(np.ones(512, dtype=np.float32), name))
    audit_graph(model, spec)


def test_all_problems_are_listed_and_many_are_counted(graphs):
    model, spec = graphs()
    model.graph.node[0].domain = "com.microsoft"
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.DOUBLE
    message = refusal(model, spec)
    assert "input tokens float64" in message
    assert message.count("; ") == 6
    # 13 inputs, 5 outputs and the node, of which six are shown
    assert message.endswith("; and 13 more")

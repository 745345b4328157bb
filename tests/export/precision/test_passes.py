"""The fp16 pass: everything that is a number becomes half, the logits leave in fp32, and nothing else changes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, numpy_helper

from seq2engine.export.contract import PRECISIONS
from seq2engine.export.precision.passes import PASSES, fp16_from_fp32, keep_fp32, to_half
from seq2engine.export.to_onnx import graphs_from_model
from seq2engine.model.checkpoint import random_model

LARGEST = float(np.finfo(np.float16).max)


@pytest.fixture(scope="module")
def step():
    return graphs_from_model(random_model("tiny"))["decoder_step"]


def test_every_precision_of_the_contract_has_a_pass():
    assert set(PASSES) == set(PRECISIONS)


def test_fp32_stays_as_it_is(step):
    assert keep_fp32(step) is step


def test_weights_are_rounded_and_ids_and_shapes_are_not(step):
    before = step.SerializeToString(deterministic=True)
    half = fp16_from_fp32(step)
    assert step.SerializeToString(deterministic=True) == before  # the other precisions are made of the same graph
    assert len(half.graph.initializer) == len(step.graph.initializer)
    for weight, rounded in zip(step.graph.initializer, half.graph.initializer, strict=True):
        assert rounded.name == weight.name
        given, made = numpy_helper.to_array(weight), numpy_helper.to_array(rounded)
        if weight.data_type == TensorProto.FLOAT:
            assert made.dtype == np.float16
            np.testing.assert_array_equal(made, given.astype(np.float16))
        else:
            assert made.dtype == given.dtype == np.int64
            np.testing.assert_array_equal(made, given)


def test_the_logits_are_cast_back_by_one_node_at_the_end(step):
    half = fp16_from_fp32(step)
    onnx.checker.check_model(half, full_check=True)
    last = half.graph.node[-1]
    assert (last.op_type, last.name, list(last.output)) == ("Cast", "logits/Cast", ["logits"])
    assert [node.name for node in half.graph.node[:-1]] == [node.name for node in step.graph.node]
    assert not any(node.op_type == "Cast" for node in step.graph.node)
    kinds = {value.name: value.type.tensor_type.elem_type for value in (*half.graph.input, *half.graph.output)}
    assert kinds["logits"] == TensorProto.FLOAT
    assert kinds["new_self_k.0"] == kinds["self_k.0"] == kinds["cross_v.1"] == TensorProto.FLOAT16
    assert kinds["tokens"] == TensorProto.INT64
    assert kinds["self_mask"] == TensorProto.BOOL


def test_the_masked_score_is_a_number_in_both_precisions(step):
    masked = next(w for w in fp16_from_fp32(step).graph.initializer if w.name.startswith("const/float32_-65504"))
    assert float(numpy_helper.to_array(masked)) == -LARGEST


@settings(deadline=None)  # a busy machine is not a failure
@given(st.floats(width=32, allow_nan=False))
def test_no_number_becomes_infinite_and_none_moves_further_than_rounding(number):
    made = to_half(np.array([number], dtype=np.float32))
    assert made.dtype == np.float16
    assert np.isfinite(made).all()
    if abs(number) >= LARGEST:
        assert made[0] == np.copysign(LARGEST, number)
    else:
        # Half the distance to the next number: 2**-11 of it, and 2**-25 where numbers get too small to keep that.
        assert abs(float(made[0]) - number) <= max(abs(number) * 2.0**-11, 2.0**-25)

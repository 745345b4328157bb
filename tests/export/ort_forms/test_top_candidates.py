"""The decoder step that reduces its own logits: the same graph otherwise, and numpy's numbers."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from support.rounding import exp_sum_error, sum_error

from seq2engine.errors import ExportError
from seq2engine.export.ort_forms.interface import CANDIDATES
from seq2engine.export.ort_forms.top_candidates import BLOCK, block_of, candidate_graph

SIZES = {"B": 2, "K": 3, "S": 5, "L": 16, "M": 19}
NAMES = [tensor.name for tensor in CANDIDATES]


def step_of(bundle, precision="fp32", load_external_data=True):
    path = bundle.graph_path(precision, "decoder_step")
    return onnx.load(path, load_external_data=load_external_data)


@cache
def reducer(vocab, invariant=False, by_softmax=False, opset=20):
    """Logits [B,K,V] -> what the pass makes of them: of a decoder step that does nothing but pass them on."""
    values = {"tokens": (TensorProto.INT64, ["B", "K"]), "given": (TensorProto.FLOAT, ["B", "K", vocab])}
    graph = helper.make_graph(
        [helper.make_node("Identity", ["given"], ["logits"])],
        "decoder_step",
        [helper.make_tensor_value_info(name, *value) for name, value in values.items()],
        [helper.make_tensor_value_info("logits", *values["given"])],
    )
    step = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    model = candidate_graph(step, invariant=invariant, by_softmax=by_softmax)
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def reduced(logits):
        tokens = np.zeros(logits.shape[:2], dtype=np.int64)
        return session.run(NAMES, {"tokens": tokens, "given": np.ascontiguousarray(logits)})

    return reduced


@pytest.mark.parametrize("cache_form", ["static", "growing"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_outputs_are_added_and_nothing_else_changes(bundles, feeds_for, run_onnx, cache_form, precision):
    bundle = bundles("tiny", cache_form)
    plain = step_of(bundle, precision)
    made = candidate_graph(plain)
    onnx.checker.check_model(made, full_check=True)
    spec = bundle.specs(precision)["decoder_step"]
    assert [output.name for output in made.graph.output] == [*(tensor.name for tensor in spec.outputs), *NAMES]
    assert list(made.graph.node)[: len(plain.graph.node)] == list(plain.graph.node)
    assert all(node.name.startswith("candidates/") for node in list(made.graph.node)[len(plain.graph.node) :])
    assert list(made.graph.initializer)[: len(plain.graph.initializer)] == list(plain.graph.initializer)

    feeds = feeds_for(spec, SIZES)
    outputs = run_onnx(made, feeds)
    reduced = [outputs.pop(name) for name in NAMES]
    for name, array in run_onnx(plain, feeds).items():
        np.testing.assert_array_equal(outputs[name], array)
    for found, again in zip(reduced, reducer(bundle.config.target_vocab)(outputs["logits"]), strict=True):
        np.testing.assert_array_equal(found, again)


def sum_of_blocks(vocab, block=BLOCK):
    """How far an exp_sum may be off: a sum of blocks, in which there are sums of exponentials."""
    return exp_sum_error(min(vocab, block)) + sum_error(-(-vocab // block))


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    batch=st.integers(1, 4),
    beams=st.integers(1, 9),
    vocab=st.sampled_from([1, 2, 5, 127, 128, 129, 1000, 1024]),
    levels=st.sampled_from([1, 2, 30, 10**6]),
    hidden=st.booleans(),
    invariant=st.booleans(),
)
def test_the_outputs_are_numpys(seed, batch, beams, vocab, levels, hidden, invariant):
    """Few levels make many ties, of which the lower token comes first; hidden logits are -inf."""
    random = np.random.default_rng(seed)
    logits = (random.integers(0, levels, (batch, beams, vocab)) * (20 / levels)).astype(np.float32)
    if hidden:
        logits[..., 1:][random.random((batch, beams, vocab - 1)) < 0.95] = -np.inf
    exp_sum, best_logits, best_tokens = reducer(vocab, invariant)(logits)
    order = np.argsort(-logits, axis=-1, kind="stable")[..., : beams + 1]
    np.testing.assert_array_equal(best_tokens, order)
    np.testing.assert_array_equal(best_logits, np.take_along_axis(logits, order, axis=-1))
    exact = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)).sum(axis=-1)
    np.testing.assert_allclose(exp_sum, exact, rtol=sum_of_blocks(vocab, BLOCK if invariant else block_of(vocab)))


@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize("vocab", [20_011, 32_000, 65_001])
def test_a_large_vocabulary_is_summed_up_well_and_with_invariant_sums_the_same_everywhere(vocab, invariant):
    logits = np.random.default_rng(0).normal(0, 3, (5, 2, vocab)).astype(np.float32)
    reduced, error = reducer(vocab, invariant), sum_of_blocks(vocab, BLOCK if invariant else block_of(vocab))
    exp_sum, _, _ = reduced(logits)
    exact = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)).sum(axis=-1)
    np.testing.assert_allclose(exp_sum, exact, rtol=error)
    assert error < exp_sum_error(vocab) / 5, "better than one by one"
    alone = [[reduced(logits[b : b + 1, k : k + 1])[0][0, 0] for k in range(2)] for b in range(5)]
    if invariant:
        assert exp_sum.tolist() == alone
    np.testing.assert_allclose(exp_sum, alone, rtol=2 * error)


@pytest.mark.parametrize(
    ("vocab", "block"),
    [(128, 128), (32_000, 128), (65_001, 141), (58_101, 107), (20_011, 128), (300, 150), (40, 128), (1, 128)],
)
def test_partial_sums_divide_the_vocabulary_where_they_can(vocab, block):
    assert block_of(vocab) == block


@pytest.mark.parametrize("vocab", [5, 20_011, 32_000])
def test_a_sum_by_softmax_is_one_of_all_and_the_same_everywhere(vocab):
    logits = np.random.default_rng(0).normal(0, 3, (5, 2, vocab)).astype(np.float32)
    by_softmax = reducer(vocab, by_softmax=True)
    exp_sum, *best = by_softmax(logits)
    exact = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)).sum(axis=-1)
    np.testing.assert_allclose(exp_sum, exact, rtol=exp_sum_error(vocab))
    assert exp_sum.tolist() == [[by_softmax(row[None, k : k + 1])[0][0, 0] for k in range(2)] for row in logits]
    for found, expected in zip(best, reducer(vocab)(logits)[1:], strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("by_softmax", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("places", [slice(None), 0, 40, 299])
def test_a_row_without_probabilities_has_no_sum(bad, places, by_softmax):
    logits = np.zeros((3, 1, 300), dtype=np.float32)
    logits[1, 0, places] = bad
    exp_sum, _, _ = reducer(300, by_softmax=by_softmax)(logits)
    possible = bad == -np.inf and places != slice(None)
    assert np.isfinite(exp_sum[:, 0]).tolist() == [True, possible, True]


def test_the_given_graph_is_left_as_it_was_and_its_weights_need_not_be_loaded(bundles):
    plain = step_of(bundles(), load_external_data=False)
    before = plain.SerializeToString(deterministic=True)
    assert candidate_graph(plain).ByteSize() < 100_000
    assert plain.SerializeToString(deterministic=True) == before


def test_another_graph_is_refused(bundles):
    encoder = onnx.load(bundles().graph_path("fp32", "encoder"))
    with pytest.raises(ExportError, match=r"encoder has no fp32 output logits \[B, K, V\]: it is not a decoder step"):
        candidate_graph(encoder)
    step = step_of(bundles(), load_external_data=False)
    step.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT16
    with pytest.raises(ExportError, match="decoder_step has no fp32 output logits"):
        candidate_graph(step)

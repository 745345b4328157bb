"""The shortcut to the best tokens: always the tokens that all logits would give, computed from few of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from support.rounding import FP32, apart, sum_error

from seq2engine.export.ort_forms.int8_matmul import row_products
from seq2engine.export.ort_forms.interface import CANDIDATES, worth_screening
from seq2engine.export.ort_forms.screened_argmax import path, screened_graph, screening, tables
from seq2engine.export.ort_forms.top_candidates import candidate_graph
from seq2engine.export.precision.quantise import quantised_graph
from seq2engine.model.config import ModelConfig

NAMES = ["logits", *(tensor.name for tensor in CANDIDATES)]
NOWHERE = Path("/nowhere")  # weights are loaded


def projection(table, bias=None):
    """A decoder step that does nothing but project: x [B,K,D] times the table [V,D], as the exporter writes it."""
    vocab, width = table.shape
    product = "logits" if bias is None else "output/MatMul"
    added = [helper.make_node("Add", [product, "output.bias"], ["logits"], name="output/Add")]
    graph = helper.make_graph(
        [
            helper.make_node("Transpose", ["table.weight"], ["output/Transpose"], name="output/Transpose", perm=[1, 0]),
            helper.make_node("MatMul", ["x", "output/Transpose"], [product], name="output/MatMul"),
            *([] if bias is None else added),
        ],
        "decoder_step",
        [
            helper.make_tensor_value_info("tokens", TensorProto.INT64, ["B", "K"]),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", "K", width]),
        ],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", "K", vocab])],
        [
            numpy_helper.from_array(table, "table.weight"),
            *([] if bias is None else [numpy_helper.from_array(bias, "output.bias")]),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def session_of(model):
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


class Both:
    """All logits, and the shortcut."""

    def __init__(self, model):
        made = screened_graph(candidate_graph(model), NOWHERE)
        onnx.checker.check_model(made)
        self.session = session_of(made)

    def __call__(self, x, whole):
        wanted = 0 if whole else x.shape[1] + 1  # as many as the whole graph gives
        given = {"tokens": np.zeros(x.shape[:2], dtype=np.int64), "x": x, "wanted": np.array([wanted])}
        return dict(zip(NAMES, self.session.run(NAMES, given), strict=True))


def same_best(table, x, bias=None):
    both = Both(projection(table, bias))
    whole, short = both(x, True), both(x, False)
    assert whole["logits"].shape[-1] == len(table)
    exact = np.einsum("bkd,vd->bkv", x.astype(np.float64), table.astype(np.float64)) + (0 if bias is None else bias)
    chosen = np.take_along_axis(exact, short["best_tokens"], axis=-1)
    wanted = np.take_along_axis(exact, whole["best_tokens"], axis=-1)
    close = sum_error(x.shape[-1]) * np.linalg.norm(x, axis=-1).max() * np.linalg.norm(table, axis=1).max()
    close += apart([(2, FP32)]) * np.abs(whole["best_logits"]).max()  # what adding a bias rounds
    assert np.allclose(chosen, wanted, rtol=0, atol=close), "another token only where rounding decides"
    assert np.allclose(short["best_logits"], whole["best_logits"], rtol=0, atol=close)
    assert np.array_equal(short["logits"], short["best_logits"])
    assert np.isfinite(short["exp_sum"]).all()
    return whole, short


def drawn(rng, vocab, width, kind):
    table = rng.standard_normal((vocab, width))
    if kind == "norms":
        table *= np.exp(2 * rng.standard_normal((vocab, 1)))
    elif kind == "tails":
        table = rng.standard_t(2, (vocab, width))
    elif kind == "twins":  # far closer than int8 can tell
        table = table[rng.integers(0, vocab // 4, vocab)] + 1e-5 * rng.standard_normal((vocab, width))
    elif kind == "shifted":
        table += 20 * rng.standard_normal(width)
    elif kind == "zeros":
        table[rng.random(vocab) < 0.9] = 0
    return table.astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(["plain", "norms", "tails", "twins", "shifted", "zeros"]),
    vocab=st.integers(40, 400),
    width=st.sampled_from([8, 33, 64]),
    batch=st.integers(1, 5),
    beams=st.integers(1, 6),
    size=st.sampled_from([1e-20, 1.0, 1e6]),
)
def test_the_best_are_the_best(seed, kind, vocab, width, batch, beams, size):
    rng = np.random.default_rng(seed)
    table = drawn(rng, vocab, width, kind)
    x = (size * rng.standard_normal((batch, beams, width))).astype(np.float32)
    x[rng.random(x.shape) < 0.2] = 0
    same_best(table, x)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(["plain", "norms", "tails", "twins", "zeros"]),
    spread=st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e6]),
    masked=st.sampled_from([0.0, -1e4, -1e9]),
    rows=st.integers(1, 6),
    size=st.sampled_from([1e-40, 1e-20, 1.0, 1e6]),
)
def test_the_best_are_the_best_with_a_bias(seed, kind, spread, masked, rows, size):
    """Also where the bias decides alone, and with tokens that it masks, as conversions of Marian models do."""
    rng = np.random.default_rng(seed)
    table = drawn(rng, 200, 32, kind)
    bias = (spread * rng.standard_normal(200)).astype(np.float32)
    bias[rng.random(200) < 0.2] += np.float32(masked)
    x = (size * rng.standard_normal((rows, 1, 32))).astype(np.float32)
    x[rng.random(x.shape) < 0.2] = 0
    x[0, 0] *= rng.choice([0.0, 1.0])
    same_best(table, x, bias)


def test_tokens_are_equal_where_logits_are_clear():
    rng = np.random.default_rng(1)
    table = rng.standard_normal((5000, 64)).astype(np.float32)
    whole, short = same_best(table, rng.standard_normal((200, 1, 64)).astype(np.float32))
    assert np.array_equal(whole["best_tokens"], short["best_tokens"])


def test_of_equal_logits_the_lower_token_wins():
    table = np.ones((300, 16), dtype=np.float32)
    table[200:] = 2
    whole, short = same_best(table, np.ones((2, 1, 16), dtype=np.float32))
    assert short["best_tokens"].tolist() == whole["best_tokens"].tolist() == [[[200, 201]], [[200, 201]]]


def test_a_row_of_zeros_gives_the_first_tokens():
    x = np.zeros((2, 3, 16), dtype=np.float32)
    x[1] = 1
    table = np.random.default_rng(0).standard_normal((300, 16)).astype(np.float32)
    whole, short = Both(projection(table))(x, True), Both(projection(table))(x, False)
    assert short["best_tokens"][0].tolist() == whole["best_tokens"][0].tolist() == [[0, 1, 2, 3]] * 3
    assert np.array_equal(short["best_tokens"][1], whole["best_tokens"][1])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_seen(bad):
    x = np.ones((3, 1, 16), dtype=np.float32)
    x[1, 0, 5] = bad
    table = np.random.default_rng(0).standard_normal((300, 16)).astype(np.float32)
    found = Both(projection(table))(x, False)
    sound = np.isfinite(found["exp_sum"]) & np.isfinite(found["best_logits"][..., 0])
    assert sound[:, 0].tolist() == [True, False, True]


@pytest.mark.parametrize("spread", [None, 0.0, 30.0, 1000.0])
def test_few_tokens_are_looked_at(spread):
    """As many as are in doubt: some ten of 8,000 for a row, where logits are as close together as they can be; also
    where a bias decides, and the best tokens are others than without it."""
    rng = np.random.default_rng(3)
    table = rng.standard_normal((8000, 512)).astype(np.float32)
    bias = None if spread is None else (spread * rng.standard_normal(8000)).astype(np.float32)
    nodes = screening("x", "table", None if bias is None else "bias")
    end = next(i for i, node in enumerate(nodes) if node.output[0] == path("candidates"))
    constants = {**tables(table, bias), "table": table} | ({} if bias is None else {"bias": bias})
    graph = helper.make_graph(
        nodes[: end + 1],
        "screening",
        [
            helper.make_tensor_value_info("wanted", TensorProto.INT64, [1]),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", "K", 512]),
        ],
        [helper.make_tensor_value_info(path("candidates"), TensorProto.INT64, ["C"])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    session = session_of(helper.make_model(graph, opset_imports=opsets, ir_version=10))
    counts = []
    for rows in (1, 8):
        x = rng.standard_normal((rows, 1, 512)).astype(np.float32)
        (candidates,) = session.run(None, {"wanted": np.array([2]), "x": x})
        counts.append(len(candidates))
        best = np.argsort(-(x[:, 0] @ table.T + (0 if bias is None else bias)), axis=1)[:, :2]
        assert {*best.ravel().tolist()} <= {*candidates.tolist()}
    assert counts[0] < 100
    assert counts[1] < 500


@pytest.mark.parametrize("wanted", [1, 2, 6])
def test_int8_logits_with_a_bias_are_those_of_the_whole(wanted):
    rng = np.random.default_rng(5)
    table, bias = rng.standard_normal((700, 32)).astype(np.float32), rng.standard_normal(700).astype(np.float32)
    both = Both(row_products(quantised_graph(projection(table, bias), "w8a8")))
    x = rng.standard_normal((6, 5, 32)).astype(np.float32)
    given = {"tokens": np.zeros(x.shape[:2], dtype=np.int64), "x": x}
    found = dict(zip(NAMES, both.session.run(NAMES, {**given, "wanted": np.array([wanted])}), strict=True))
    whole = both(x, True)
    assert np.array_equal(whole["best_tokens"][..., :wanted], found["best_tokens"])
    assert np.array_equal(whole["best_logits"][..., :wanted], found["best_logits"])
    assert np.array_equal(found["logits"], found["best_logits"])


@pytest.mark.parametrize("beams", [1, 5])
def test_int8_logits_are_ranked_before_they_are_scaled(beams):
    rng = np.random.default_rng(5)
    table = rng.standard_normal((700, 32)).astype(np.float32)
    model = row_products(quantised_graph(projection(table), "w8a8"))
    both = Both(model)
    x = (rng.standard_normal((6, beams, 32)) * np.exp(rng.standard_normal((6, beams, 1)))).astype(np.float32)
    whole, short = both(x, True), both(x, False)
    assert np.array_equal(whole["best_tokens"], short["best_tokens"])
    # The same integer by the same scales, in another order.
    assert np.allclose(whole["best_logits"], short["best_logits"], rtol=apart([(4, FP32)]), atol=0)


@pytest.mark.parametrize(
    ("values", "precision", "worth"),
    [
        ({}, "fp32", True),
        ({}, "w8a8", True),
        ({}, "fp16", False),
        ({"tie_output": False}, "fp32", False),
        ({"tie_output": False}, "w8a8", True),
        ({"output_bias": True}, "fp32", True),
        ({"output_bias": True}, "w8a8", True),
        ({"target_vocab": 100, "source_vocab": 100}, "fp32", False),
    ],
)
def test_what_is_worth_it(values, precision, worth):
    assert worth_screening(ModelConfig(**values), precision) is worth

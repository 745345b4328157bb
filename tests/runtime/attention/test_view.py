"""Cross-attention weights: ONNX Runtime and PyTorch agree in every scheme, and with the formula."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rounding import FP16, attention_error, exp_sum_error, sum_error

from seq2engine.errors import ConfigError, RequestError
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model, save_checkpoint
from seq2engine.model.presets import PRESETS
from seq2engine.model.tokenizers.symbols import SymbolTokenizer, table_from_texts
from seq2engine.runtime.attention.view import AttentionView, LayerCheck, checks_of, weights_of
from seq2engine.runtime.encoder_inputs import padded
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.torch_session import TorchSession
from seq2engine.runtime.translator import load

SCHEMES = [(p, n) for p in ("sinusoidal", "learned", "rotary") for n in ("post", "pre")]
SMALL = dataclasses.replace(
    PRESETS["tiny"], d_model=32, d_ff=48, source_vocab=40, target_vocab=40, max_source=20, max_target=24
)
LINE = "5 6 7 8 9 30 11"


def attention_of(bundle, line, precision=None, threads=1, ids=False, **how):
    with load(bundle, precision=precision, threads=threads, ids=ids) as model:
        return model.attention(line, **how)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return onnx_from_model(random_model(SMALL, 1), tmp_path_factory.mktemp("bundles") / "small", ("fp32", "fp16"))


@pytest.fixture(scope="module")
def text_bundle(tmp_path_factory):
    """Spells words in capitals, as far as random weights can; decodes with two beams, at most six tokens."""
    root = tmp_path_factory.mktemp("text")
    tables = [table_from_texts([letters], "characters", lower) for letters, lower in (("abc d", True), ("ABCD", False))]
    sizes = {"source_vocab": len(tables[0].symbols), "target_vocab": len(tables[1].symbols), "share_embeddings": False}
    model = random_model(dataclasses.replace(SMALL, **sizes), 3)
    checkpoint = save_checkpoint(model, root / "checkpoint")
    (checkpoint / "tokenizer").mkdir()
    SymbolTokenizer(*tables).write(checkpoint / "tokenizer")
    (checkpoint / "generation.json").write_text('{"beam": 2, "nbest": 2, "max_length": 6, "start": 4}')
    return onnx_from_model(model, root / "bundle", ("fp32",), companions=checkpoint)


@pytest.mark.each_value
@pytest.mark.parametrize(("positions", "norm"), SCHEMES)
@pytest.mark.parametrize("form", ["static", "growing"])
def test_onnx_runtime_attends_where_torch_attends(tmp_path, positions, norm, form):
    config = dataclasses.replace(SMALL, positions=positions, norm=norm)
    view = attention_of(
        onnx_from_model(random_model(config, 5), tmp_path / "b", ("fp32",), cache_form=form), LINE, threads=1
    )
    assert view, view.reason
    assert view.cache_form == form
    assert view.weights.shape == (2, 4, len(view.target_ids), 7)
    assert view.weights.dtype == np.float32
    np.testing.assert_allclose(view.weights.sum(axis=-1), 1, rtol=0, atol=exp_sum_error(7) + sum_error(7))
    assert len(view.checks) == 2
    near = attention_error(view.weights, config)
    assert all(check.difference < near for check in view.checks)


def test_fp16_is_held_to_what_torch_does_in_fp16(bundle):
    view = attention_of(bundle, LINE, precision="fp16", threads=1)
    assert view, view.reason
    assert view.precision == "fp16"
    near = attention_error(view.weights, bundle.config, "fp16")
    assert FP16 / 16 < max(check.candidate for check in view.checks) < near, "an error of fp16, not of fp32"
    np.testing.assert_allclose(view.weights.sum(axis=-1), 1, rtol=0, atol=exp_sum_error(7) + 7 * FP16)


@settings(max_examples=8, deadline=None)
@given(source=st.lists(st.integers(3, 39), min_size=1, max_size=20), count=st.integers(1, 24), seed=st.integers(0, 99))
def test_any_output_of_any_source_is_seen_alike(bundle, source, count, seed):
    outputs = tuple(np.random.default_rng(seed).integers(3, 40, count).tolist())
    seen = [weights_of(make, source, outputs, SearchOptions()) for make in sessions_of(bundle)]
    checks = checks_of(*seen, "fp32")
    assert all(checks), [check.reason for check in checks]


def sessions_of(bundle):
    yield open_session(bundle, threads=1, attention=True)
    yield open_session(bundle, "torch", "fp32", attention=True)
    yield open_session(bundle, "torch", "fp64", attention=True)


def test_the_formula_gives_the_same():
    """The first layer by hand: softmax(q k / sqrt(E)) of every head, from what `forward` feeds its cross-attention."""
    model = random_model(SMALL, 4)
    source, outputs = [5, 9, 17, 30], (8, 3, 25)
    seen = weights_of(TorchSession(random_model(SMALL, 4), "fp64", attention=True), source, outputs, SearchOptions())
    model = model.double()
    cross = model.decoder[0].cross_attn
    fed = []
    ids, mask = (torch.from_numpy(array) for array in padded([source], SMALL.pad_id))
    with torch.no_grad(), cross.register_forward_pre_hook(lambda module, args: fed.append(args[0])):
        model(ids, mask, torch.tensor([[SMALL.start_id, *outputs[:-1]]]))
        states, _ = model.encode(ids, mask)
        q = (fed[0][0] @ cross.q.weight.T + cross.q.bias).numpy()  # [T, D]
        k = (states[0] @ cross.kv.weight[: SMALL.d_model].T + cross.kv.bias[: SMALL.d_model]).numpy()  # [S, D]
    near = attention_error(seen, SMALL, "fp64")
    for head in range(SMALL.heads):
        part = slice(head * SMALL.head_dim, (head + 1) * SMALL.head_dim)
        scores = np.exp(q[:, part] @ k[:, part].T / math.sqrt(SMALL.head_dim))
        np.testing.assert_allclose(seen[0, head], scores / scores.sum(axis=1, keepdims=True), rtol=0, atol=near)


def test_attention_outputs_do_not_change_the_tokens(bundle):
    options = SearchOptions(max_length=24, beam=3)
    sources = [[5, 6, 7], [8], [9, 10, 11, 12]]
    plain, looking = open_session(bundle, threads=1), open_session(bundle, threads=1, attention=True)
    outputs, torch_outputs = (
        [[found.tokens for found in nbest] for nbest in generate(session, sources, options)]
        for session in (looking, open_session(bundle, "torch", "fp32", attention=True))
    )
    assert outputs == torch_outputs == [[found.tokens for found in n] for n in generate(plain, sources, options)]


def test_no_hook_stays_behind(bundle):
    session = open_session(bundle, "torch", "fp32", attention=True)
    weights_of(session, [5, 6], (7,), SearchOptions())
    assert not any(module._forward_hooks for module in session.model.modules())


def test_ids_are_their_own_labels(bundle):
    view = attention_of(bundle, LINE, max_length=5, beam=2)
    assert (view.text, view.beam) == (LINE, 2)
    assert view.source == tuple(LINE.split())
    assert view.output == " ".join(view.target)
    assert view.target == tuple(map(str, view.target_ids))
    with open_session(bundle) as session:
        (found,) = generate(session, [list(view.source_ids)], SearchOptions(max_length=5, beam=2))
    assert view.target_ids == found[0].tokens


def test_text_is_decoded_as_the_model_wishes(text_bundle):
    view = attention_of(text_bundle, " Ab cx")
    assert view.source == (" ", "a", "b", " ", "c", "<unk>", "</s>")
    assert view.text == "Ab cx"
    assert view.beam == 2
    assert len(view.target) <= 6
    assert view.output == "".join(token for token in view.target if token in "ABCD")
    assert attention_of(text_bundle, "5 6", ids=True, beam=1).source == ("a", "b")


def test_the_start_token_of_the_search_is_fed(text_bundle):
    view = attention_of(text_bundle, "abc")
    session = open_session(text_bundle, "torch", "fp32", attention=True)
    own, default = (
        weights_of(session, view.source_ids, view.target_ids, SearchOptions(start=start)) for start in (4, None)
    )
    near = attention_error(own, text_bundle.config)
    np.testing.assert_allclose(view.weights, own, rtol=0, atol=near)
    assert np.abs(view.weights - default).max() > near


def test_json_has_everything(bundle):
    view = attention_of(bundle, LINE, max_length=4)
    values = json.loads(view.to_json())
    assert values["verdict"] is True
    np.testing.assert_allclose(values["weights"], view.weights, rtol=0, atol=5.1e-7)  # six decimals are written
    assert values["source"] == LINE.split()
    assert [check["layer"] for check in values["checks"]] == [1, 2]


# --- verdicts and refusals --------------------------------------------------------------------------------------------


def test_weights_that_differ_are_reported():
    exact = np.full((2, 1, 3, 4), 0.25)
    rounded = exact + np.float64(1e-8)
    good, bad = checks_of(np.stack([exact[0], exact[1] + 1e-3]), rounded, exact, "fp32")
    assert good
    assert not bad
    assert bad.reason == "layer 2: error 3e+04x that of PyTorch, allowed 16x"
    view = AttentionView("a", "b", ("a",), ("b",), (1,), (2,), "fp32", "static", 1, exact, (good, bad))
    assert not view
    assert view.reason == bad.reason


def test_an_exact_reference_leaves_room_to_round():
    exact = np.full((1, 1, 1, 2), 0.5)
    assert all(checks_of(exact + 1e-7, exact, exact, "fp32"))
    assert not any(checks_of(exact + 1e-4, exact, exact, "fp32"))


@pytest.mark.parametrize("which", [0, 1])
def test_not_a_number_fails(which):
    seen = [np.full((1, 1, 1, 2), 0.5) for _ in range(3)]
    seen[which][0, 0, 0, 1] = np.nan
    (check,) = checks_of(*seen, "fp32")
    assert not check
    assert "not finite" in check.reason
    view = AttentionView("a", "b", ("a", "c"), ("b",), (1, 4), (2,), "fp32", "static", 1, seen[0], (check,))
    assert json.loads(view.to_json())["verdict"] is False


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("  ", "the text is empty"),
        ("5 six", "'six' is not a token id, expected a line such as: 17 4 250"),
        ("5 99", "token 99, the vocabulary has 40"),
        ("5 -1", "'-1' is not a token id"),
        ("5 " * 21, "21 tokens, at most 20"),
    ],
)
def test_wrong_ids_are_refused(bundle, line, message):
    with pytest.raises(RequestError, match=message):
        attention_of(bundle, line)


def test_wrong_requests_are_refused(bundle, text_bundle):
    with pytest.raises(RequestError, match="the text is empty"):
        attention_of(text_bundle, " ")
    with pytest.raises(RequestError, match="not UTF-8"):
        attention_of(text_bundle, "a\udcff")
    with pytest.raises(RequestError, match="22 tokens, at most 20"):
        attention_of(text_bundle, "a" * 21)
    with pytest.raises(RequestError, match="max length 25, at most 24"):
        attention_of(bundle, LINE, max_length=25)
    with pytest.raises(ConfigError, match="beam 0"):
        attention_of(bundle, LINE, beam=0)


def test_a_check_is_its_own_truth():
    assert LayerCheck(1, 0.0, 1e-7, 1e-7, 1e-8)
    assert not LayerCheck(1, 0.0, 1e-5, 1e-7, 1e-8)

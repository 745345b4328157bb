"""A shortlist: a smaller output projection decodes like the whole one with all other tokens masked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rounding import assert_same_outputs, exp_sum_error, rounding_from_session

from seq2engine.errors import ConfigError, ExportError, RequestError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.ort_forms.shortlist import shortlist_graph
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.search.option_checks import BEAM_STYLES
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step import Hypothesis
from seq2engine.runtime.search.step_output import Shortlist, StepOutput
from seq2engine.runtime.session import Session
from seq2engine.runtime.text.continuous_batching import translate_many

TINY = PRESETS["tiny"]
CONFIGS = {
    "tied": dataclasses.replace(TINY, tie_output=True),
    "biased": dataclasses.replace(TINY, tie_output=False, output_bias=True),
}
SOURCES = [[5, 6, 7], [9], [40, 41, 42, 43, 44, 45]]
TOKENS = (3, 7, 8, 17, 48, 50, 81, 95, 148, 195, 196, 200, 240)
END = TINY.end_id
RULES: dict[str, dict[str, Any]] = {
    "none": {},
    "rules": {"repetition_penalty": 1.3, "no_repeat_ngram": 2, "banned": ((17,),), "first_banned": (48,)},
    "forced": {"prefix": (7, 8), "allowed": (7, 8, 81, 95)},
}


@pytest.fixture(scope="module", params=CONFIGS)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    model = random_model(CONFIGS[request.param])
    return onnx_from_model(model, tmp_path_factory.mktemp(request.param) / "run7", precisions=("fp32", "fp16"))


@pytest.fixture(scope="module", params=["onnxruntime fp32", "onnxruntime fp16", "torch fp32", "torch fp64"])
def session(request: pytest.FixtureRequest, bundle: Bundle) -> Any:
    backend, precision = request.param.split()
    with open_session(bundle, backend, precision) as opened:
        yield opened


@contextmanager
def hidden(session: Session, tokens: tuple[int, ...] = TOKENS) -> Iterator[None]:
    """The session as if it knew nothing of shortlists: it makes all logits, and all others are -inf.

    It decodes by itself: a worker of one thread, which few rows go to where there are two, would hide nothing.
    """
    step = session.step
    others = np.delete(np.arange(session.config.target_vocab), [*tokens, END])

    def hiding(*given: Any) -> StepOutput:
        logits = step(*given).logits.copy()
        logits[..., others] = -np.inf
        return StepOutput(logits)

    hidden = {"step": hiding, "workers": None, "ahead": None}  # nor does it choose tokens in steps of its own
    with mock.patch.multiple(session, **hidden):
        yield


def same(
    ours: list[list[Hypothesis]], theirs: list[list[Hypothesis]], session: Session, options: SearchOptions
) -> None:
    """The states are the same bits, so that only the projection rounds in two ways."""
    near = rounding_from_session(session, SOURCES, options.max_length, stretch=options.repetition_penalty)
    assert_same_outputs(ours, theirs, near.of_projection(session.config), options)


@pytest.mark.each_value
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("beam_style", BEAM_STYLES)
def test_a_shortlist_decodes_like_masked_logits(session: Session, beam_style: str, rules: str) -> None:
    for beam in (1, 4):
        options = SearchOptions(max_length=6, beam=beam, nbest=beam, beam_style=beam_style, **RULES[rules])
        found = generate(session, SOURCES, dataclasses.replace(options, shortlist=TOKENS))
        with hidden(session):
            same(found, generate(session, SOURCES, options), session, options)
        assert {token for nbest in found for best in nbest for token in best.tokens} <= {*TOKENS, END}


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("precision", ["w8a8", "int8", "int4", "fp8"])
def test_quantised_weights_are_shortened_too(tmp_path: Path, precision: str, tied: bool) -> None:
    model = random_model(dataclasses.replace(TINY, tie_output=tied))
    quantised = onnx_from_model(model, tmp_path / "b", precisions=(precision,))
    options = SearchOptions(max_length=12, beam=2, nbest=2)
    with open_session(quantised, "onnxruntime", precision) as session:
        found = generate(session, SOURCES, dataclasses.replace(options, shortlist=TOKENS))
        with hidden(session):
            same(found, generate(session, SOURCES, options), session, options)
    assert {token for nbest in found for h in nbest for token in h.tokens} <= {*TOKENS, END}


def test_where_rules_renormalise_it_is_the_vocabulary_mask(session: Session) -> None:
    options = SearchOptions(max_length=6, beam=3, nbest=3, beam_style="ctranslate2")
    short, masked = (
        generate(session, SOURCES, dataclasses.replace(options, **{name: TOKENS})) for name in ("shortlist", "allowed")
    )
    same(short, masked, session, options)


def test_greedy_search_outputs_the_same_with_a_mask_and_likelier(session: Session) -> None:
    short, masked = (
        generate(session, SOURCES, SearchOptions(max_length=6, **{name: TOKENS})) for name in ("shortlist", "allowed")
    )
    assert [nbest[0].tokens for nbest in short] == [nbest[0].tokens for nbest in masked]
    assert all(one[0].score > other[0].score for one, other in zip(short, masked, strict=True))


@pytest.mark.each_value
def test_sampling_and_continuous_batching_know_the_shortlist(session: Session) -> None:
    sampled = SearchOptions(max_length=6, sample=True, nbest=3, seed=1)
    found = generate(session, SOURCES, dataclasses.replace(sampled, shortlist=TOKENS))
    beams = SearchOptions(max_length=6, beam=2)
    fed = sorted(translate_many(session, SOURCES, dataclasses.replace(beams, shortlist=TOKENS), 2))
    with hidden(session):
        same(found, generate(session, SOURCES, sampled), session, sampled)
        again = sorted(translate_many(session, SOURCES, beams, 2))
    same([nbest for _, nbest in fed], [nbest for _, nbest in again], session, beams)


@pytest.mark.each_value
def test_decodes_without_a_shortlist_are_as_before_and_the_latest_is_kept(session: Session) -> None:
    plain = generate(session, SOURCES, SearchOptions(max_length=6))
    kept = [kept_after(session, tokens) for tokens in ((7, 9), (7, 9), (7,), (7, 9))]
    assert [one is kept[0] for one in kept] == [True, True, False, False]
    assert generate(session, SOURCES, SearchOptions(max_length=6)) == plain


def kept_after(session: Any, tokens: tuple[int, ...]) -> object:
    """What the session keeps for a shortlist that it was given (by itself, not by a worker of one thread)."""
    with mock.patch.object(session, "workers", None):
        generate(session, SOURCES, SearchOptions(max_length=2, shortlist=tokens))
    return (session.latest if session.backend == "torch" else session.decoders.latest)[1]


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [(END,), (7,), (7, 7, 9)])
@pytest.mark.parametrize("beam", [1, 4])
def test_a_shortlist_may_be_shorter_than_the_beam(session: Session, tokens: tuple[int, ...], beam: int) -> None:
    options = SearchOptions(max_length=5, beam=beam, nbest=beam)
    found = generate(session, SOURCES, dataclasses.replace(options, shortlist=tokens))
    with hidden(session, tokens):
        same(found, generate(session, SOURCES, options), session, options)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    tokens=st.sets(st.integers(0, 299), min_size=1, max_size=20),
    batch=st.integers(1, 3),
    beams=st.integers(1, 4),
    levels=st.sampled_from([1, 3, 10**6]),
)
def test_an_answer_about_a_shortlist_is_one_about_masked_logits(
    seed: int, tokens: set[int], batch: int, beams: int, levels: int
) -> None:
    random = np.random.default_rng(seed)
    shortlist = Shortlist(tuple(sorted(tokens)), 300)
    raw = (random.integers(0, levels, (batch, beams, len(tokens))) * (9 / levels)).astype(np.float32)
    answer = StepOutput(raw, shortlist=shortlist)
    whole = StepOutput(answer.logits)
    assert answer.logits.shape == (batch, beams, 300)
    assert np.isfinite(answer.logits).sum() == raw.size
    np.testing.assert_allclose(answer.normaliser, whole.normaliser, rtol=0, atol=exp_sum_error(300))
    count = answer.candidates.tokens.shape[-1]
    assert count == min(beams + 1, len(tokens))
    np.testing.assert_array_equal(answer.candidates.tokens, whole.candidates.tokens[..., :count])
    best = answer.candidates.tokens[..., 0]
    np.testing.assert_array_equal(answer.logits_of(best), whole.logits_of(best))
    rows = random.integers(0, batch, 2)
    np.testing.assert_array_equal(answer.of(rows).candidates.tokens, answer.candidates.tokens[rows])
    np.testing.assert_array_equal(answer.of(rows).logits, whole.logits[rows])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shortlist": ()}, "no token is allowed"),
        ({"shortlist": (7, 8), "allowed": (9,)}, "no token is allowed"),
        ({"shortlist": (7, 8), "banned": ((7,), (8,))}, "no token is allowed"),
        ({"shortlist": (7, 8), "prefix": (7, 9, 10)}, "prefix has 9 10, which is not in the shortlist"),
    ],
)
def test_wishes_that_a_shortlist_cannot_meet_are_refused_at_once(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SearchOptions(**given)


def test_what_a_shortlist_contradicts_is_refused(session: Session) -> None:
    for chosen, message in (
        ({"shortlist": (300_000,)}, "token 300000 asked for"),
        ({"shortlist": (7,), "forced_eos": 9}, "forced eos is 9, which is not in the shortlist"),
    ):
        with pytest.raises(RequestError, match=message):
            generate(session, SOURCES, SearchOptions(**chosen))


def test_the_embedding_stays_whole_and_the_projection_is_all_that_changes(bundle: Bundle) -> None:
    path = bundle.graph_path("fp32", "decoder_step")
    plain = onnx.load(path, load_external_data=False)
    before = plain.SerializeToString(deterministic=True)
    made = shortlist_graph(plain, TOKENS, Path(path).parent)
    assert plain.SerializeToString(deterministic=True) == before
    shapes = {weight.name: list(weight.dims) for weight in made.graph.initializer}
    vocab, width = TINY.target_vocab, TINY.d_model
    assert shapes["target_embedding.tokens.weight"] == [vocab, width]
    assert {name: shape for name, shape in shapes.items() if vocab in shape} == {
        "target_embedding.tokens.weight": [vocab, width]
    }
    changed = {node.name for node, old in zip(made.graph.node, plain.graph.node, strict=True) if node != old}
    assert changed
    assert all(name.startswith("output/") for name in changed)


def test_a_projection_that_cannot_be_shortened_is_an_error(bundle: Bundle) -> None:
    path = bundle.graph_path("fp32", "decoder_step")
    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        node.name = node.name.replace("output/", "elsewhere/")
    with pytest.raises(ExportError, match="its projection cannot be shortened; ask for allowed tokens"):
        shortlist_graph(model, TOKENS, Path(path).parent)

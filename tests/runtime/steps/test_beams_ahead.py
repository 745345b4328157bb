"""Beam search that runs steps ahead in one call: tokens are those of a call for every step, scores within rounding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lively_models import CONFIG, LONGEST, VOCAB, lively_bundle, lively_model, lively_sources
from support.rounding import rounding_from_session

from seq2engine.errors import GraphError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.runtime.encoder_inputs import encoder_inputs
from seq2engine.runtime.generate import decode, form_from_options, generate
from seq2engine.runtime.kernels.library import library
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.ort.session import OrtSession
from seq2engine.runtime.search.beams_ahead import MOST_BEAMS, BeamsAhead, MadeStep, runs_ahead
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step import Hypothesis, drain
from seq2engine.runtime.search.step_output import NotFiniteError, StepOutput

pytestmark = pytest.mark.skipif(library() is None, reason="the kernel library is not built here, or needs AVX2")
Found = list[list[Hypothesis]]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return lively_bundle(tmp_path_factory.mktemp("lively") / "bundle")


@pytest.fixture(scope="module", params=["fp32", "w8a8"])
def session(request: pytest.FixtureRequest, bundle: Bundle) -> Iterator[OrtSession]:
    with open_session(bundle, precision=request.param, threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def fp32(bundle: Bundle) -> Iterator[OrtSession]:
    with open_session(bundle, precision="fp32", threads=1, draft=None) as opened:
        yield opened


def ahead_calls(session: OrtSession, patch: pytest.MonkeyPatch) -> list[BeamsAhead]:
    """What every call for several steps found, from now on."""
    found: list[BeamsAhead] = []
    called = session.choose_beams

    def noted(*given: Any) -> BeamsAhead:
        found.append(called(*given))
        return found[-1]

    patch.setattr(session, "choose_beams", noted)
    return found


def bits_of(found: Found) -> list[list[tuple[tuple[int, ...], float, tuple[float, ...]]]]:
    return [[(one.tokens, one.score, one.log_probs) for one in nbest] for nbest in found]


def check_same(session: OrtSession, sources: Sequence[Sequence[int]], options: SearchOptions) -> list[BeamsAhead]:
    """Both ways find the same. Scores are sums of the same numbers; only the logarithm of a sum is another function."""
    with pytest.MonkeyPatch.context() as patch:
        calls = ahead_calls(session, patch)
        found = generate(session, sources, options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "ahead", None)
        expected = generate(session, sources, options)
    near = rounding_from_session(session, sources, options.max_length)
    for ours, theirs in zip(found, expected, strict=True):
        assert [one.tokens for one in ours] == [one.tokens for one in theirs]
        assert [one.score for one in ours] == near.scores(theirs, options)
    return calls


STYLES: dict[str, dict[str, Any]] = {
    "plain": {},
    "all hypotheses": {"nbest": 3, "length_penalty": 0.4},
    "early": {"early_stopping": True},
    "never early": {"early_stopping": "never", "length_penalty": 2.0},
    "CTranslate2's": {"beam_style": "ctranslate2", "patience": 2.0},
    "no end": {"ignore_eos": True},
    "without scores": {"scores": False},
    "one token": {"max_length": 1},
    "long": {"max_length": LONGEST},
}


@pytest.mark.parametrize("batch", [1, 3, 9])
@pytest.mark.parametrize("style", list(STYLES))
def test_outputs_are_those_of_a_call_for_every_step(session: OrtSession, style: str, batch: int) -> None:
    options = SearchOptions(**{"max_length": 40, "beam": 4, **STYLES[style]})
    calls = check_same(session, lively_sources(batch, seed=batch), options)
    assert calls, "steps were run ahead"
    if style == "no end":
        assert sum(call.ran for call in calls) == options.max_length
        assert sum(len(call.tokens) for call in calls) == options.max_length - 1, "the last step is the search's"


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 10),
    beam=st.integers(2, 9),
    length=st.integers(1, LONGEST),
    style=st.sampled_from(list(STYLES)),
    seed=st.integers(0, 99),
)
def test_any_batch_beam_and_length(fp32: OrtSession, batch: int, beam: int, length: int, style: str, seed: int) -> None:
    options = SearchOptions(**{**STYLES[style], "beam": beam, "nbest": min(beam, 3), "max_length": length})
    check_same(fp32, lively_sources(batch, seed), options)


def test_two_threads_change_no_bit(bundle: Bundle, fp32: OrtSession) -> None:
    options = SearchOptions(beam=4, max_length=40, nbest=4)
    with open_session(bundle, precision="fp32", threads=2, draft=None) as together:
        together.workers = None
        for batch in (1, 5):
            sources = lively_sources(batch, seed=3)
            assert bits_of(generate(together, sources, options)) == bits_of(generate(fp32, sources, options))


def test_a_full_cache_grows_between_two_calls(fp32: OrtSession) -> None:
    options = SearchOptions(beam=4, max_length=LONGEST, ignore_eos=True)
    calls = check_same(fp32, lively_sources(2), options)
    assert len(calls) > 1
    assert any(call.output is None for call in calls), "a call ended with a full cache, not with an end token"


def test_a_vocabulary_smaller_than_the_candidates(tmp_path_factory: pytest.TempPathFactory) -> None:
    tiny = dataclasses.replace(CONFIG, source_vocab=VOCAB, target_vocab=5, end_id=4)
    small = onnx_from_model(lively_model(tiny), tmp_path_factory.mktemp("tiny") / "bundle", ("fp32",))
    with open_session(small, threads=1, draft=None) as session:
        check_same(session, lively_sources(3), SearchOptions(beam=7, max_length=9, nbest=7))


# --- what makes its steps one by one ----------------------------------------------------------------------------------

ONE_BY_ONE: dict[str, dict[str, Any]] = {
    "greedy": {"beam": 1},
    "a rule": {"banned": ((5,),)},
    "a least length": {"min_length": 3},
    "a forced end": {"forced_eos": 35},
    "a prefix": {"prefix": (9,)},
    "alternatives": {"alternatives": True, "nbest": 2, "beam": 2},
    "samples": {"sample": True, "nbest": 2, "beam": 1},
    "phrases": {"phrases": ((9, 8),)},
    "a shortlist": {"shortlist": tuple(range(3, 40))},
    "alignments": {"alignments": True},
    "many beams": {"beam": MOST_BEAMS + 1},
}


@pytest.mark.parametrize("name", list(ONE_BY_ONE))
def test_options_that_need_every_step(name: str) -> None:
    assert runs_ahead(SearchOptions(beam=2))
    assert runs_ahead(SearchOptions(beam=MOST_BEAMS))
    assert not runs_ahead(SearchOptions(**{"beam": 4, **ONE_BY_ONE[name]}))


def test_who_follows_a_decode_gets_every_step(fp32: OrtSession, monkeypatch: pytest.MonkeyPatch) -> None:
    options, sources = SearchOptions(beam=3, max_length=12, ignore_eos=True), lively_sources(2)
    calls = ahead_calls(fp32, monkeypatch)
    steps: list[int] = []
    followed = generate(fp32, sources, options, lambda emitted: steps.append(emitted.step))
    assert steps == list(range(12))
    assert not calls
    assert bits_of(drain(decode(fp32, sources, options))) == bits_of(followed)
    assert not calls
    assert bits_of(generate(fp32, sources, options)) == bits_of(followed)
    assert calls


# --- refusals ---------------------------------------------------------------------------------------------------------


def first_call(session: OrtSession, slots: int, used: int = 0, sources: int = 2, beams: int = 3) -> BeamsAhead:
    options = SearchOptions(beam=beams)
    state = session.encode(*encoder_inputs(lively_sources(sources), session.config))
    session.reserve(state, slots, form_from_options(options, session.config))
    tokens, scores = np.zeros((sources, beams), dtype=np.int64), np.zeros((sources, beams))
    mask = np.zeros((sources, beams, slots), dtype=bool)
    place = np.full(sources, used)
    return session.choose_beams(state, tokens, np.zeros(sources, np.int64), place, mask, scores, -1, 4)


def test_a_cache_is_filled_to_its_end_and_no_further(fp32: OrtSession) -> None:
    found = first_call(fp32, slots=8)
    assert (found.ran, len(found.tokens), found.output) == (2, 2, None)
    assert found.mask[..., :6].any(axis=(0, 1)).all()
    assert not found.mask[..., 6:].any()


@pytest.mark.parametrize("used", [-1, 6, 1 << 40])
def test_beams_that_do_not_fit_are_an_error(fp32: OrtSession, used: int) -> None:
    with pytest.raises(GraphError, match="beams do not fit the batch or its cache"):
        first_call(fp32, slots=8, used=used)
    assert first_call(fp32, slots=8).ran == 2


def test_logits_that_are_no_numbers_are_the_searches_to_report(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = lively_model()
    with torch.no_grad():
        model.get_parameter("target_embedding.positions")[3] = float("nan")
    broken = onnx_from_model(model, tmp_path_factory.mktemp("broken") / "bundle", ("fp32",))
    with open_session(broken, threads=1, draft=None) as session, pytest.raises(NotFiniteError) as caught:
        generate(session, lively_sources(3), SearchOptions(beam=4, max_length=12, ignore_eos=True))
    assert caught.value.source == 0


def test_a_step_that_was_made_is_read_and_nothing_else() -> None:
    output = StepOutput(np.zeros((1, 2, 3), dtype=np.float32))
    made = MadeStep(output)
    assert made(np.zeros((1, 2)), np.zeros((1, 2))) is output
    with pytest.raises(AssertionError):
        made.attention()
    with pytest.raises(AssertionError):
        made.keep(np.zeros(1))

"""Beam search to its end in one call: tokens are those of a call for every step, scores within rounding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lively_models import CONFIG, LONGEST, VOCAB, lively_bundle, lively_model, lively_sources
from support.rounding import rounding_from_session

from seq2engine.errors import GraphError, SessionError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.runtime.backends import QUANTISED
from seq2engine.runtime.encoder_inputs import encoder_inputs
from seq2engine.runtime.generate import decode, decode_checked, form_from_options, generate, special_of
from seq2engine.runtime.kernels.library import library
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.ort.host_chain import AHEAD, MOST_CANDIDATES
from seq2engine.runtime.ort.session import OrtSession
from seq2engine.runtime.search.ahead.beam_plan import (
    DONE,
    MOST_BEAMS,
    NUMBERS,
    POSITION,
    WRITTEN,
    BeamPlan,
    BeamRows,
    BeamsAhead,
    beam_plan,
    first_beams,
    runs_ahead,
)
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step import Hypothesis, drain
from seq2engine.runtime.search.step_output import NotFiniteError
from seq2engine.runtime.session import Session
from seq2engine.runtime.steps import tree_cache

pytestmark = pytest.mark.skipif(library() is None, reason="the kernel library is not built here, or needs AVX2")
Found = list[list[Hypothesis]]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return lively_bundle(tmp_path_factory.mktemp("lively") / "bundle")


@pytest.fixture(scope="module", params=["fp32", "w8a8", "fp32 that drafts"])
def session(request: pytest.FixtureRequest, bundle: Bundle) -> Iterator[Session]:
    """Speculative decoding drafts for one source with one beam; all other decodes are its target's."""
    precision, *drafting = request.param.split(" ", 1)
    with open_session(bundle, precision=precision, threads=1, draft=QUANTISED if drafting else None) as opened:
        yield opened


@pytest.fixture(scope="module")
def fp32(bundle: Bundle) -> Iterator[OrtSession]:
    with open_session(bundle, precision="fp32", threads=1, draft=None) as opened:
        yield opened


def ahead_calls(session: Session, patch: pytest.MonkeyPatch) -> list[BeamsAhead]:
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


def check_same(session: Session, sources: Sequence[Sequence[int]], options: SearchOptions) -> list[BeamsAhead]:
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
    "banned tokens": {"banned": ((33,), (9,)), "nbest": 2},
    "banned first": {"first_banned": (35, 3, 60)},
    "a least length": {"min_length": 6, "banned": ((12,),)},
    "a least length that is the greatest": {"min_length": 12, "max_length": 12},
    "CTranslate2's, unpenalised": {"beam_style": "ctranslate2", "length_penalty": 0.0, "nbest": 2},
    "one token": {"max_length": 1},
    "long": {"max_length": LONGEST},
}


@pytest.mark.parametrize("batch", [1, 3, 9])
@pytest.mark.parametrize("style", list(STYLES))
def test_outputs_are_those_of_a_call_for_every_step(session: Session, style: str, batch: int) -> None:
    options = SearchOptions(**{"max_length": 40, "beam": 4, **STYLES[style]})
    calls = check_same(session, lively_sources(batch, seed=batch), options)
    assert calls, "steps were run ahead"
    if style == "no end":
        assert sum(len(call.choices) for call in calls) == options.max_length


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 10),
    beam=st.integers(2, 9),
    length=st.integers(1, LONGEST),
    style=st.sampled_from(list(STYLES)),
    seed=st.integers(0, 99),
)
def test_any_batch_beam_and_length(fp32: OrtSession, batch: int, beam: int, length: int, style: str, seed: int) -> None:
    given = {**STYLES[style], "beam": beam, "nbest": min(beam, 3), "max_length": length}
    options = SearchOptions(**{**given, "min_length": min(length, STYLES[style].get("min_length", 0))})
    assert check_same(fp32, lively_sources(batch, seed), options)


def test_two_threads_change_no_bit(bundle: Bundle, fp32: OrtSession) -> None:
    options = SearchOptions(beam=4, max_length=40, nbest=4)
    with open_session(bundle, precision="fp32", threads=2, draft=None) as together:
        together.workers = None
        for batch in (1, 5):
            sources = lively_sources(batch, seed=3)
            assert bits_of(generate(together, sources, options)) == bits_of(generate(fp32, sources, options))


def test_a_full_cache_grows_between_two_calls(fp32: OrtSession) -> None:
    options = SearchOptions(beam=4, max_length=LONGEST, ignore_eos=True)
    slots = []
    for roomy in (1, 4):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tree_cache, "ROOMY", roomy)
            calls = check_same(fp32, lively_sources(9), options)
        slots.append([call.mask.shape[2] for call in calls])
        full = [len(call.choices) == 0 for call in calls]
        assert any(full), "a call found the cache full"
        assert not any(before and after for before, after in pairwise(full)), "then it grew"
        assert max(len(call.choices) for call in calls) <= AHEAD
    assert slots[0][0] < slots[1][0]
    assert slots[0][-1] == slots[1][-1], "a cache is no larger at the end than it must be"


def test_dead_slots_are_dropped_inside_a_call(fp32: OrtSession) -> None:
    """A call with fewer slots than its steps write, and with as many as that."""
    options = SearchOptions(beam=5, max_length=40, ignore_eos=True)
    found = [first_call(fp32, options, slots, count=40) for slots in (96, 200)]
    steps = min(len(one.choices) for one in found)
    assert steps * options.beam > 96
    assert not np.array_equal(found[0].rows.state[:, WRITTEN], found[1].rows.state[:, WRITTEN])
    assert np.array_equal(found[0].choices[:steps], found[1].choices[:steps])
    assert np.array_equal(found[0].log_probs[:steps], found[1].log_probs[:steps])


def test_sources_that_are_done_leave_the_steps_of_others_as_they_are(fp32: OrtSession) -> None:
    """Outputs of many lengths: each is that of its source alone, bit for bit."""
    options, sources = SearchOptions(beam=4, nbest=4, max_length=LONGEST), lively_sources(12, seed=5)
    together = generate(fp32, sources, options)
    assert len({len(nbest[0].tokens) for nbest in together}) > 4
    alone = [generate(fp32, [source], options)[0] for source in sources]
    assert bits_of(together) == bits_of(alone)


def test_a_vocabulary_smaller_than_the_candidates(tmp_path_factory: pytest.TempPathFactory) -> None:
    tiny = dataclasses.replace(CONFIG, source_vocab=VOCAB, target_vocab=5, end_id=4)
    small = onnx_from_model(lively_model(tiny), tmp_path_factory.mktemp("tiny") / "bundle", ("fp32",))
    with open_session(small, threads=1, draft=None) as session:
        check_same(session, lively_sources(3), SearchOptions(beam=7, max_length=9, nbest=7))


# --- what makes its steps one by one ----------------------------------------------------------------------------------

ONE_BY_ONE: dict[str, dict[str, Any]] = {
    "greedy": {"beam": 1},
    "a banned sequence": {"banned": ((5, 6),)},
    "more bans than candidates": {"banned": tuple((token,) for token in range(MOST_CANDIDATES))},
    "renormalised scores": {"banned": ((5,),), "beam_style": "ctranslate2"},
    "no repeated pairs": {"no_repeat_ngram": 2},
    "allowed tokens": {"allowed": (5, 6, 35)},
    "a prompt": {"prompt": (5, 6)},
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
    for options in (SearchOptions(beam=2), SearchOptions(beam=MOST_BEAMS), SearchOptions(beam=3, banned=((5,),))):
        assert runs_ahead(options, MOST_CANDIDATES)
    assert not runs_ahead(SearchOptions(**{"beam": 4, **ONE_BY_ONE[name]}), MOST_CANDIDATES)


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


# --- one call, and refusals -------------------------------------------------------------------------------------------

OPTIONS = SearchOptions(beam=3, max_length=12, ignore_eos=True)


def plan_of(options: SearchOptions, sources: int) -> BeamPlan:
    return beam_plan(options, special_of(CONFIG, options), sources, VOCAB)


def first_call(
    session: OrtSession,
    options: SearchOptions,
    slots: int,
    count: int = 4,
    room: int = 0,
    sources: int = 2,
    plan: BeamPlan | None = None,
    rows: BeamRows | None = None,
) -> BeamsAhead:
    state = session.encode(*encoder_inputs(lively_sources(sources), session.config))
    session.reserve(state, slots, form_from_options(options, session.config))
    rows = rows or first_beams(sources, options.beam, CONFIG.start_id)
    mask = np.zeros((sources, options.beam, slots), dtype=bool)
    plan = plan or plan_of(options, sources)
    return session.choose_beams(state, rows, mask, plan, room or options.beam, count)


def test_a_cache_is_filled_to_its_end_and_no_further(fp32: OrtSession) -> None:
    """One slot of the first step, three of each other: the third step leaves one, which is too few for a fourth."""
    found = first_call(fp32, OPTIONS, slots=8, room=8)
    assert len(found.choices) == 3
    assert (found.rows.state[:, WRITTEN] <= 7).all()
    assert found.mask.any(axis=1).sum(axis=1).tolist() == found.rows.state[:, WRITTEN].tolist(), "dead slots are gone"


def test_the_state_that_was_given_stays_as_it_is(fp32: OrtSession) -> None:
    rows = first_beams(2, 3, CONFIG.start_id)
    found = first_call(fp32, OPTIONS, slots=32, rows=rows)
    assert np.array_equal(rows.state, first_beams(2, 3, CONFIG.start_id).state)
    again = first_call(fp32, OPTIONS, slots=32, rows=rows)
    assert np.array_equal(found.rows.state, again.rows.state), "the next call writes no array of this one"
    assert found.rows.state is not again.rows.state


def changed_plan(**parts: Any) -> dict[str, Any]:
    return {"plan": dataclasses.replace(plan_of(OPTIONS, 2), **parts)}


def changed_state(column: int, value: int) -> dict[str, Any]:
    rows = first_beams(2, 3, CONFIG.start_id)
    rows.state[1, column] = value
    return {"rows": rows}


def all_done() -> dict[str, Any]:
    rows = first_beams(2, 3, CONFIG.start_id)
    rows.state[:, DONE] = 1
    return {"rows": rows}


MISFITS: dict[str, dict[str, Any]] = {
    "written before the cache": changed_state(WRITTEN, -1),
    "written behind the cache": changed_state(WRITTEN, 9),
    "written far behind the cache": changed_state(WRITTEN, 1 << 40),
    "a position at the limit": changed_state(POSITION, 12),
    "a position below 0": changed_state(POSITION, -1),
    "sources that are all done": all_done(),
    "another number of beams": {"rows": first_beams(2, 4, 0)},
    "another batch": {"rows": first_beams(3, 3, 0)},
    "a limit of no token": changed_plan(limit=np.array([12, 0])),
    "a limit behind the targets": changed_plan(limit=np.array([12, 13])),
    "a limit behind the norms": changed_plan(norms=np.ones(12)),
    "targets of another batch": changed_plan(target=np.full((3, 12), -1)),
    "a forced token": changed_plan(target=np.full((2, 12), 5)),
    "a row of bans that is not there": changed_plan(target=np.full((2, 12), -5)),
    "a row of bans far from there": changed_plan(target=np.full((2, 12), -(2**63))),
    "bans of a smaller vocabulary": changed_plan(banned=np.zeros((4, 2), bool)),
    "a style below all": changed_plan(ending=(-1, 3)),
    "a style behind all": changed_plan(ending=(5, 3)),
    "room for fewer than all beams": {"room": 2},
    "room below 0": {"room": -(2**62)},
}


@pytest.mark.parametrize("name", MISFITS)
def test_beams_that_do_not_fit_are_an_error(fp32: OrtSession, name: str) -> None:
    with pytest.raises((GraphError, ValueError), match=r"beams do not fit the batch, its plan or its cache|broadcast"):
        first_call(fp32, OPTIONS, slots=8, **MISFITS[name])
    assert len(first_call(fp32, OPTIONS, slots=16).choices) == 4


def test_a_token_that_is_not_in_the_table_is_an_error(fp32: OrtSession) -> None:
    with pytest.raises(GraphError, match="a token or a position is not in its table"):
        first_call(fp32, OPTIONS, slots=16, **changed_state(NUMBERS, VOCAB))


@pytest.mark.parametrize("name", ["source", "position"])
def test_the_source_whose_logits_are_no_numbers_is_named(tmp_path: Path, name: str) -> None:
    """Of the seventh source all, or those of all sources at their fourth position."""
    model = lively_model()
    with torch.no_grad():
        model.get_parameter("source_embedding.positions" if name == "source" else "target_embedding.positions")[
            9 if name == "source" else 3
        ] = float("nan")
    broken = onnx_from_model(model, tmp_path / "broken", ("fp32",))
    sources = [[number % 60 + 3 for number in range(first, first + 5)] for first in range(9)]
    sources[6] = sources[6] * 2
    with open_session(broken, threads=1, draft=None) as session:
        named = []
        for ahead in (session.ahead, None):
            session.ahead = ahead
            with pytest.raises(NotFiniteError) as caught:
                generate(session, sources, SearchOptions(beam=4, max_length=12, ignore_eos=True))
            named.append(caught.value.source)
        assert named == [6 if name == "source" else 0] * 2


def test_a_session_that_is_closed_runs_no_beams(bundle: Bundle) -> None:
    session = open_session(bundle, precision="fp32", threads=1, draft=None)
    assert isinstance(session, OrtSession)
    options = SearchOptions(beam=3, max_length=LONGEST, ignore_eos=True)
    begun = decode_checked(session, lively_sources(2), options, followed=False)
    next(begun)
    session.close()
    with pytest.raises(SessionError, match="closed"):
        drain(begun)

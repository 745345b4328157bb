"""Decodes by many steps in one call: tokens and scores are those of a call for every step, to the last bit."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.all_pairs import Case, all_pairs
from support.lively_models import CONFIG, LONGEST, VOCAB, lively_bundle, lively_model, lively_sources

from seq2engine.errors import SessionError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.runtime.encoder_inputs import encoder_inputs
from seq2engine.runtime.generate import decode, decode_checked, decode_encoded, generate
from seq2engine.runtime.kernels.library import library
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.ort.host_chain import AHEAD, KEPT_ROWS, MOST_CANDIDATES
from seq2engine.runtime.ort.session import OrtSession
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step import Hypothesis, drain
from seq2engine.runtime.search.step_output import NotFiniteError
from seq2engine.runtime.session import Session
from seq2engine.runtime.steps import planned_step, tree_cache
from seq2engine.runtime.text.continuous_batching import translate_many

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
    with open_session(bundle, precision="fp32", threads=1) as opened:
        yield opened


@contextlib.contextmanager
def calls_of(session: Session) -> Iterator[list[int]]:
    """The steps of every call for several steps."""
    found: list[int] = []
    called = session.choose_alone

    def counted(*given: Any) -> Any:
        chosen = called(*given)
        found.append(chosen.tokens.shape[1])
        return chosen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "choose_alone", counted)
        yield found


def one_by_one(session: Session, *given: Any, **named: Any) -> Found:
    """What `generate` finds by a call for every step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "ahead", None)
        return generate(session, *given, **named)


def bits_of(found: Found) -> list[tuple[tuple[int, ...], bytes, bytes]]:
    """Tokens, and scores as they are in memory: NaN is equal to itself."""
    return [(one.tokens, np.float64(one.score).tobytes(), np.array(one.log_probs).tobytes()) for (one,) in found]


def check_same(session: Session, sources: Sequence[Sequence[int]], options: SearchOptions, **named: Any) -> list[int]:
    """Both ways find the same -> the steps of every call."""
    with calls_of(session) as calls:
        found = generate(session, sources, options, **named)
    assert bits_of(found) == bits_of(one_by_one(session, sources, options, **named))
    return calls


def test_decodes_are_worth_comparing(session: OrtSession) -> None:
    """Outputs of many lengths and tokens: decodes that repeat themselves prove little."""
    found = generate(session, lively_sources(40), SearchOptions(max_length=LONGEST))
    assert len({len(one.tokens) for (one,) in found}) > 8
    assert len({token for (one,) in found for token in one.tokens}) > VOCAB / 2


# --- options ----------------------------------------------------------------------------------------------------------

FACTORS: dict[str, Sequence[str]] = {
    "batch": ("9", "1", "2", "8", "17", "40"),
    "scores": ("scored", "unscored"),
    "banned": ("nothing", "one", "many"),
    "first": ("anything", "banned first"),
    "least": ("no least", "least 4", "least 20"),
    "start": ("free", "first", "prefix", "prefixes", "another start"),
    "last": ("open end", "forced end"),
    "end": ("end", "no end"),
    "length": ("24", "1", "2", "70", "128"),
}
FIELDS: dict[str, dict[str, Any]] = {
    "unscored": {"scores": False},
    "one": {"banned": ((33,),)},
    "many": {"banned": tuple((token,) for token in range(20, 29))},
    "banned first": {"first_banned": (35, 3, 60)},
    "least 4": {"min_length": 4},
    "least 20": {"min_length": 20},
    "first": {"forced_bos": 9},
    "prefix": {"prefix": (9, 31, 4)},
    "another start": {"start": 7},
    "forced end": {"forced_eos": 35},
    "no end": {"ignore_eos": True},
}


def options_of(case: Case) -> SearchOptions:
    fields = {key: value for name in case.values() for key, value in FIELDS.get(name, {}).items()}
    return SearchOptions(max_length=int(case["length"]), **fields)


def allowed(case: Case) -> bool:
    least = int(case["least"].removeprefix("least ")) if case["least"] != "no least" else 0
    room = int(case["length"]) - (case["last"] == "forced end")
    needed = {"first": 1, "prefix": 3, "prefixes": 1}.get(case["start"], 0)
    return least <= int(case["length"]) and needed <= room


CASES, _ = all_pairs(FACTORS, allowed)


@pytest.mark.parametrize("case", CASES, ids=lambda case: ", ".join(case.values()))
def test_a_pair_of_options_changes_no_bit(session: OrtSession, case: Case) -> None:
    sources, options = lively_sources(int(case["batch"])), options_of(case)
    prefixes = None
    if case["start"] == "prefixes":
        words = [[], [9], [12, 40], [], [7, 8, 9, 10]]
        room = options.max_length - (options.forced_eos is not None)
        prefixes = [words[number % 5][:room] for number in range(len(sources))]
    calls = check_same(session, sources, options, prefixes=prefixes)
    forced = case["start"] in ("first", "prefix") or any(prefixes or ()) or case["last"] == "forced end"
    assert bool(calls) == (case["scores"] == "unscored" or not forced), "the score of a forced token needs all logits"
    assert all(0 < count <= AHEAD for count in calls)


BANNED = st.integers(0, 49).filter(lambda token: token not in (11, 35))  # those below may be forced


@given(
    st.integers(1, 20),
    st.fixed_dictionaries(
        {"max_length": st.integers(2, 90), "scores": st.booleans()},
        optional={
            "banned": st.lists(BANNED, max_size=14, unique=True).map(lambda found: tuple((token,) for token in found)),
            "first_banned": st.lists(st.integers(0, VOCAB - 1), max_size=6, unique=True).map(tuple),
            "min_length": st.integers(0, 30),
            "ignore_eos": st.booleans(),
            "forced_bos": st.integers(50, VOCAB - 1),
            "forced_eos": st.sampled_from([35, 11]),
            "start": st.integers(0, VOCAB - 1),
        },
    ),
    st.integers(0, 99),
)
@settings(max_examples=25)
def test_options_change_no_bit(fp32: OrtSession, batch: int, fields: dict[str, Any], seed: int) -> None:
    fields["min_length"] = min(fields.get("min_length", 0), fields["max_length"])
    options = SearchOptions(**fields)
    calls = check_same(fp32, lively_sources(batch, seed), options)
    assert bool(calls) == (
        options.candidates <= MOST_CANDIDATES
        and (options.unscored or (options.forced_bos is None and options.forced_eos is None))
    )


OTHER_SEARCHES: dict[str, dict[str, Any]] = {
    "beams": {"beam": 2},
    "sampling": {"sample": True, "seed": 1},
    "alternatives": {"alternatives": True, "nbest": 2},
    "no repeated pairs": {"no_repeat_ngram": 2},
    "a banned sequence": {"banned": ((3, 4),)},
    "allowed tokens": {"allowed": (3, 4, 5, 35)},
    "a prompt": {"prompt": (3, 4)},
    "more bans than candidates": {"banned": tuple((token,) for token in range(MOST_CANDIDATES))},
    "ctranslate2's scores": {"beam_style": "ctranslate2", "banned": ((4,),)},
}


@pytest.mark.parametrize("name", OTHER_SEARCHES)
def test_other_searches_do_not_run_ahead(fp32: OrtSession, name: str) -> None:
    options = SearchOptions(max_length=12, **OTHER_SEARCHES[name])
    with calls_of(fp32) as calls:
        found = generate(fp32, lively_sources(3), options)
    assert not calls
    expected = one_by_one(fp32, lively_sources(3), options)
    assert [[one.tokens for one in nbest] for nbest in found] == [[one.tokens for one in nbest] for nbest in expected]


def test_a_vocabulary_that_is_smaller_than_the_candidates(tmp_path: Any) -> None:
    config = dataclasses.replace(CONFIG, target_vocab=6, end_id=2)
    bundle = onnx_from_model(lively_model(config), tmp_path / "small", ("fp32",))
    with open_session(bundle, threads=1) as session:
        for banned, scores in [(1, True), (3, True), (4, True), (4, False), (5, False)]:
            options = SearchOptions(
                max_length=20, banned=tuple((token,) for token in (0, 1, 3, 4, 5)[:banned]), scores=scores
            )
            calls = check_same(session, lively_sources(9), options)
            assert bool(calls) == (options.candidates <= 6), options


# --- caches and batches -----------------------------------------------------------------------------------------------


def test_a_cache_begins_small_and_grows(session: OrtSession, monkeypatch: pytest.MonkeyPatch) -> None:
    grown: list[tuple[int, int]] = []
    grow = planned_step.PlannedStep.grow

    def noted(self: planned_step.PlannedStep, capacity: int) -> None:
        grown.append((self.capacity, capacity))
        grow(self, capacity)

    monkeypatch.setattr(planned_step.PlannedStep, "grow", noted)
    monkeypatch.setattr(tree_cache, "ROOMY", 1)
    for batch in (1, 9, 40):
        grown.clear()
        check_same(session, lively_sources(batch), SearchOptions(max_length=LONGEST, ignore_eos=True))
        assert grown
        assert all(before < after <= LONGEST for before, after in grown)
        grown.clear()
        check_same(session, lively_sources(batch), SearchOptions(max_length=8, ignore_eos=True))
        assert not grown


def test_a_call_has_at_most_so_many_steps(session: OrtSession) -> None:
    calls = check_same(session, lively_sources(1), SearchOptions(max_length=LONGEST, ignore_eos=True))
    assert max(calls) == AHEAD
    assert sum(calls) == LONGEST


def test_a_session_is_used_after_another_batch(session: OrtSession) -> None:
    """Bindings are kept for small batches, and must not be those of another."""
    options = [SearchOptions(max_length=30), SearchOptions(max_length=30, scores=False, banned=((9,), (10,)))]
    for turn, batch in enumerate([1, 9, 1, 2, KEPT_ROWS, KEPT_ROWS + 1, 1, 1, 2, 40, 2]):
        check_same(session, lively_sources(batch, turn), options[turn % 2])
        check_same(session, lively_sources(batch, turn + 20), options[(turn + turn // 2) % 2])


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("batch", [1, 3, 9])
def test_two_states_of_one_session_by_turns(session: OrtSession, batch: int, ignore_eos: bool) -> None:
    options = SearchOptions(max_length=LONGEST, ignore_eos=ignore_eos)
    sources = [lively_sources(batch, seed) for seed in (1, 2)]
    expected = [bits_of(one_by_one(session, one, options)) for one in sources]
    searches = [decode_checked(session, one, options, followed=False) for one in sources]
    found: dict[int, Found] = {}
    turns = 0
    with calls_of(session) as calls:
        while len(found) < 2:
            for number, search in enumerate(searches):
                if number not in found:
                    try:
                        next(search)
                        turns += 1
                    except StopIteration as finished:
                        found[number] = finished.value
    assert turns == len(calls) >= 2 + 2 * ignore_eos
    assert [bits_of(found[number]) for number in (0, 1)] == expected


def test_a_state_is_decoded_several_times(session: OrtSession) -> None:
    sources = lively_sources(1)  # of several, those that are done leave it
    state = session.encode(*encoder_inputs(sources, session.config))
    for options in [SearchOptions(max_length=40), SearchOptions(max_length=20, scores=False, min_length=9)] * 2:
        found = drain(decode_encoded(session, state, sources, options, followed=False))
        assert bits_of(found) == bits_of(one_by_one(session, sources, options))


@pytest.mark.parametrize("batch", [1, 9])
def test_two_threads_decode_with_one_session(session: OrtSession, batch: int) -> None:
    options = SearchOptions(max_length=40)
    sources = [lively_sources(batch, seed) for seed in range(8)]
    expected = [bits_of(one_by_one(session, one, options)) for one in sources]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(4):
            assert [bits_of(found) for found in pool.map(lambda one: generate(session, one, options), sources)] == (
                expected
            )


def test_threads_of_a_session_change_no_bit(bundle: Bundle, fp32: OrtSession) -> None:
    options = SearchOptions(max_length=40)
    with open_session(bundle, precision="fp32", threads=2) as session:
        session.workers = None
        for batch in (1, 9, 40):
            found = generate(session, lively_sources(batch), options)
            assert bits_of(found) == bits_of(one_by_one(fp32, lively_sources(batch), options))


# --- who follows a decode ---------------------------------------------------------------------------------------------


def test_a_decode_that_is_followed_does_not_run_ahead(fp32: OrtSession) -> None:
    options, sources = SearchOptions(max_length=20), lively_sources(3)
    expected = bits_of(one_by_one(fp32, sources, options))
    with calls_of(fp32) as calls:
        steps: list[int] = []
        assert bits_of(generate(fp32, sources, options, on_step=lambda emitted: steps.append(emitted.step))) == expected
        assert steps == list(range(len(steps)))
        assert bits_of(drain(decode(fp32, sources, options))) == expected
        assert bits_of([nbest for _, nbest in sorted(translate_many(fp32, sources, options, batch=2))]) == expected
        generate(fp32, sources, options, prompts=[[1]] * 3)
    assert not calls


@pytest.mark.parametrize("kind", [{"deterministic": True}, {"backend": "torch"}])
def test_other_sessions_have_no_plan(bundle: Bundle, kind: dict[str, Any]) -> None:
    with open_session(bundle, precision="fp32", threads=1, **kind) as session:
        assert session.ahead is None
        with pytest.raises(SessionError, match="chooses no tokens by itself"):
            Session.choose_alone(session, None, *[np.zeros((1, 1), np.int64)] * 2, None, 1)  # type: ignore[arg-type]


def test_without_kernels_there_is_no_plan(bundle: Bundle, without_kernels: None) -> None:
    with open_session(bundle, precision="fp32", threads=1) as session:
        assert session.ahead is None


def test_a_session_that_keeps_attention_runs_ahead_as_well(bundle: Bundle) -> None:
    with open_session(bundle, precision="fp32", threads=1, attention=True) as session:
        assert check_same(session, lively_sources(9), SearchOptions(max_length=30))
        options = SearchOptions(max_length=30, alignments=True)
        with calls_of(session) as calls:
            aligned = generate(session, lively_sources(3), options)
        assert not calls
        assert all(len(one.alignments) == len(one.tokens) for (one,) in aligned)


# --- numbers that are none, and the end of a session ------------------------------------------------------------------


@pytest.mark.parametrize("scores", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "w8a8"])
def test_the_source_whose_logits_are_no_numbers_is_named(tmp_path: Any, precision: str, scores: bool) -> None:
    """The tenth position of a source is no number, and one source is as long."""
    model = lively_model()
    model.get_parameter("source_embedding.positions").data[9] = np.nan
    bundle = onnx_from_model(model, tmp_path / "source", (precision,))
    sources = [[number % 60 + 3 for number in range(first, first + 5)] for first in range(9)]
    sources[6] = sources[6] * 2
    options = SearchOptions(max_length=20, scores=scores)
    with open_session(bundle, precision=precision, threads=1) as session:
        named = []
        for decoding in (generate, one_by_one):
            with pytest.raises(NotFiniteError) as failed:
                decoding(session, sources, options)
            named.append(failed.value.source)
        assert named == [6, 6]
        del sources[6]
        assert check_same(session, sources, options), "the session is ready for the next call"


@pytest.mark.parametrize("scores", [True, False])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_one_logit_that_is_no_number(tmp_path: Any, wrong: float, scores: bool) -> None:
    """Of a token that is hardly ever the best: the largest logit is a number, and their sum is none."""
    model = lively_model()
    model.get_parameter("output.weight").data[50, 0] = wrong
    bundle = onnx_from_model(model, tmp_path / "output", ("fp32",))
    with open_session(bundle, precision="fp32", threads=1) as session:
        for decoding in (generate, one_by_one):
            with pytest.raises(NotFiniteError, match="source 0"):
                decoding(session, lively_sources(3), SearchOptions(max_length=20, scores=scores))


def test_numbers_that_are_none_in_a_later_step(tmp_path: Any) -> None:
    model = lively_model()
    found = []
    model.get_parameter("target_embedding.tokens.weight").data[3] = np.nan  # an embedding alone: the table is another
    bundle = onnx_from_model(model, tmp_path / "target", ("fp32",))
    with open_session(bundle, precision="fp32", threads=1) as session:
        for decoding in (generate, one_by_one):
            with pytest.raises(NotFiniteError) as failed:
                decoding(session, lively_sources(40), SearchOptions(max_length=LONGEST, ignore_eos=True))
            found.append(failed.value.source)
    assert found[0] == found[1]


def test_a_session_that_is_closed(bundle: Bundle) -> None:
    options = SearchOptions(max_length=LONGEST)
    session = open_session(bundle, precision="fp32", threads=1)
    assert isinstance(session, OrtSession)
    begun = decode_checked(session, lively_sources(2), options, followed=False)
    next(begun)
    generate(session, lively_sources(1), options)
    kept = weakref.ref(session.host_chain)
    assert kept() is not None, "the binding of a small batch"
    session.close()
    del begun
    gc.collect()
    assert kept() is None
    assert session.host_chain is None
    with pytest.raises(SessionError, match="closed"):
        generate(session, lively_sources(1), options)


def test_a_decode_goes_no_further_once_its_session_is_closed(bundle: Bundle) -> None:
    session = open_session(bundle, precision="fp32", threads=1)
    options = SearchOptions(max_length=LONGEST, ignore_eos=True)
    begun = decode_checked(session, lively_sources(2), options, followed=False)
    next(begun)
    session.close()
    with pytest.raises(SessionError, match="closed"):
        drain(begun)


def test_arrays_of_a_state_are_freed_with_the_next_decode(fp32: OrtSession) -> None:
    """A binding keeps the arrays of its latest state; it must not keep those of all before."""
    options = SearchOptions(max_length=10)
    state = fp32.encode(*encoder_inputs(lively_sources(2), fp32.config))
    drain(decode_encoded(fp32, state, lively_sources(2), options, followed=False))
    gone = weakref.ref(state)
    del state
    gc.collect()
    assert gone() is None, "the binding holds a state weakly"
    assert fp32.host_chain is not None
    assert fp32.host_chain.state is not None
    assert fp32.host_chain.state() is None
    check_same(fp32, lively_sources(2, 5), options)

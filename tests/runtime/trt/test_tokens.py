"""Every form of a TensorRT session's step against PyTorch: ragged sources, greedy, beams, each search option once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.fast_cases import rest_slow
from support.rounding import rounding_from_config
from support.stand_in_engines import MODEL, put_engines, session_over

from seq2engine.errors import RequestError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.artifact.profiles import Range, ShapeRanges
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.runtime.generate import generate
from seq2engine.runtime.search.constraints.timestamps import Timestamps
from seq2engine.runtime.search.constraints.trie import trie_from_sequences
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step import Emitted
from seq2engine.runtime.search.step_output import candidates_from
from seq2engine.runtime.torch_session import TorchSession
from seq2engine.runtime.trt import step_plan
from seq2engine.runtime.trt.session import TrtSession
from seq2engine.runtime.trt.step_plan import ordered

END = MODEL.config.end_id
RANGES = ShapeRanges(Range(1, 8, 32), Range(1, 4, 4), Range(1, 8, 16), Range(1, 12, 24))
FIXED_BEAMS = dataclasses.replace(RANGES, beam=Range(4, 4, 4))
ONE_BEAM = dataclasses.replace(RANGES, beam=Range(1, 1, 1))
LENGTH = 20


def ragged(count: int, seed: int = 3) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 256, rng.integers(1, 16)).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return onnx_from_model(MODEL, tmp_path_factory.mktemp("tokens") / "run7", ("fp32",))


@pytest.fixture(scope="module")
def sessions(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, TrtSession]]:
    growing = onnx_from_model(MODEL, tmp_path_factory.mktemp("tokens") / "growing", ("fp32",), "growing")
    made = {
        "static": session_over(put_engines(bundle, RANGES, name="range", flavour="tensorrt")),
        "four beams": session_over(put_engines(bundle, FIXED_BEAMS, name="fixed")),
        "one beam": session_over(put_engines(bundle, ONE_BEAM, name="one")),
        "growing": session_over(put_engines(growing, RANGES, name="range")),
        "growing, one beam": session_over(put_engines(growing, ONE_BEAM, name="one")),
    }
    yield made
    for session in made.values():
        session.close()


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy without scores": {"scores": False},
    "beam": {"beam": 4, "nbest": 4},
    "three beams": {"beam": 3},
    "CTranslate2's": {"beam": 4, "beam_style": "ctranslate2", "patience": 1.5},
    "CTranslate2's, one beam": {"beam_style": "ctranslate2"},
    "length penalty": {"beam": 4, "length_penalty": 0.3, "early_stopping": True},
    "least length": {"beam": 4, "min_length": 9},
    "least length, greedy": {"min_length": 9},
    "forced first": {"beam": 4, "forced_bos": 9},
    "forced first, greedy": {"forced_bos": 9},
    "forced end": {"beam": 4, "forced_eos": END, "max_length": 5},
    "forced end, greedy": {"forced_eos": END, "max_length": 5},
    "prefix": {"beam": 4, "prefix": (9, 17)},
    "prefix, greedy": {"prefix": (9, 17)},
    "bans": {"beam": 4, "banned": ((49,), (65,))},
    "bans, greedy": {"banned": ((49,), (65,), (12,))},
    "bans, CTranslate2's": {"beam": 4, "banned": ((49,), (65,)), "beam_style": "ctranslate2"},
    "many bans": {"beam": 4, "banned": tuple((token,) for token in range(40, 60))},
    "many bans, greedy": {"banned": tuple((token,) for token in range(40, 60))},
    "banned sequence": {"beam": 4, "banned": ((49, 65),)},
    "first banned": {"beam": 4, "first_banned": (49,)},
    "first banned, greedy": {"first_banned": (49,), "prefix": (9,)},
    "allowed": {"beam": 4, "allowed": tuple(range(40, 120))},
    "shortlist": {"beam": 4, "shortlist": tuple(range(40, 120))},
    "shortlist, greedy": {"shortlist": tuple(range(40, 120))},
    "no repeated n-gram": {"beam": 4, "no_repeat_ngram": 2},
    "no n-gram of the source": {"beam": 4, "source_no_repeat_ngram": 1},
    "repetition penalty": {"beam": 4, "repetition_penalty": 1.3},
    "repetition penalty, greedy": {"repetition_penalty": 1.3},
    "sampling": {"sample": True, "seed": 4, "top_k": 5, "nbest": 2},
    "phrases": {"beam": 4, "phrases": ((50, 51),)},
    "trie": {"beam": 4, "trie": trie_from_sequences([(50, 51), (60, 61, 62), (60, 7)])},
    "alternatives": {"nbest": 3, "alternatives": True},
    "timestamps": {"beam": 4, "timestamps": Timestamps(200, 30)},
    "timestamps, greedy": {"timestamps": Timestamps(200, 30), "allowed_log_probs": True},
    "ignored end": {"beam": 4, "ignore_eos": True, "max_length": 7},
}


# What differs in how a step's output is reduced on the device, once each.
FAST = (
    "greedy without scores",
    "beam",
    "CTranslate2's",
    "least length, greedy",
    "forced end, greedy",
    "prefix",
    "bans",
    "many bans, greedy",
    "shortlist",
    "no repeated n-gram",
    "repetition penalty, greedy",
    "sampling",
    "trie",
    "timestamps",
)


def found_by(session: Any, sources: list[list[int]], options: SearchOptions) -> list[list[tuple[int, ...]]]:
    batches = [sources[first : first + 32] for first in range(0, len(sources), 32)]
    return [[one.tokens for one in row] for batch in batches for row in generate(session, batch, options)]


def serving(sessions: dict[str, TrtSession], options: SearchOptions) -> dict[str, TrtSession]:
    """Those whose engines have as many beams."""
    return {form: session for form, session in sessions.items() if options.width <= (session.limits.beam or 0)}


@pytest.mark.parametrize("name", rest_slow(OPTIONS, FAST))
def test_each_search_option(name: str, sessions: dict[str, TrtSession]) -> None:
    options, sources = SearchOptions(**{"max_length": LENGTH, **OPTIONS[name]}), ragged(12)
    with TorchSession(MODEL) as reference:
        expected = found_by(reference, sources, options)
    assert len({token for row in expected for tokens in row for token in tokens}) > 3, "repetition proves little"
    for form, session in serving(sessions, options).items():
        assert found_by(session, sources, options) == expected, form


@pytest.mark.slow
@pytest.mark.parametrize("name", ["greedy", "greedy without scores", "beam"])
def test_500_sources(name: str, sessions: dict[str, TrtSession]) -> None:
    options, sources = SearchOptions(**{"max_length": LENGTH, **OPTIONS[name]}), ragged(500)
    with TorchSession(MODEL) as reference:
        expected = found_by(reference, sources, options)
    for form, session in serving(sessions, options).items():
        assert found_by(session, sources, options) == expected, form


def test_scores_are_those_of_pytorch(sessions: dict[str, TrtSession]) -> None:
    """Sums of softmax on the device, the logits of forced tokens, and of what bans leave."""
    sources, largest = ragged(6), 0.0

    def note(emitted: Emitted) -> None:
        nonlocal largest
        largest = max(largest, float(np.abs(emitted.answer.logits).max()))

    banned = {"banned": ((49,), (65,))}
    renormalised = {**banned, "allowed_log_probs": True}
    searches: list[dict[str, Any]] = [{}, {"prefix": (9, 17)}, banned, renormalised, {"beam": 4}]
    for given in (*searches, {"beam": 4, "forced_bos": 9}, {"beam": 4, **renormalised}):
        options = SearchOptions(max_length=8, **given)
        with TorchSession(MODEL) as reference:
            expected = generate(reference, sources, options, note, logits=True)
        near = rounding_from_config(MODEL.config, largest, source=16, target=8).log_prob
        for session in serving(sessions, options).values():
            for row, other in zip(generate(session, sources, options), expected, strict=True):
                assert row[0].tokens == other[0].tokens
                np.testing.assert_allclose(row[0].log_probs, other[0].log_probs, rtol=0, atol=near)


def test_equal_logits_are_ordered_by_token() -> None:
    rng = np.random.default_rng(5)
    for _ in range(50):
        logits = rng.integers(0, 6, (2, 3, 40)).astype(np.float32)
        wanted, count = 4, 8
        best = np.argsort(-logits + rng.random(logits.shape) / 2, axis=-1)[..., :count]  # of equal ones any
        found = ordered(best, np.take_along_axis(logits, best, axis=-1), wanted, 40)
        if found is not None:
            np.testing.assert_array_equal(found.tokens, candidates_from(logits).tokens)
    few = np.zeros((1, 1, 4), dtype=np.float32)
    assert ordered(np.array([[[3, 1, 0, 2]]]), few, 2, 9) is None  # others may be as good
    alone = ordered(np.array([[[3, 1, 0, 2]]]), few, 2, 4)
    assert alone is not None
    assert alone.tokens.tolist() == [[[0, 1]]]


def test_logits_are_read_where_candidates_may_have_been_left_out(
    sessions: dict[str, TrtSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    options, sources, device = SearchOptions(max_length=8, beam=4), ragged(5), sessions["static"].device
    expected = found_by(sessions["static"], sources, options)
    before: Any = device
    received = before.received
    monkeypatch.setattr(step_plan, "ordered", lambda *given: None)
    assert found_by(sessions["static"], sources, options) == expected
    assert before.received - received > 8 * 5 * 4 * MODEL.config.target_vocab * 4


def test_logits_must_be_read_before_the_next_step(sessions: dict[str, TrtSession]) -> None:
    answers = []
    options = SearchOptions(max_length=3, beam=4, ignore_eos=True)
    generate(sessions["static"], ragged(2), options, on_step=lambda emitted: answers.append(emitted.answer))
    assert answers[2].logits.shape == (2, 4, MODEL.config.target_vocab)
    with pytest.raises(RequestError, match="asked for after the next one; copy what is needed before"):
        _ = answers[1].logits


def test_passport_knows_what_serves_what(sessions: dict[str, TrtSession]) -> None:
    passport = sessions["static"].passport
    assert list(passport.reductions) == ["next_greedy", "candidates", "logits"]
    assert list(sessions["growing"].passport.reductions) == ["candidates", "logits"]

"""What a hypothesis carries: log-probabilities that `score_targets` agrees with, alignments and coverage that the
attention of its own forced decode gives; on every backend, in a padded batch, and fed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.rounding import rounding_from_session

from seq2engine.errors import RequestError, SessionError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.attention.view import weights_of
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.search.constraints.trie import trie_from_sequences
from seq2engine.runtime.search.coverage import LEAST, Coverage
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step import Hypothesis
from seq2engine.runtime.session import Session, cross_attention
from seq2engine.runtime.text.continuous_batching import translate_many
from seq2engine.runtime.text.scoring import score_targets

SMALL = dataclasses.replace(
    PRESETS["tiny"], d_model=32, d_ff=48, source_vocab=40, target_vocab=40, max_source=20, max_target=24
)
SOURCES = [[5, 6, 7], [8] * 9, [9, 10, 11, 12], [11, 12, 13, 14], [5]]
SEARCHES: list[dict[str, Any]] = [
    {},
    {"prefix": (4, 9), "min_length": 6, "repetition_penalty": 1.5},
    {"phrases": ((7, 9), (11,))},
    {"sample": True, "nbest": 3, "seed": 5, "temperature": 2.0},
    {"beam": 4, "nbest": 4},
    {"beam": 4, "nbest": 2, "early_stopping": True, "forced_bos": 3},
    {"beam": 3, "nbest": 2, "beam_style": "ctranslate2", "banned": ((6,), (7,)), "repetition_penalty": 1.3},
    {"beam": 3, "nbest": 3, "beam_style": "ctranslate2", "patience": 2.0},
    {"beam": 4, "nbest": 4, "phrases": ((7, 9), (11,))},
    {"beam": 3, "nbest": 3, "trie": trie_from_sequences([(4, 5, 6), (4, 7), (8,), (9, 9)])},
    {"beam": 2, "nbest": 3, "alternatives": True},
]
BUNDLES = [("torch", "static"), ("onnxruntime", "static"), ("onnxruntime", "growing")]


@cache
def bundle_in(folder: Path, form: str) -> Bundle:
    return onnx_from_model(random_model(SMALL, 1), folder / form, ("fp32",), cache_form=form)


@pytest.fixture(scope="module", params=BUNDLES, ids="-".join)
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    backend, form = request.param
    bundle = bundle_in(tmp_path_factory.getbasetemp(), form)
    with open_session(bundle, backend, threads=1, attention=True) as opened:
        yield opened


def own_looks(session: Session, source: list[int], found: Hypothesis, options: SearchOptions) -> np.ndarray:
    """[T, S]: the last layer's attention, mean of its heads, of the output forced on its own."""
    return weights_of(session, source, found.tokens, options)[-1].astype(np.float64).mean(axis=0)


@pytest.mark.slow
@pytest.mark.parametrize("options", SEARCHES, ids=lambda options: " ".join(options) or "greedy")
def test_log_probs_and_alignments_are_those_of_the_tokens(session: Session, options: dict[str, Any]) -> None:
    search = SearchOptions(max_length=12, alignments=True, **options)
    together = generate(session, SOURCES, search)
    fed = dict(translate_many(session, SOURCES, search, 2, 1))
    near = rounding_from_session(session, SOURCES, 12)
    for row, (source, found) in enumerate(zip(SOURCES, together, strict=True)):
        scores = score_targets(session, [source] * len(found), [one.tokens for one in found])
        for one, scored, other in zip(found, scores, fed[row], strict=True):
            assert one.log_probs == pytest.approx(scored.log_probs, rel=0, abs=near.log_prob)
            assert other.log_probs == pytest.approx(one.log_probs, rel=0, abs=near.log_prob)
            looks = own_looks(session, source, one, search)
            ranked = np.sort(looks, axis=1)
            clear = np.ones(len(looks), bool) if len(source) == 1 else ranked[:, -1] - ranked[:, -2] > near.attention
            for alignments in (one.alignments, other.alignments):
                assert len(alignments) == len(one.tokens)
                assert (np.array(alignments) == looks.argmax(axis=1))[clear].all()


def test_scores_are_made_of_log_probs(session: Session) -> None:
    for [best] in generate(session, SOURCES, SearchOptions(max_length=12)):
        assert best.score == pytest.approx(sum(best.log_probs))
        assert best.alignments == ()
    for nbest in generate(session, SOURCES, SearchOptions(max_length=12, beam=3, nbest=3, length_penalty=0.7)):
        for one in nbest:
            assert one.score == pytest.approx(sum(one.log_probs) / len(one.tokens) ** 0.7)


@pytest.mark.each_value
@pytest.mark.parametrize("beam_style", ["huggingface", "ctranslate2"])
def test_coverage_is_what_all_steps_looked_at(session: Session, beam_style: str) -> None:
    options = SearchOptions(
        max_length=12, beam=4, nbest=4, coverage_penalty=0.4, length_penalty=0.8, beam_style=beam_style
    )
    together = generate(session, SOURCES, options)
    fed = dict(translate_many(session, SOURCES, options, 3, 1))
    plain = generate(session, SOURCES, dataclasses.replace(options, coverage_penalty=0.0))
    near = rounding_from_session(session, SOURCES, 12)
    for row, (source, found) in enumerate(zip(SOURCES, together, strict=True)):
        for one in found:
            covered = own_looks(session, source, one, options).sum(axis=0)
            penalty = 0.4 * np.log(np.minimum(covered, 1)).sum()
            expected = sum(one.log_probs) / len(one.tokens) ** 0.8 + penalty
            assert one.score == pytest.approx(expected, rel=0, abs=0.4 * len(source) * near.attention)
        assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
        assert [one.tokens for one in fed[row]] == [one.tokens for one in found]
    assert [[one.tokens for one in row] for row in plain] != [[one.tokens for one in row] for row in together]


def test_coverage_by_hand() -> None:
    """Two beams of two sources; the second source has one token, and padding is never attended to."""
    options = SearchOptions(max_length=4, beam=2, coverage_penalty=2.0)
    coverage = Coverage([[5, 6], [7]], options)
    coverage.add(np.array([[[0.5, 0.5], [0.9, 0.1]], [[1.0, 0.0], [1.0, 0.0]]]), np.array([[0, 1], [0, 1]]))
    assert coverage.places.tolist() == [[0, 0], [0, 0]]
    coverage.add(np.array([[[0.2, 0.8], [0.3, 0.7]], [[1.0, 0.0], [1.0, 0.0]]]), np.array([[1, 1], [0, 0]]))
    assert coverage.places.tolist() == [[1, 1], [0, 0]]
    assert coverage.penalty() == pytest.approx(np.array([[2 * np.log(0.9), 2 * np.log(0.8)], [0.0, 0.0]]))
    coverage.keep(np.array([1]))
    assert coverage.penalty().tolist() == [[0.0, 0.0]]
    nothing = Coverage([[5]], options)
    nothing.add(np.zeros((1, 2, 1)), np.zeros((1, 2), dtype=np.int64))
    assert nothing.penalty() == pytest.approx(2 * np.log(LEAST))


def test_a_session_without_attention_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    bundle = bundle_in(tmp_path_factory.getbasetemp(), "static")
    with open_session(bundle, "onnxruntime", threads=1) as session:
        for options in (SearchOptions(max_length=4, alignments=True), SearchOptions(4, 2, coverage_penalty=1.0)):
            with pytest.raises(
                RequestError, match="session keeps no cross-attention weights; open it with attention=True"
            ):
                generate(session, SOURCES, options)
        with pytest.raises(SessionError, match="this session keeps no cross-attention weights"):
            cross_attention(session, {})
    with pytest.raises(SessionError, match="backend tensorrt has no cross-attention weights"):
        open_session(bundle, "tensorrt", attention=True)

"""Scores of given targets: what PyTorch's own log-softmax gives, on every backend, in any batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rounding import rounding_from_session

from seq2engine.errors import RequestError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step_output import StepOutput
from seq2engine.runtime.session import Session
from seq2engine.runtime.text.scoring import TargetScore, perplexity_of, score_targets

SMALL = dataclasses.replace(
    PRESETS["tiny"],
    d_model=32,
    d_ff=48,
    source_vocab=40,
    target_vocab=30,
    max_source=20,
    max_target=24,
    share_embeddings=False,
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return onnx_from_model(random_model(SMALL, 1), tmp_path_factory.mktemp("scoring") / "b", ("fp32",))


@pytest.fixture(scope="module", params=["torch", "onnxruntime"])
def session(request: pytest.FixtureRequest, bundle: Bundle) -> Iterator[Session]:
    with open_session(bundle, request.param, threads=1) as opened:
        yield opened


def pairs_of(count: int, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    random = np.random.default_rng(seed)

    def rows(most: int, vocab: int) -> list[list[int]]:
        return [random.integers(3, vocab, random.integers(1, most + 1)).tolist() for _ in range(count)]

    return rows(SMALL.max_source, SMALL.source_vocab), rows(SMALL.max_target, SMALL.target_vocab)


def torch_log_probs(source: list[int], target: list[int], start: int = SMALL.start_id) -> list[float]:
    """One pair through the whole model at once, without a cache."""
    ids = torch.tensor([source])
    with torch.inference_mode():
        logits = random_model(SMALL, 1).double()(
            ids, torch.ones_like(ids, dtype=torch.bool), torch.tensor([[start, *target[:-1]]])
        )
    return logits.log_softmax(-1)[0].gather(1, torch.tensor(target)[:, None])[:, 0].tolist()


@pytest.mark.each_value
@pytest.mark.parametrize("batch", [1, 4, 32])
def test_scores_are_those_of_teacher_forcing_in_torch(session: Session, batch: int) -> None:
    sources, targets = pairs_of(9, 0)
    found = score_targets(session, sources, targets, batch)
    near = rounding_from_session(session, sources, SMALL.max_target)
    for source, target, score in zip(sources, targets, found, strict=True):
        assert score.tokens == tuple(target)
        assert score.log_probs == pytest.approx(torch_log_probs(source, target), rel=0, abs=near.log_prob)
        assert score.total == pytest.approx(sum(score.log_probs))
        assert score.perplexity == pytest.approx(math.exp(-sum(score.log_probs) / len(target)))


def test_another_start_token(session: Session) -> None:
    ((source,), (target,)) = pairs_of(1, 1)
    (score,) = score_targets(session, [source], [target], start=7)
    near = rounding_from_session(session, [source], SMALL.max_target)
    assert score.log_probs == pytest.approx(torch_log_probs(source, target, start=7), rel=0, abs=near.log_prob)


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 1000), batch=st.integers(1, 6), order=st.permutations(range(7)))
def test_neighbours_and_order_do_not_matter(session: Session, seed: int, batch: int, order: list[int]) -> None:
    sources, targets = pairs_of(7, seed)
    targets = [target[:6] for target in targets]
    alone = score_targets(session, sources, targets, 1)
    mixed = score_targets(session, [sources[i] for i in order], [targets[i] for i in order], batch)
    near = rounding_from_session(session, sources, 6)
    for i, score in zip(order, mixed, strict=True):
        assert score.tokens == alone[i].tokens
        assert score.log_probs == pytest.approx(alone[i].log_probs, rel=0, abs=near.log_prob)


@pytest.mark.parametrize("options", [{}, {"beam": 4, "nbest": 3}, {"sample": True, "nbest": 3, "seed": 5}])
def test_the_total_of_an_output_is_its_score(session: Session, options: dict[str, int]) -> None:
    search = SearchOptions(max_length=16, length_penalty=0.5, **options)
    sources, _ = pairs_of(5, 3)
    near = rounding_from_session(session, sources, 16)
    for source, hypotheses in zip(sources, generate(session, sources, search), strict=True):
        scores = score_targets(session, [source] * len(hypotheses), [best.tokens for best in hypotheses])
        for score, expected in zip(scores, near.scores(hypotheses, search), strict=True):
            normaliser = len(score.tokens) ** 0.5 if search.beam > 1 else 1
            assert score.total / normaliser == expected


def test_nothing_to_score(session: Session) -> None:
    assert score_targets(session, [], []) == []


@pytest.mark.parametrize(
    ("sources", "targets", "how", "message"),
    [
        ([[3]], [], {}, "1 sources but 0 targets, expected one of each"),
        ([[3]], [[]], {}, "row 0: the target is empty"),
        ([[3], [3]], [[4], [4] * 25], {}, "row 1: the target has 25 tokens, at most 24 are supported; shorten it"),
        ([[3]], [[4, 30]], {}, "row 0: the target has token 30, but the vocabulary has 0 to 29"),
        ([[3], [40], []], [[4]] * 3, {}, "source 1 has token 40, the vocabulary has 40; source 2 is empty"),
        ([[3]], [[4]], {"batch": 0}, "batch 0, expected at least 1"),
        ([[3]], [[4]], {"start": 99}, "token 99 asked for, but the vocabulary has 0 to 29"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    session: Session, sources: list[list[int]], targets: list[list[int]], how: dict[str, int], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        score_targets(session, sources, targets, **how)


def test_logits_that_are_no_numbers_are_refused(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_session(bundle, "onnxruntime", threads=1) as session:
        step, broken = session.step, np.where(np.arange(2) == 1, np.nan, 1)[:, None, None]
        monkeypatch.setattr(session, "step", lambda *given: StepOutput(broken * step(*given).logits))
        with pytest.raises(RequestError, match="source 1: the model's logits are not finite"):
            score_targets(session, [[3], [4]], [[5, 6], [7, 8]])


def test_perplexity() -> None:
    assert perplexity_of(math.log(0.25) * 3, 3) == pytest.approx(4)
    assert TargetScore((1, 2), (math.log(0.5), math.log(0.5))).perplexity == pytest.approx(2)
    assert perplexity_of(-1e6, 1) == math.inf

"""What a step answers: normalisers and candidates, against plain sums and sorts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rounding import exp_sum_error

from seq2engine.errors import RequestError
from seq2engine.runtime.search.step_output import Candidates, Reduced, StepOutput, finite, log_sum_exp, top_columns


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    width=st.integers(1, 2000),
    count=st.integers(1, 9),
    levels=st.sampled_from([1, 2, 30, 10**6]),
    hidden=st.booleans(),
)
def test_top_columns_are_those_of_a_full_stable_sort(
    seed: int, width: int, count: int, levels: int, hidden: bool
) -> None:
    random = np.random.default_rng(seed)
    rows = random.integers(0, levels, (3, width)).astype(np.float32)  # few levels: many ties
    if hidden:
        rows[random.random(rows.shape) < 0.99] = -np.inf
    count = min(count, width)
    expected = np.argsort(-rows, axis=1, kind="stable")[:, :count]
    assert (top_columns(rows, count) == expected).all()


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    batch=st.integers(1, 5),
    beams=st.integers(1, 5),
    vocab=st.sampled_from([1, 2, 3, 100, 5003]),
    levels=st.sampled_from([1, 2, 30, 10**6]),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_an_answer_has_the_best_of_every_beam_and_what_makes_probabilities_of_them(
    seed: int, batch: int, beams: int, vocab: int, levels: int, dtype: type
) -> None:
    random = np.random.default_rng(seed)
    logits = (random.integers(0, levels, (batch, beams, vocab)) * (8 / levels)).astype(dtype)
    answer = StepOutput(logits)
    order = np.argsort(-logits, axis=-1, kind="stable")[..., : beams + 1]
    assert (answer.candidates.tokens == order).all()
    assert (answer.candidates.logits == np.take_along_axis(logits, order, axis=-1)).all()
    assert (answer.best.tokens == order[..., :1]).all()
    assert (answer.best.logits == logits.max(axis=-1, keepdims=True)).all()
    assert (answer.logits_of(order[..., 0]) == logits.max(axis=-1)).all()
    assert answer.normaliser.dtype == np.float64
    exact = np.logaddexp.reduce(logits.astype(np.float64), axis=-1)
    assert answer.normaliser == pytest.approx(exact, rel=0, abs=exp_sum_error(vocab))

    rows = random.integers(0, batch, 3)
    some = answer.of(rows)
    assert (some.logits == logits[rows]).all()
    assert (some.normaliser == answer.normaliser[rows]).all()
    assert (some.candidates.tokens == order[rows]).all()


def test_the_last_bit_of_a_normaliser_does_not_depend_on_the_rows_beside_it() -> None:
    logits = np.random.default_rng(0).normal(0, 3, (7, 3, 20_011)).astype(np.float32)
    alone = [[log_sum_exp(row[None, None])[0, 0] for row in rows] for rows in logits]
    assert log_sum_exp(logits).tolist() == alone


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_source_without_a_normaliser_is_refused_by_name(bad: float) -> None:
    logits = np.zeros((6, 1, 9), dtype=np.float32)
    logits[4] = bad
    normaliser = StepOutput(logits).normaliser
    assert np.isfinite(normaliser[:, 0]).tolist() == [True, True, True, True, False, True]
    with pytest.raises(RequestError, match="source 14: the model's logits are not finite"):
        finite(normaliser, np.arange(10, 16))


def test_impossible_tokens_weigh_nothing() -> None:
    logits = np.full((1, 1, 9), -np.inf, dtype=np.float32)
    logits[0, 0, [3, 5]] = 2
    answer = StepOutput(logits)
    assert answer.normaliser[0, 0] == pytest.approx(2 + np.log(2))
    assert answer.candidates.tokens.tolist() == [[[3, 5]]]


class Unread:
    """Logits that no step has put out: to read them, it would be computed again."""

    shape = (2, 1, 50)

    def __getitem__(self, index):
        raise AssertionError("logits were read")


def reduced_from(logits: np.ndarray, count: int) -> Reduced:
    tokens = np.argsort(-logits, axis=-1, kind="stable")[..., :count]
    best = np.take_along_axis(logits, tokens, axis=-1)
    return Reduced(Candidates(tokens, best), np.exp(logits - best[..., :1]).sum(axis=-1))


@pytest.mark.parametrize("count", [4, 8])
def test_alike_beams_have_the_candidates_that_one_of_them_has(count: int) -> None:
    logits = np.random.default_rng(3).normal(size=Unread.shape).astype(np.float32)
    reduced = reduced_from(logits, count)
    found = StepOutput(Unread(), reduced).of_alike(3)
    assert found.raw.shape == (2, 3, 50)
    assert (found.candidates.tokens == np.repeat(reduced.candidates.tokens[..., :4], 3, axis=1)).all()
    assert (found.candidates.logits == np.repeat(reduced.candidates.logits[..., :4], 3, axis=1)).all()
    assert (found.normaliser == np.repeat(StepOutput(Unread(), reduced).normaliser, 3, axis=1)).all()


@pytest.mark.parametrize("count", [2, 3])
def test_alike_beams_whose_step_put_out_too_few_candidates_have_those_of_its_logits(count: int) -> None:
    logits = np.random.default_rng(3).normal(size=Unread.shape).astype(np.float32)
    found = StepOutput(logits, reduced_from(logits, count)).of_alike(3)
    expected = reduced_from(np.repeat(logits, 3, axis=1), 4).candidates
    assert (found.candidates.tokens == expected.tokens).all()
    assert (found.candidates.logits == expected.logits).all()
    assert (found.logits == np.repeat(logits, 3, axis=1)).all()
    assert (
        found.logits_of(np.array([[1, 2], [3, 4]]), np.array([[0, 2], [1, 0]]))
        == logits[:, 0][[[0], [1]], [[1, 2], [3, 4]]]
    ).all()

"""Candidates from logits on the device: numpy's numbers in ONNX Runtime, few launches in TensorRT."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.device_graphs import OrtGraph, launches_of
from support.rounding import exp_sum_error

from seq2engine.export.device_graphs.candidates import LEAST, SPARE, candidate_count, candidates

VOCABS = (1, 3, 40, 300)


@cache
def graph(vocab, count):
    return OrtGraph(candidates(vocab, count))


def test_there_are_enough_candidates_for_every_beam_and_some_bans():
    assert candidate_count(1, 32_000) == candidate_count(4, 32_000) == LEAST
    assert candidate_count(8, 32_000) == 8 + 1 + SPARE
    assert candidate_count(4, 3) == 3


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    batch=st.integers(1, 4),
    beams=st.integers(1, 5),
    vocab=st.sampled_from(VOCABS),
    steps=st.sampled_from((1, 4, 1000)),  # so few different logits: ties
    barred=st.floats(0, 0.6),
)
def test_they_are_the_best_of_numpy(seed, batch, beams, vocab, steps, barred):
    rng = np.random.default_rng(seed)
    logits = (rng.integers(0, steps, (batch, beams, vocab)) * 0.37 - 5).astype(np.float32)
    logits[rng.random(logits.shape) < barred] = -np.inf
    logits[..., -1] = 1.0  # some token is possible
    count = candidate_count(beams, vocab)
    found = graph(vocab, count)(logits=logits)

    order = np.argsort(-logits, axis=-1, kind="stable")[..., :count]
    np.testing.assert_array_equal(found["best_tokens"], order)
    np.testing.assert_array_equal(found["best_logits"], np.take_along_axis(logits, order, axis=-1))
    top = logits.max(axis=-1, keepdims=True).astype(np.float64)
    exact = np.exp(logits - top).sum(axis=-1)
    np.testing.assert_allclose(found["exp_sum"], exact, rtol=exp_sum_error(vocab))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_numbers_leave_no_finite_sum(bad):
    logits = np.zeros((2, 3, 40), dtype=np.float32)
    logits[1, 2, 7] = bad
    total = graph(40, 8)(logits=logits)["exp_sum"]
    assert np.isfinite(total).sum() == 5
    assert not np.isfinite(total[1, 2])


def test_where_no_token_is_possible_there_is_no_finite_sum():
    logits = np.full((1, 1, 40), -np.inf, dtype=np.float32)
    assert not np.isfinite(graph(40, 8)(logits=logits)["exp_sum"]).any()


@pytest.mark.parametrize("beams", [(1, 1, 1), (4, 4, 4), (1, 4, 4)])
def test_tensorrt_launches_four_kernels(beams):
    sizes = [{"B": batch, "K": k} for batch, k in zip((1, 8, 32), beams, strict=True)]
    assert launches_of(candidates(32_000, 8), *sizes) == 4

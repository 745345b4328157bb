"""How alike two next-token distributions are, on numbers whose answer can be worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.rounding import of_written_logits

from seq2engine.runtime.parity.levels.next_token import NextToken, NextTokenTally


def result_of(*pairs):
    tally = NextTokenTally()
    for exact, given in pairs:
        tally.add(np.log(np.array(exact)), np.log(np.array(given)).astype(np.float32))
    return tally.result()


def near(divergence):
    """A mean of differences of log-probabilities, of which the given ones are rounded to fp32 and none is below -3."""
    return pytest.approx(divergence, rel=0, abs=of_written_logits(8, 3.0).log_prob)


def test_equal_ones_are_equal():
    row = [[0.5, 0.2, 0.1, 0.1, 0.05, 0.05]]
    found = result_of((row, row))
    assert (found.rows, found.top1, found.top5) == (1, 1.0, 1.0)
    assert found.kl == near(0.0)


def test_is_the_divergence_from_the_oracle_and_not_to_it():
    found = result_of(([[0.75, 0.25]], [[0.5, 0.5]]))
    assert found.kl == near(0.75 * math.log(1.5) + 0.25 * math.log(0.5))


def test_counts_over_batches():
    even = [[0.25, 0.25, 0.25, 0.25]]
    found = result_of((even, even), ([[0.7, 0.1, 0.1, 0.1]], [[0.1, 0.7, 0.1, 0.1]]))
    assert found.rows == 2
    assert found.top1 == 0.5
    assert found.top5 == 1.0  # of four tokens all are among the best five
    assert found.worst_kl == near(0.6 * math.log(7))
    assert found.kl == pytest.approx(found.worst_kl / 2)


def test_five_of_more_may_be_others():
    exact = np.arange(8.0)[None]
    given = exact.copy()
    given[0, 3], given[0, 0] = -1.0, 7.5  # the fifth best gives way to the worst
    tally = NextTokenTally()
    tally.add(exact, given)
    assert tally.result().top5 == pytest.approx(0.8)
    assert tally.result().top1 == 0.0


def test_nothing_is_nothing():
    tally = NextTokenTally()
    tally.add(np.ones((0, 4)), np.ones((0, 4)))
    assert tally.result() == NextToken(0, 0.0, 0.0, 0.0, 0.0)

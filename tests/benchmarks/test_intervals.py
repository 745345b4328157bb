"""Exact intervals: their ranks against tables and brute force, and how often noise alone is taken for a difference."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest

from seq2engine.benchmarks import intervals
from seq2engine.benchmarks.intervals import (
    TAIL,
    fewest_rounds,
    orders_by_pairs,
    paired_interval,
    rank_sum_rank,
    separate_interval,
    sign_rank,
)

TRIALS = 2000


def test_the_ranks_are_those_of_the_published_tables() -> None:
    """Two-sided 5 %: the tables give the largest critical value, one less than the rank."""
    assert [sign_rank(n) for n in (1, 5, 6, 8, 9, 12, 20, 25)] == [0, 0, 1, 1, 2, 3, 6, 8]
    assert [rank_sum_rank(n, n) for n in (3, 4, 5, 6, 8, 10, 20)] == [0, 1, 3, 6, 14, 24, 128]
    assert [rank_sum_rank(*sizes) for sizes in ((2, 8), (8, 2), (2, 7), (3, 5), (3, 20))] == [1, 1, 0, 1, 9]


@pytest.mark.parametrize(("above", "below"), [(1, 1), (2, 3), (4, 4), (5, 3)])
def test_orders_are_counted_right(above: int, below: int) -> None:
    counted = np.zeros(above * below + 1)
    for places in combinations(range(above + below), above):
        counted[sum(place - rank for rank, place in enumerate(places))] += 1
    np.testing.assert_array_equal(orders_by_pairs(above, below), counted)


def test_four_rounds_of_each_run_are_the_fewest_that_can_decide() -> None:
    assert fewest_rounds() == 4
    assert 1 / math.comb(8, 4) <= TAIL < 1 / math.comb(6, 3)


@pytest.mark.parametrize("sizes", [(40, 40), (60, 90), (100, 100)])
def test_many_rounds_are_ranked_as_if_counted(sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    counted = rank_sum_rank(*sizes)
    monkeypatch.setattr(intervals, "COUNTED", 0)
    assert abs(rank_sum_rank.__wrapped__(*sizes) - counted) <= 1


def noise(kind: str, generator: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
    """Times as they are: a few percent of jitter, or now and then several times as long."""
    jitter = np.exp(0.05 * generator.standard_normal(size))
    return jitter if kind == "jitter" else jitter * (1 + 5 * (generator.random(size) < 0.1))


@pytest.mark.parametrize("kind", ["jitter", "hiccups"])
@pytest.mark.parametrize("rounds", [4, 5, 6, 10, 30])
def test_noise_alone_is_rarely_a_difference(kind: str, rounds: int) -> None:
    """At most TAIL on each side, give or take three deviations of the count."""
    generator = np.random.default_rng([rounds, kind == "jitter"])
    drawn = noise(kind, generator, (TRIALS, 2, rounds))
    allowed = TRIALS * TAIL + 3 * math.sqrt(TRIALS * TAIL * (1 - TAIL))
    separate = [separate_interval(above, below) for above, below in drawn]
    paired = [paired_interval(above / below) for above, below in drawn]
    for found in (separate, paired) if rounds >= 6 else (separate,):
        assert sum(interval is not None and interval[0] > 1 for interval in found) <= allowed
        assert sum(interval is not None and interval[1] < 1 for interval in found) <= allowed
        assert None not in found
    if rounds < 6:
        assert set(paired) == {None}

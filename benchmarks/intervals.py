"""Exact confidence intervals of a ratio of times, and the fewest rounds that can decide.

Timings have no known distribution, so the intervals count ranks only. Under "both take equally long" every order of the
samples is equally likely, which makes the chance of the most extreme order a count:

    rounds in common   R rounds give R ratios; all on one side of the truth has a chance of 2**-R (sign test)
    two separate runs  N and M rounds give N * M ratios; complete separation has 1 / C(N + M, N) (rank-sum test)

An interval leaves at most `TAIL` out on each side. With 2.5 % that takes 6 rounds in common, or 4 and 4 of two runs;
with fewer no interval of that coverage exists, whatever the times are.
"""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist

import numpy as np

COVERAGE = 0.95
TAIL = (1 - COVERAGE) / 2
COUNTED = 10_000  # rounds of one run times those of the other; beyond that the rank-sum is normal to within one rank

Interval = tuple[float, float]


def paired_interval(ratios: np.ndarray) -> Interval | None:
    """Of the median of ratios, one a round; None where the rounds are too few."""
    return between(ratios, sign_rank(len(ratios)))


def separate_interval(above: np.ndarray, below: np.ndarray) -> Interval | None:
    """Of how many times as large the values of one run are as those of another; None where the rounds are too few."""
    return between(np.divide.outer(above, below).ravel(), rank_sum_rank(len(above), len(below)))


def between(ratios: np.ndarray, rank: int) -> Interval | None:
    """From the rank-th smallest to the rank-th largest."""
    ordered = np.sort(ratios)
    return (float(ordered[rank - 1]), float(ordered[-rank])) if rank else None


@cache
def sign_rank(rounds: int) -> int:
    """The largest k such that fewer than k of the rounds are on a given side with a chance of at most TAIL; 0: none."""
    chance, rank = 0.0, 0
    while (chance := chance + math.comb(rounds, rank) / 2**rounds) <= TAIL:
        rank += 1
    return rank


@cache
def rank_sum_rank(above: int, below: int) -> int:
    """The largest k such that fewer than k of all pairs are out of order with a chance of at most TAIL; 0: none."""
    pairs = above * below
    if pairs > COUNTED:
        spread = math.sqrt(pairs * (above + below + 1) / 12)
        return math.floor(pairs / 2 + NormalDist().inv_cdf(TAIL) * spread + 0.5)
    chances = np.cumsum(orders_by_pairs(above, below)) / math.comb(above + below, above)
    return int(np.searchsorted(chances, TAIL, side="right"))


def orders_by_pairs(above: int, below: int) -> np.ndarray:
    """How many orders of the samples have 0, 1, 2, ... pairs out of order: [above * below + 1].

    The largest sample of all is one of `above`, and out of order with none, or one of `below`, and so with all `above`.
    """
    size = above * below + 1
    column = [np.eye(1, size)[0] for _ in range(above + 1)]  # with none of `below` there is one order
    for _ in range(below):
        for i in range(1, above + 1):
            shifted = np.concatenate([np.zeros(i), column[i][: size - i]])
            column[i] = column[i - 1] + shifted
    return column[above]


def fewest_rounds() -> int:
    """The least number of rounds of two separate runs, as many of each, that can decide."""
    return next(rounds for rounds in range(1, COUNTED) if rank_sum_rank(rounds, rounds))

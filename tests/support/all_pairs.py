"""All-pairs testing: few cases in which every two values of two factors meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence

Case = dict[str, str]  # factor -> the name of its value
Pair = tuple[tuple[str, str], tuple[str, str]]
TRIES = 24  # random cases with a pair, of which the one with the most new pairs is taken


def pairs_of(case: Case) -> set[Pair]:
    return set(itertools.combinations(case.items(), 2))


def all_pairs(
    factors: Mapping[str, Sequence[str]], allowed: Callable[[Case], bool], seed: int = 0
) -> tuple[list[Case], list[Case]]:
    """Cases with every pair of values that an allowed case can have; and a refused case for every other pair.

    The first value of a factor is its usual one: a refused case has the usual values beside its pair.
    """
    rng = random.Random(seed)
    usual = {factor: values[0] for factor, values in factors.items()}
    missing = {
        ((one, first), (other, second))
        for one, other in itertools.combinations(factors, 2)
        for first in factors[one]
        for second in factors[other]
    }
    cases: list[Case] = []
    impossible: list[Pair] = []
    for pair in sorted(missing):
        if pair not in missing:
            continue
        tries = [usual, *({name: rng.choice(values) for name, values in factors.items()} for _ in range(TRIES))]
        found = [case for case in ({**one, **dict(pair)} for one in tries) if allowed(case)]
        if not found:
            impossible.append(pair)
            missing.remove(pair)
            continue
        best = max(found, key=lambda case: len(pairs_of(case) & missing))
        missing -= pairs_of(best)
        cases.append(best)
    covered = {pair for case in cases for pair in pairs_of(case)}
    return cases, [{**usual, **dict(pair)} for pair in impossible if pair not in covered]

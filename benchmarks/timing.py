"""The one timing primitive: arms take turns, every sample is kept, and a comparison may end in "unsure"."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from seq2engine.common.progress import Progress, silent

from .intervals import Interval, paired_interval, separate_interval

MOST_LEADING = 10  # untimed calls before a timed one
MOST_IN_TURN = 8  # rounds


@dataclass(frozen=True)
class Samples:
    """The raw times of one arm, in the order they were taken; statistics are in milliseconds."""

    nanoseconds: tuple[int, ...]

    @property
    def median(self) -> float:
        return self.percentile(50)

    @property
    def p10(self) -> float:
        return self.percentile(10)

    @property
    def p90(self) -> float:
        return self.percentile(90)

    @property
    def p99(self) -> float:
        return self.percentile(99)

    @property
    def spread(self) -> float:
        """p90 - p10 relative to the median: 0.1 is ten percent."""
        return (self.p90 - self.p10) / self.median

    def percentile(self, percent: float) -> float:
        return float(np.percentile(np.array(self.nanoseconds, dtype=np.float64), percent)) / 1e6


@dataclass(frozen=True)
class Ratio:
    """A speedup (or slowdown) with its confidence interval.

    Verdicts, here and in every report, come from the interval alone. It is None where the rounds are too few for one.
    """

    value: float
    low: float | None
    high: float | None
    rounds: int

    def above(self, limit: float) -> bool:
        return self.low is not None and self.low > limit

    def below(self, limit: float) -> bool:
        return self.high is not None and self.high < limit

    @property
    def verdict(self) -> str:
        """faster or slower where the interval excludes 1, else unsure."""
        return "faster" if self.above(1) else "slower" if self.below(1) else "unsure"


def ratio_with(value: float, interval: Interval | None, rounds: int) -> Ratio:
    """The interval is that of the ratio per round, widened to include the ratio of medians, which is shown."""
    if interval is None:
        return Ratio(value, None, None, rounds)
    return Ratio(value, min(interval[0], value), max(interval[1], value), rounds)


def interleaved(
    arms: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = 2,
    progress: Progress = silent,
    stage: str = "timing",
    lead: float = 0.0,
    rest: float = 0.0,
    turn: float = 0.0,
    before: Callable[[str, int], object] = lambda arm, number: None,
    after: Callable[[str, Any], object] | None = None,
    clock: Callable[[], int] = time.perf_counter_ns,
    sleep: Callable[[float], object] = time.sleep,
) -> dict[str, Samples]:
    """Times every arm once per round, A B C, B C A, C A B, ..., so that a slow minute affects all of them alike.

    Before its timed call an arm rests (seconds; worker threads of the arm before it may still be spinning) and makes
    calls that are not timed, as its weights and code were pushed out of the processor's caches by the others, and the
    processor has slept: as many as the fastest arm makes in `lead` seconds, none where that is less than one. So short
    calls are timed as they are one after another, and long ones, which hardly gain, are not made twice.
    Where rounds differ, as sentences do, an untimed call would be of another one: instead a turn of an arm has as many
    rounds as the fastest arm makes in `turn` seconds, at most MOST_IN_TURN, with a rest before the first of them.
    `before` gets the arm and the number of the round, untimed, before anything else of its turn; the warm-up is of
    round 0. `after` gets the arm and what its timed call returned. Whatever an arm raises ends the run.
    """
    names = list(arms)
    taken: dict[str, list[int]] = {name: [] for name in names}
    progress(stage, 0.0)
    shortest = math.inf
    for name in names:
        before(name, 0)
        for _ in range(warmup):
            started = clock()
            arms[name]()
            shortest = min(shortest, clock() - started)
    leading = min(int(lead * 1e9 / max(shortest, 1)), MOST_LEADING)
    together = min(max(1, int(turn * 1e9 / max(shortest, 1))), MOST_IN_TURN)
    for begin in range(0, rounds, together):
        end, first = min(begin + together, rounds), begin // together % len(names)
        for name in names[first:] + names[:first]:
            call = arms[name]
            for number in range(begin, end):
                before(name, number)
                if rest and number == begin:
                    sleep(rest)
                for _ in range(leading):
                    call()
                started = clock()
                result = call()
                taken[name].append(clock() - started)
                if after is not None:
                    after(name, result)
        progress(stage, end / rounds)
    return {name: Samples(tuple(times)) for name, times in taken.items()}


def ratio_interval(a: Samples, b: Samples) -> Ratio:
    """How many times as fast b is as a: the ratio of their medians with its exact interval.

    Both come from the same rounds, so that a slow minute affects both, and the ratio per round counts. Rounds
    too few for that are treated as two separate runs, which can decide with fewer; this only widens the interval.
    """
    one, other = (np.array(samples.nanoseconds, dtype=np.float64) for samples in (a, b))
    interval = paired_interval(one / other) or separate_interval(one, other)
    return ratio_with(a.median / b.median, interval, len(one))

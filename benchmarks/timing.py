"""The one timing primitive: arms take turns, every sample is kept, and a comparison may end in "unsure"."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from seq2engine.progress import Progress, silent

RESAMPLES = 4000  # of the bootstrap
COVERAGE = 0.95  # of its interval
FEWEST_ROUNDS = 6  # five rounds that all point one way happen by chance once in sixteen: not enough for a verdict


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
        """How far apart the middle four fifths of the samples are, against the median: 0.1 is ten percent."""
        return (self.p90 - self.p10) / self.median

    def percentile(self, percent: float) -> float:
        return float(np.percentile(np.array(self.nanoseconds, dtype=np.float64), percent)) / 1e6


@dataclass(frozen=True)
class Ratio:
    """How many times as fast one arm is as another, with the interval that the rounds leave open."""

    value: float
    low: float
    high: float
    rounds: int

    @property
    def verdict(self) -> str:
        """faster, slower, or unsure: the interval contains 1, or too few rounds were taken to say."""
        if self.rounds < FEWEST_ROUNDS or self.low <= 1 <= self.high:
            return "unsure"
        return "faster" if self.low > 1 else "slower"


def interleaved(
    arms: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = 2,
    progress: Progress = silent,
    stage: str = "timing",
    lead: int = 0,
    rest: float = 0.0,
    clock: Callable[[], int] = time.perf_counter_ns,
    sleep: Callable[[float], object] = time.sleep,
) -> dict[str, Samples]:
    """Times every arm once per round, A B C, B C A, C A B, ..., so that a slow minute hits all of them alike.

    Before its timed call an arm rests (seconds; worker threads of the arm before it may still be spinning) and makes
    `lead` calls that are not timed (its weights and code were pushed out of the processor's caches by the others).
    Whatever an arm raises ends the run.
    """
    names = list(arms)
    taken: dict[str, list[int]] = {name: [] for name in names}
    progress(stage, 0.0)
    for name in names:
        for _ in range(warmup):
            arms[name]()
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            call = arms[name]
            if rest:
                sleep(rest)
            for _ in range(lead):
                call()
            started = clock()
            call()
            taken[name].append(clock() - started)
        progress(stage, (number + 1) / rounds)
    return {name: Samples(tuple(times)) for name, times in taken.items()}


def ratio_interval(a: Samples, b: Samples, seed: int = 0) -> Ratio:
    """How many times as fast b is as a: the ratio of their medians with its bootstrap interval.

    Both come from the same rounds, so rounds are what is drawn again: a slow minute leaves or stays for both at once.
    """
    times = np.array([a.nanoseconds, b.nanoseconds], dtype=np.float64)  # [2, rounds]
    rounds = times.shape[1]
    drawn = np.random.default_rng(seed).integers(0, rounds, (RESAMPLES, rounds))
    medians = np.median(times[:, drawn], axis=2)  # [2, RESAMPLES]
    tail = 100 * (1 - COVERAGE) / 2
    low, high = np.percentile(medians[0] / medians[1], (tail, 100 - tail))
    return Ratio(a.median / b.median, float(low), float(high), rounds)

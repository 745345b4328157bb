"""An open-loop client with Poisson arrivals: a request is sent when it is due, independent of earlier ones.

Time is the CPU time of this process, decode and clients together, so that other work on the machine does not count: on
an idle machine it equals wall-clock time, with one thread. With more threads it is wall-clock time: measure on an idle
machine. When idle, the clock jumps to the next arrival.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from .arms import Arm, Tokens

POLL = 0.0005  # seconds between two reads of the clock


CLOCKS = {"cpu": time.process_time, "wall": time.monotonic}


class Clock:
    def __init__(self, kind: str) -> None:
        self.time = CLOCKS[kind]
        self.skipped = -self.time()

    def now(self) -> float:
        return self.time() + self.skipped

    def skip_to(self, when: float) -> None:
        self.skipped += max(0.0, when - self.now())


@dataclass(frozen=True)
class Measured:
    """One run: when each request was due, when it was done, and its tokens."""

    rate: float  # requests a second that were sent; inf: all at once
    due: np.ndarray
    done: np.ndarray
    tokens: tuple[Tokens, ...]

    @property
    def latency(self) -> np.ndarray:
        return self.done - self.due

    @property
    def throughput(self) -> float:
        """Requests a second."""
        return len(self.due) / float(self.done.max() - self.due.min())

    def percentile(self, percent: float) -> float:
        return float(np.percentile(self.latency, percent))


def poisson_arrivals(rate: float, count: int, seed: int) -> np.ndarray:
    if np.isinf(rate):
        return np.zeros(count)
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))


def measured_load(
    arm: Arm, sources: Sequence[Sequence[int]], rate: float, seed: int = 0, clock_of: str = "cpu"
) -> Measured:
    due = poisson_arrivals(rate, len(sources), seed)
    done = np.zeros(len(sources))
    tokens: list[Tokens] = [()] * len(sources)
    left, all_done = [len(sources)], threading.Event()
    clock, lock = Clock(clock_of), threading.Lock()

    def finished(number: int, found: Tokens) -> None:
        done[number], tokens[number] = clock.now(), found
        with lock:
            left[0] -= 1
            if not left[0]:
                all_done.set()

    for number, (source, when) in enumerate(zip(sources, due.tolist(), strict=True)):
        while clock.now() < when:
            if left[0] == len(sources) - number:  # nothing is being decoded
                clock.skip_to(when)
            else:
                time.sleep(POLL)
        arm.ask(source, partial(finished, number))
    all_done.wait()
    return Measured(rate, due, done, tuple(tokens))

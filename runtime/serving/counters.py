"""Counters of a scheduler: requests by outcome, tokens, rows, and times."""

from __future__ import annotations

import bisect
import threading
from dataclasses import dataclass, field

OUTCOMES = ("done", "refused", "busy", "deadline", "cancelled", "failed")
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # upper ends of the buckets


@dataclass
class Histogram:
    """Counts of seconds by bucket; the last bucket has no end."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(SECONDS, seconds)] += 1
        self.total += seconds


@dataclass
class Counters:
    """Sums since the start. Several threads count, so that all of it goes through `count` and `add`."""

    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    tokens: int = 0  # of the best hypotheses
    steps: int = 0  # decoder steps
    rows: int = 0  # of all steps, those in use
    stepped_rows: int = 0  # of all steps, free ones included
    waited: Histogram = field(default_factory=Histogram)  # until a row was free
    first_token: Histogram = field(default_factory=Histogram)
    latency: Histogram = field(default_factory=Histogram)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count(self, outcome: str, number: int = 1) -> None:
        with self.lock:
            self.requests[outcome] += number

    def step(self, used: int, size: int) -> None:
        with self.lock:
            self.steps += 1
            self.rows += used
            self.stepped_rows += size

    def done(self, tokens: int, waited: float, first: float, latency: float) -> None:
        with self.lock:
            self.requests["done"] += 1
            self.tokens += tokens
            self.waited.add(waited)
            self.first_token.add(first)
            self.latency.add(latency)

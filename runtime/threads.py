"""How many threads and workers a decode has on this machine."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from seq2engine.model.config import ModelConfig

CGROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # "200000 100000" is two cores, "max 100000" no limit
THREAD_WORK = 500_000  # multiplications per row for which a further thread pays
WORKER_WORK = 64_000_000  # multiplications per step from which on Python's lock does not slow workers down

Opened = TypeVar("Opened")
First = TypeVar("First")
Second = TypeVar("Second")


def both(first: Callable[[], First], second: Callable[[], Second]) -> tuple[First, Second]:
    """The results of two calls at the same time, for work that is mostly done outside of Python."""
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(second)
        return first(), later.result()


def usable_cores() -> int:
    """The cores this process may use, which in a container are fewer than the machine has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CGROUP_LIMIT.read_text().split()
    except (OSError, ValueError):  # no such limits here
        return cores
    return cores if quota == "max" else max(1, min(cores, -(-int(quota) // int(period))))


def row_work(config: ModelConfig) -> int:
    """Multiplications of a decoder step for one row: its weights, without attention, which grows with the output."""
    attention, feed_forward = 6 * config.d_model**2, 2 * config.d_model * config.d_ff
    return config.decoder_layers * (attention + feed_forward) + config.d_model * config.target_vocab


def sensible_threads(config: ModelConfig) -> int:
    """How many threads to decode with: the matmuls of a small model end before many threads have started."""
    return min(usable_cores(), max(2, row_work(config) // THREAD_WORK))


def rows_per_worker(config: ModelConfig, least: int) -> int:
    """Rows from which on a worker pays: `least` for a large model, more for a small one.

    Workers share Python's lock, which the loop around a small model's step holds most of the time.
    """
    return max(least, -(-WORKER_WORK // row_work(config)))


class Workers(Generic[Opened]):
    """Parallel decodes of one batch: `count` of them run the same single-threaded session, which is opened when a batch
    first has `least_rows` rows. One is enough for all: every decode has its own state."""

    def __init__(self, count: int, least_rows: int, open_session: Callable[[], Opened]):
        self.count, self.least_rows, self.open_session = count, least_rows, open_session
        self.opened: list[Opened] = []

    def for_batch(self, sources: int, rows: int) -> tuple[Opened, ...]:
        """A session for each worker; none where the batch is better decoded in one piece."""
        if sources < self.count or rows < self.least_rows:
            return ()
        if not self.opened:
            self.opened.append(self.open_session())
        return (self.opened[0],) * self.count


class EncoderLock:
    """A lock for workers that share an encoder: none continues before all waiting ones have used it.

    A worker that continued would decode on a core that the encoder's threads use for the next.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition()
        self.waiting = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        with self.changed:
            self.waiting += 1
        try:
            with self.lock:
                yield
        finally:
            with self.changed:
                self.waiting -= 1
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.waiting == 0)

"""How many threads and workers a decode should have on this machine."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from seq2engine.model.config import ModelConfig

CGROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # "200000 100000" is two cores, "max 100000" no limit


THREAD_WORK = 500_000  # products of a row that a thread should have, or waiting for it takes longer than it saves


LANE_WORK = 64_000_000  # products of a step, from which on the loop around it is no longer what lanes wait for


def usable_cores() -> int:
    """The cores this process may use, which in a container are fewer than the machine has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CGROUP_LIMIT.read_text().split()
    except (OSError, ValueError):  # no such limits here
        return cores
    return cores if quota == "max" else max(1, min(cores, -(-int(quota) // int(period))))


def row_work(config: ModelConfig) -> int:
    """Products of a decoder step for one row: its weights, without attention, which grows with the output."""
    attention, feeding = 6 * config.d_model**2, 2 * config.d_model * config.d_ff
    return config.decoder_layers * (attention + feeding) + config.d_model * config.target_vocab


def sensible_threads(config: ModelConfig) -> int:
    """How many threads to decode with: small models are done before many threads have begun."""
    return min(usable_cores(), max(2, row_work(config) // THREAD_WORK))


def rows_for_a_lane(config: ModelConfig, least: int) -> int:
    """Rows from which on a lane pays: `least` of a large model, more of a small one.

    Lanes share Python's lock, which the loop around a small model's step holds for most of the time.
    """
    return max(least, -(-LANE_WORK // row_work(config)))


class Turns:
    """Lanes that share an encoder take turns at it, and none goes on before all that are waiting have had theirs.

    One that went on would decode on a core that the encoder's threads are using for the next.
    """

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.changed = threading.Condition()
        self.waiting = 0

    @contextmanager
    def taken(self) -> Iterator[None]:
        with self.changed:
            self.waiting += 1
        try:
            with self.turn:
                yield
        finally:
            with self.changed:
                self.waiting -= 1
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.waiting == 0)

"""Where the time of a decode goes, seen from outside: a session and a tree that look at the clock around their work.

    encoder      session.encode
    step         session.step, which is the graph and the copies into and out of its own buffers
    compaction   gathering living slots, and moving to more of them
    copies       all other moves of caches: reserving, leaving the batch, taking the rows of others
    search       everything else

Nothing of this is in the decode loop itself, so a decode that is not watched pays nothing for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np

from seq2engine.runtime.session import Session, State, StepForm
from seq2engine.runtime.tree_cache import TreeStep

PIECES = ("encoder", "step", "search", "compaction", "copies")


class WatchedSession:
    """A session that keeps count of the nanoseconds spent in it."""

    def __init__(self, session: Session):
        self.session = session
        self.spent = dict.fromkeys(PIECES, 0)
        self.started = time.perf_counter_ns()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    @contextmanager
    def counted(self, piece: str) -> Iterator[None]:
        started = time.perf_counter_ns()
        yield
        self.spent[piece] += time.perf_counter_ns() - started

    def encode(self, source_ids: np.ndarray, source_mask: np.ndarray) -> State:
        with self.counted("encoder"):
            return self.session.encode(source_ids, source_mask)

    def step(self, state: State, *inputs: np.ndarray) -> Any:
        started = time.perf_counter_ns()  # no context manager: what watching costs would be charged to the search
        answer = self.session.step(state, *inputs)
        self.spent["step"] += time.perf_counter_ns() - started
        return answer

    def reserve(self, state: State, slots: int, form: StepForm) -> None:
        with self.counted("copies"):
            self.session.reserve(state, slots, form)

    def replace(self, state: State, *given: Any) -> None:
        with self.counted("copies"):
            self.session.replace(state, *given)

    def select(self, state: State, rows: np.ndarray | None, slots: np.ndarray | None) -> None:
        if rows is None:  # a compaction, which the tree counts as a whole
            self.session.select(state, rows, slots)
        else:
            with self.counted("copies"):
                self.session.select(state, rows, slots)

    def split(self) -> dict[str, int]:
        """Nanoseconds of every piece; what nobody counted since the beginning is the search's."""
        outside = time.perf_counter_ns() - self.started - sum(self.spent.values())
        return {**self.spent, "search": outside}


class WatchedTree(TreeStep):
    """A tree over a watched session."""

    def compact(self, capacity: int, due: np.ndarray | None = None) -> None:
        with cast(WatchedSession, self.session).counted("compaction"):
            super().compact(capacity, due)

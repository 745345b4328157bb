"""Counts decoder steps and rows of each way to serve the same requests, independent of the machine's speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step_output import StepOutput
from seq2engine.runtime.serving.scheduler import Scheduler
from seq2engine.runtime.serving.tickets import Request
from seq2engine.runtime.session import Session, State

from .arms import ARMS, ROWS, WholeBatches


@dataclass(frozen=True)
class StepCount:
    """Decoder steps, and the rows of all of them together, free ones included."""

    steps: int
    rows: int


def step_counts(
    session: Session, sources: Sequence[Sequence[int]], options: SearchOptions, most: int = ROWS
) -> dict[str, StepCount]:
    """Of all arms with at most so many rows, where all requests are there at the beginning."""
    return {name: counted(session, name, sources, options, most) for name in ARMS}


def counted(
    session: Session, name: str, sources: Sequence[Sequence[int]], options: SearchOptions, most: int
) -> StepCount:
    rows: list[int] = []
    step = session.step

    def counting(state: State, tokens: np.ndarray, *others: Any) -> StepOutput:
        rows.append(len(tokens))
        return step(state, tokens, *others)

    session.step = counting  # type: ignore[method-assign,assignment]
    try:
        decode_all(session, name, sources, options, most)
    finally:
        del session.step  # the class has its own
    return StepCount(len(rows), sum(rows))


def decode_all(
    session: Session, name: str, sources: Sequence[Sequence[int]], options: SearchOptions, rows: int
) -> None:
    """In batches that are full from the first, however quick this process is to ask."""
    arm = ARMS[name](session, options, rows)
    try:
        if isinstance(arm, WholeBatches):
            for first in range(0, len(sources), arm.rows):
                arm.decoded(list(sources[first : first + arm.rows]))
        else:
            with Scheduler(session, rows, queue=len(sources)) as scheduler:
                scheduler.generate(*[Request(source, options) for source in sources])
    finally:
        arm.close()

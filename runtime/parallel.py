"""Parallel decodes: the sources of one batch are divided among workers of one thread each.

Threads that share one matmul synchronise at the end of each of some hundred nodes per step. With enough rows
for all of them, separate decodes are faster. Decodes are batch-invariant up to rounding, so only the time changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from .search.step_output import NotFiniteError
from .session import Session
from .threads import involuntary_switches

Found = TypeVar("Found")


def workers_for(session: Session, sources: int, rows: int) -> tuple[Session, ...]:
    """The sessions that decode this many sources with `rows` rows in all at the same time: workers, or this one."""
    return (session.workers.for_batch(sources, rows) if session.workers is not None else ()) or (session,)


def in_parallel(
    session: Session,
    sources: Sequence[Sequence[int]],
    width: int,
    decode: Callable[[Session, list[int]], Found],
    tokens: Callable[[Found], int],
) -> list[tuple[list[int], Found]]:
    """Calls `decode` with a session and the numbers of its sources: once, or once for each worker at the same time.

    `tokens` counts what was decoded: a batch's time is judged by tokens read and written. Errors name a source by its
    number in the whole batch.
    """
    rows = len(sources) * width
    workers = workers_for(session, len(sources), rows)
    by_length = sorted(range(len(sources)), key=lambda number: len(sources[number]))
    parts = [sorted(by_length[first :: len(workers)]) for first in range(len(workers))]  # short and long ones for each

    def run(worker: Session, part: list[int]) -> Found:
        try:
            return decode(worker, part)
        except NotFiniteError as error:
            raise NotFiniteError(part[error.source]) from error

    if len(workers) == 1:
        started, switches = time.perf_counter(), involuntary_switches()
        found = run(workers[0], parts[0])
        if session.workers is not None:
            seconds, interrupted = time.perf_counter() - started, involuntary_switches() - switches
            work = sum(map(len, sources)) + tokens(found)
            session.workers.note(rows, workers[0] is not session, seconds, work, interrupted)
        return [(parts[0], found)]
    with ThreadPoolExecutor(len(workers)) as pool:
        return list(zip(parts, pool.map(run, workers, parts), strict=True))

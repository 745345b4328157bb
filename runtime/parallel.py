"""Parallel decodes: the sources of one batch are divided among workers of one thread each.

Threads that share one matmul synchronise at the end of each of some hundred nodes per step. With enough rows
for all of them, separate decodes are faster. Decodes are batch-invariant, so only the time changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from .search.step_output import NotFiniteError
from .session import Session

Found = TypeVar("Found")


def workers_for(session: Session, sources: int, rows: int) -> tuple[Session, ...]:
    """The sessions that decode this many sources with `rows` rows in all at the same time: workers, or this one."""
    return (session.workers.for_batch(sources, rows) if session.workers is not None else ()) or (session,)


def in_parallel(
    session: Session,
    sources: Sequence[Sequence[int]],
    width: int,
    decode: Callable[[Session, list[int]], Found],
) -> list[tuple[list[int], Found]]:
    """Calls `decode` with a session and the numbers of its sources: once, or once for each worker at the same time.

    Errors name a source by its number in the whole batch.
    """
    workers = workers_for(session, len(sources), len(sources) * width)
    by_length = sorted(range(len(sources)), key=lambda number: len(sources[number]))
    parts = [sorted(by_length[first :: len(workers)]) for first in range(len(workers))]  # short and long ones for each

    def run(worker: Session, part: list[int]) -> Found:
        try:
            return decode(worker, part)
        except NotFiniteError as error:
            raise NotFiniteError(part[error.source]) from error

    if len(workers) == 1:
        return [(parts[0], run(session, parts[0]))]
    with ThreadPoolExecutor(len(workers)) as pool:
        return list(zip(parts, pool.map(run, workers, parts), strict=True))

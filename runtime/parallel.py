"""Parallel decodes: the sources of one batch are divided among workers of one thread each.

Threads that share one matmul synchronise at the end of each of some hundred nodes per step. With enough rows
for all of them, separate decodes are faster. Decodes are batch-invariant up to rounding, so only the time changes.

A worker gets sources of similar length, few long ones or many short ones: its steps then have all their rows until
they are nearly done. With long and short ones for each, both workers would go on for the few that are longest.
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
STEP_ROWS = 8  # a step takes as long as its rows and this many more; between 4 and 8 it hardly matters (docs/LOG.md)


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
    parts = balanced_parts([len(source) for source in sources], width, len(workers))

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
    with ThreadPoolExecutor(max(1, len(parts) - 1)) as pool:  # this thread is one of them
        others = pool.map(run, workers[1:], parts[1:])
        return list(zip(parts, (run(workers[0], parts[0]), *others), strict=True))


def balanced_parts(lengths: Sequence[int], width: int, count: int) -> list[list[int]]:
    """Numbers of sources of these lengths, `width` beams each -> at most `count` parts, of similar lengths each, of
    which the longest decode is as short as possible.

    How long an output will be is not known; longer sources have longer ones.
    """
    if count == 1:
        return [list(range(len(lengths)))]
    longest_first = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    ordered = [lengths[number] for number in longest_first]
    low, high = 0, part_cost(ordered, width)
    while low < high:  # the least cost of the dearest part
        middle = (low + high) // 2
        if len(ends_within(ordered, width, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    ends = ends_within(ordered, width, high)
    return [sorted(longest_first[first:end]) for first, end in zip([0, *ends], ends, strict=False)]


def part_cost(ordered: Sequence[int], width: int) -> int:
    """What decoding sources of these lengths takes, the longest first: rows, and steps whatever their rows."""
    return STEP_ROWS * ordered[0] + width * sum(ordered)


def ends_within(ordered: Sequence[int], width: int, most: int) -> list[int]:
    """Where parts end, if each takes as many sources as cost no more than that, but one at least."""
    ends, cost = [], 0
    for number, length in enumerate(ordered):
        if number and cost + width * length <= most:
            cost += width * length
        else:
            ends += [number] if number else []
            cost = (STEP_ROWS + width) * length
    return [*ends, len(ordered)]

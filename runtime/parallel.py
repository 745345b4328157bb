"""Several decodes side by side: the sources of one batch dealt out to sessions of one thread each.

Threads that share one product wait for each other at the end of every one of some hundred nodes a step; with rows
enough for all of them, each is better off with a decode of its own. What a source gets does not depend on its
neighbours, so nothing but time changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from .search.step_output import NotFiniteError
from .session import Session

Found = TypeVar("Found")


def in_lanes(
    session: Session,
    sources: Sequence[Sequence[int]],
    width: int,
    decode: Callable[[Session, list[int]], Found],
) -> list[tuple[list[int], Found]]:
    """Calls `decode` with the numbers of some of the sources, once, or once for each lane at the same time.

    An error that names a source names it by its number here.
    """
    lanes = session.lanes(len(sources), len(sources) * width)
    by_length = sorted(range(len(sources)), key=lambda number: len(sources[number]))
    parts = [sorted(by_length[lane :: len(lanes)]) for lane in range(len(lanes))]  # all with short ones and long ones

    def run(lane: Session, part: list[int]) -> Found:
        try:
            return decode(lane, part)
        except NotFiniteError as error:
            raise NotFiniteError(part[error.source]) from error

    if len(lanes) == 1:
        return [(parts[0], run(session, parts[0]))]
    with ThreadPoolExecutor(len(lanes)) as pool:
        return list(zip(parts, pool.map(run, lanes, parts), strict=True))

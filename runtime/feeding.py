"""Continuous feeding: a batch that stays full, since new sources take the rows of those that are done.

    rows    0  1  2  3  4  5  6  7
    step 9  a  a  a  .  a  a  .  a     two of the first eight are done
    step 10 a  a  a  b  a  a  b  a     the next two are encoded together and begin in their rows
    step 17 a  .  a  b  .  .  b  a

Sources that came together are one search, the same as anywhere else; only the decoder step is shared by all. So there
is no second kind of search, and what a source gets does not depend on who else is there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np

from ..errors import RequestError
from .answers import Answer
from .cache import TreeStep, rounded
from .generate import padded, search_over, session_for, start_of
from .leaving import staying_rows
from .search import Hypothesis, SearchOptions
from .session import Session, State, check_request

BATCH = 32
WINDOW = 16  # batches that are looked ahead


def translate_many(
    session: Session,
    sources: Iterable[Sequence[int]],
    options: SearchOptions | None = None,
    batch: int = BATCH,
    window: int = WINDOW,
) -> Iterator[tuple[int, list[Hypothesis]]]:
    """The n-best hypotheses of every source with its number, each the same as if it were decoded alone.

    They come in the order in which they are done, those that began together at once. The longest of the next `window`
    batches begins first: rows of like length need little padding, and the last ones to run are short. With a window of
    0 nothing is taken before there is room for it, and all begin in their order. A source that cannot be decoded is an
    error once it is taken.
    """
    if batch < 1 or window < 0:
        raise RequestError(f"batch {batch} and window {window}, expected at least 1 and 0")
    options = options or SearchOptions(max_length=session.limits.target)
    check_request(session.limits, session.config, [[session.config.pad_id]], options)
    most = batch if session.limits.batch is None else min(batch, session.limits.batch)
    session = session_for(session, options)
    return _fed(session, _Waiting(session, iter(sources), options, window * most), options, most)


def _fed(
    session: Session, waiting: _Waiting, options: SearchOptions, batch: int
) -> Iterator[tuple[int, list[Hypothesis]]]:
    numbers, first = waiting.next(batch)
    if not first:
        return
    rows = _Rows(session, options, first)
    cohorts = [_Cohort(rows, np.arange(len(first)), numbers, first)]
    while cohorts:
        rows.step()
        for cohort in cohorts:
            cohort.advance()
        for cohort in cohorts:
            if cohort.done.all():
                yield from zip(cohort.numbers, cohort.finish(), strict=True)
        cohorts = [cohort for cohort in cohorts if not cohort.done.all()]

        free = np.flatnonzero(rows.free)
        if 8 * len(free) < len(rows.free):  # the same eighth as in `leaving`: calls of the encoder are for several
            continue
        numbers, coming = waiting.next(len(free))
        if coming:
            rows.admit(free[: len(coming)], coming)
            cohorts.append(_Cohort(rows, free[: len(coming)], numbers, coming))
        elif (staying := staying_rows(rows.free)) is not None:
            places = rows.keep(staying)
            for cohort in cohorts:
                cohort.rows = places[cohort.rows]


class _Waiting:
    """The sources that have no room yet."""

    def __init__(self, session: Session, sources: Iterator[Sequence[int]], options: SearchOptions, window: int):
        self.session, self.sources, self.options, self.window = session, sources, options, window
        self.taken = 0
        self.seen: list[tuple[int, list[int]]] = []  # with their numbers

    def next(self, count: int) -> tuple[list[int], list[list[int]]]:
        """The numbers and the tokens of up to `count` sources; fewer only if there are no more."""
        while len(self.seen) < count and (more := self.take(max(self.window, count - len(self.seen)))):
            self.seen += sorted(more, key=lambda pair: -len(pair[1])) if self.window else more
        coming, self.seen = self.seen[:count], self.seen[count:]
        return [number for number, _ in coming], [source for _, source in coming]

    def take(self, count: int) -> list[tuple[int, list[int]]]:
        taken = [list(source) for source in islice(self.sources, count)]
        if taken:
            limits, options = self.session.limits, self.options
            limits = dataclasses.replace(limits, batch=None)  # a window is no batch
            check_request(limits, self.session.config, taken, options, self.taken)
        self.taken += len(taken)
        return list(enumerate(taken, start=self.taken - len(taken)))


class _Rows:
    """The batch as the decoder sees it: one source a row, each at its own step, some of them free."""

    def __init__(self, session: Session, options: SearchOptions, sources: list[list[int]]):
        self.session, self.options = session, options
        batch = len(sources)
        self.lengths = np.array([len(source) for source in sources])
        self.free = np.zeros(batch, dtype=bool)
        self.tokens = np.full((batch, options.width), start_of(session.config, options), dtype=np.int64)
        self.parents = np.tile(np.arange(options.width), (batch, 1))
        self.tree = TreeStep(session, self.encoded(sources), batch, options.width, options.max_length)
        self.answer = Answer(np.zeros(0))

    def encoded(self, sources: list[list[int]]) -> State:
        return self.session.encode(*padded(sources, self.session.config.pad_id))

    def step(self) -> None:
        self.tree.restart(np.flatnonzero(self.free))  # nobody's steps: they need no slots, and have no end
        self.answer = self.tree(self.tokens, self.parents)

    def admit(self, rows: np.ndarray, sources: list[list[int]]) -> None:
        self.lengths[self.free] = 0
        self.lengths[rows] = [len(source) for source in sources]
        width = min(rounded(int(self.lengths.max())), self.session.limits.source)
        self.tree.replace(rows, self.encoded(sources), width)
        self.free[rows] = False
        self.tokens[rows] = start_of(self.session.config, self.options)
        self.parents[rows] = np.arange(self.options.width)

    def keep(self, rows: np.ndarray) -> np.ndarray:
        """Drops all other rows; the new place of every row, 0 for those that are gone."""
        places = np.zeros(len(self.free), dtype=np.int64)
        places[rows] = np.arange(len(rows))
        self.tree.keep(rows)
        self.lengths, self.free = self.lengths[rows], self.free[rows]
        self.tokens, self.parents = self.tokens[rows], self.parents[rows]
        return places


class _Cohort:
    """Sources that began together: a search, and its `Step`, which reads answers off the batch's latest step.

    A search says with every step what it will ask for next, which is why the batch can be asked first.
    """

    def __init__(self, batch: _Rows, rows: np.ndarray, numbers: list[int], sources: list[list[int]]):
        self.batch, self.numbers = batch, numbers
        self.rows = rows  # of the sources that are still in the search; those that are done read some other's row
        self.done = np.zeros(len(rows), dtype=bool)
        self.search = search_over(self, sources, batch.session.config, batch.options)

    def __call__(self, tokens: np.ndarray, parents: np.ndarray) -> Answer:
        going = self.rows[~self.done]
        assert np.array_equal(self.batch.tokens[going], tokens[~self.done]), "a search asks for what it said it would"
        return self.batch.answer.of(self.rows)

    def keep(self, rows: np.ndarray) -> None:
        self.rows, self.done = self.rows[rows], self.done[rows]

    def advance(self) -> None:
        """One step of the search; what it wants next, and who is done, is passed on to the batch."""
        emitted = next(self.search)
        self.batch.free[self.rows[emitted.done & ~self.done]] = True
        self.done = emitted.done
        going = self.rows[~self.done]
        self.batch.tokens[going] = emitted.tokens[~self.done]
        self.batch.parents[going] = emitted.parents[~self.done]

    def finish(self) -> list[list[Hypothesis]]:
        """All are done: what they found."""
        try:
            next(self.search)
        except StopIteration as finished:
            return finished.value
        raise AssertionError("a search goes on although all its sources are done")

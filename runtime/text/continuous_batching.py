"""Continuous feeding: a batch that stays full, since new sources take the rows of those that are done.

    rows    0  1  2  3  4  5  6  7
    step 9  a  a  a  .  a  a  .  a     two of the first eight are done
    step 10 a  a  a  b  a  a  b  a     the next two are encoded and begin in their rows
    step 17 a  .  a  b  .  .  b  a

Sources that came together are one search, the same as anywhere else; only the decoder step is shared by all. So there
is no second kind of search, and what a source gets does not depend on who else is there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from seq2engine.errors import RequestError

from ..generate import form_from_options, padded, search_over, start_of
from ..model_options import options_from_session
from ..requests import check_request
from ..search.options import SearchOptions
from ..search.step import Emitted, Hypothesis, drain, staying_rows
from ..search.step_output import Answer
from ..session import Session, State
from ..tree_cache import TreeStep, rounded

BATCH = 32
WINDOW = 16  # batches that are looked ahead
CALL = 32  # tokens in whose time a call of the encoder reads its weights


def translate_many(
    session: Session,
    sources: Iterable[Sequence[int]],
    options: SearchOptions | None = None,
    batch: int = BATCH,
    window: int = WINDOW,
    prefixes: Iterable[Sequence[int]] | None = None,
) -> Iterator[tuple[int, list[Hypothesis]]]:
    """The n-best hypotheses of every source with its number, each the same as if it were decoded alone.

    They come in the order in which they are done, those that began together at once. The longest of the next `window`
    batches begins first: rows of like length need little padding, and the last ones to run are short. With a window of
    0 nothing is taken before there is room for it, and all begin in their order. A source that cannot be decoded is an
    error once it is taken. `prefixes` are what the output of each begins with, as in `generate`.
    """
    if batch < 1 or window < 0:
        raise RequestError(f"batch {batch} and window {window}, expected at least 1 and 0")
    options = options or options_from_session(session)
    check_request(session.limits, session.config, [[session.config.pad_id]], options)
    most = batch if session.limits.batch is None else min(batch, session.limits.batch)
    given = None if prefixes is None else iter(prefixes)
    return _fed(session, _Waiting(session, iter(sources), given, options, window * most), options, most)


def _fed(
    session: Session, waiting: _Waiting, options: SearchOptions, batch: int
) -> Iterator[tuple[int, list[Hypothesis]]]:
    first = waiting.next(batch)
    if not first:
        return
    rows = _Rows(session, options, first)
    cohorts = [_Cohort(rows, np.arange(len(first)), first)]
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
        coming = waiting.next(len(free))
        if coming:
            rows.admit(free[: len(coming)], coming)
            cohorts.append(_Cohort(rows, free[: len(coming)], coming))
        elif (staying := staying_rows(rows.free)) is not None:
            places = rows.keep(staying)
            for cohort in cohorts:
                cohort.rows = places[cohort.rows]


@dataclass(frozen=True)
class _Source:
    """One of many: its number, its tokens and what its output begins with (None: nothing of its own)."""

    number: int
    tokens: list[int]
    prefix: list[int] | None


class _Waiting:
    """The sources that have no room yet."""

    def __init__(
        self,
        session: Session,
        sources: Iterator[Sequence[int]],
        prefixes: Iterator[Sequence[int]] | None,
        options: SearchOptions,
        window: int,
    ):
        self.session, self.sources, self.prefixes = session, sources, prefixes
        self.options, self.window = options, window
        self.taken = 0
        self.seen: list[_Source] = []

    def next(self, count: int) -> list[_Source]:
        """Up to `count` sources; fewer only if there are no more."""
        while len(self.seen) < count and (more := self.take(max(self.window, count - len(self.seen)))):
            self.seen += sorted(more, key=lambda source: -len(source.tokens)) if self.window else more
        coming, self.seen = self.seen[:count], self.seen[count:]
        return coming

    def take(self, count: int) -> list[_Source]:
        taken = [list(source) for source in islice(self.sources, count)]
        prefixes = None if self.prefixes is None else [list(one) for one in islice(self.prefixes, len(taken))]
        if taken:
            limits, options = self.session.limits, self.options
            limits = dataclasses.replace(limits, batch=None)  # a window is no batch
            check_request(limits, self.session.config, taken, options, self.taken, prefixes)
        self.taken += len(taken)
        first = self.taken - len(taken)
        own = [None] * len(taken) if prefixes is None else prefixes
        return [_Source(first + i, tokens, prefix) for i, (tokens, prefix) in enumerate(zip(taken, own, strict=True))]


class _Rows:
    """The batch as the decoder sees it: one source a row, each at its own step, some of them free."""

    def __init__(self, session: Session, options: SearchOptions, sources: list[_Source]):
        self.session, self.options = session, options
        batch = len(sources)
        self.lengths = np.array([len(source.tokens) for source in sources])
        self.free = np.zeros(batch, dtype=bool)
        self.tokens = np.full((batch, options.width), start_of(session.config, options), dtype=np.int64)
        self.parents = np.tile(np.arange(options.width), (batch, 1))
        state, form = self.first_state(sources), form_from_options(options, session.config)
        self.tree = TreeStep(session, state, batch, options.width, options.max_length, form)
        self.answer = Answer(np.zeros(0))

    def first_state(self, sources: list[_Source]) -> State:
        """One state of sources that were not encoded all at once."""
        (places, state), *others = self.encoded(sources)
        rows = np.zeros(len(sources), dtype=np.int64)
        rows[places] = np.arange(len(places))
        self.session.select(state, rows, None)
        for places, more in others:
            self.session.replace(state, places, more, int(self.lengths.max()))
        return state

    def encoded(self, sources: list[_Source]) -> Iterator[tuple[np.ndarray, State]]:
        """States of sources of like length with their places, the longest first."""
        for places in like_lengths([len(source.tokens) for source in sources]):
            group = [sources[place].tokens for place in places]
            yield np.array(places), self.session.encode(*padded(group, self.session.config.pad_id))

    def step(self) -> None:
        self.tree.restart(np.flatnonzero(self.free))  # nobody's steps: they need no slots, and have no end
        self.answer = self.tree(self.tokens, self.parents)

    def admit(self, rows: np.ndarray, sources: list[_Source]) -> None:
        self.lengths[self.free] = 0
        self.lengths[rows] = [len(source.tokens) for source in sources]
        width = min(rounded(int(self.lengths.max())), self.session.limits.source)
        for places, state in self.encoded(sources):
            self.tree.replace(rows[places], state, width)
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

    def __init__(self, batch: _Rows, rows: np.ndarray, sources: list[_Source]):
        self.batch, self.numbers = batch, [source.number for source in sources]
        self.rows = rows  # of the sources that are still in the search; those that are done read some other's row
        self.done = np.zeros(len(rows), dtype=bool)
        prefixes = [source.prefix for source in sources if source.prefix is not None]
        texts = [source.tokens for source in sources]
        self.search = search_over(self, texts, batch.session.config, batch.options, prefixes)

    def __call__(self, tokens: np.ndarray, parents: np.ndarray) -> Answer:
        going = self.rows[~self.done]
        assert np.array_equal(self.batch.tokens[going], tokens[~self.done]), "a search asks for what it said it would"
        return self.batch.answer.of(self.rows)

    def attention(self) -> np.ndarray:
        return self.batch.tree.attention()[self.rows]

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

        def goes_on(emitted: Emitted) -> None:
            raise AssertionError("a search goes on although all its sources are done")

        return drain(self.search, goes_on)


def like_lengths(lengths: Sequence[int], call: int = CALL) -> list[list[int]]:
    """Places in groups, the longest first, such that all groups padded, and a call for each, take the fewest tokens."""
    places = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    least = [0]  # tokens for the first n places
    starts = []  # where the last group of the first n begins
    for end in range(1, len(places) + 1):
        tokens = [least[start] + call + (end - start) * lengths[places[start]] for start in range(end)]
        least.append(min(tokens))
        starts.append(tokens.index(least[-1]))
    groups = []
    while places:
        start = starts[len(places) - 1]
        groups.append(places[start:])
        places = places[:start]
    return groups[::-1]

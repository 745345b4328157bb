"""Continuous batching: new sources take the rows of those that are done, so the batch stays full.

    rows    0  1  2  3  4  5  6  7
    step 9  a  a  a  .  a  a  .  a     two of the first eight are done
    step 10 a  a  a  b  a  a  b  a     the next two are encoded and begin in their rows
    step 17 a  .  a  b  .  .  b  a

Sources that begin together are one search, the same search as anywhere else; only the decoder step is shared by all. So
there is no second kind of search, and the output of a source does not depend on its neighbours. Where a session
decodes a large batch with several workers, each worker has its own batch, and all take from the same sources.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import numpy as np

from seq2engine.errors import RequestError

from ..generate import form_from_options, padded, search_over, start_of
from ..model_options import options_from_session
from ..parallel import workers_for
from ..requests import check_request
from ..search.options import SearchOptions
from ..search.step import Emitted, Hypothesis, drain, staying_rows
from ..search.step_output import NotFiniteError, StepOutput
from ..session import Session, State
from ..threads import WORKER_WORK, row_work
from ..tree_cache import TreeStep, rounded
from .batching import BATCH, batches_by_length, groups_by_padding

WINDOW = 16  # batches that are looked ahead
WAKE = 0.05  # seconds between checks of workers that must stop

Decoded = tuple[int, list[Hypothesis]]  # the number of a source, and its hypotheses


def worth_it(session: Session, sources: int, rows: int, width: int) -> bool:
    """Whether continuous batching is at least as fast as batches by length, which both drop finished sources.

    What a full batch saves is the part of a step that does not grow with its rows: reading the weights. So it pays

    - only with more sources than rows, because otherwise no row gets a new source;
    - only where a step does more work than the loop around it: every group of sources that began together is a search
      of its own in each step;
    - on a CPU not with beams, which multiply the rows of a step until its weights are the smaller part of it. A GPU is
      not busy with so few rows.
    """
    waits_for_weights = width == 1 or session.backend == "tensorrt"
    return sources > rows and waits_for_weights and rows * width * row_work(session.config) >= WORKER_WORK


def first_then_longest(lengths: Sequence[int], rows: int) -> list[int]:
    """The order in which sources should begin: those that share a batch with the first one, then the longest.

    So the first output comes early, rows next to each other in time need little padding, and the last to run are short.
    """
    batches = batches_by_length(lengths, rows)
    first = next((batch for batch in batches if 0 in batch), [])
    return [*first, *(place for batch in reversed(batches) if batch is not first for place in reversed(batch))]


def translate_many(
    session: Session,
    sources: Iterable[Sequence[int]],
    options: SearchOptions | None = None,
    batch: int = BATCH,
    window: int = WINDOW,
    prefixes: Iterable[Sequence[int]] | None = None,
) -> Iterator[tuple[int, list[Hypothesis]]]:
    """The n-best hypotheses of every source with its number, each the same as if it were decoded alone.

    They come as they are done; sources that began together come together. The longest of the next `window` batches
    begins first: rows of like length need little padding, and the last ones to run are short. With a window of 0
    nothing is taken before there is room for it, and all begin in their order. A source that cannot be decoded raises a
    RequestError when it is taken. `prefixes` are the beginnings of each output, as in `generate`.
    """
    if batch < 1 or window < 0:
        raise RequestError(f"batch {batch} and window {window}, expected at least 1 and 0")
    options = options or options_from_session(session)
    check_request(session.limits, session.config, [[session.config.pad_id]], options)
    most = batch if session.limits.batch is None else min(batch, session.limits.batch)
    given = None if prefixes is None else iter(prefixes)
    return _decoded(session, _Waiting(session, iter(sources), given, options, window * most), options, most)


def _decoded(session: Session, waiting: _Waiting, options: SearchOptions, most: int) -> Iterator[Decoded]:
    """By one worker, or by as many as the session has for the first batch."""
    first = waiting.next(most)
    if not first:
        return
    workers = workers_for(session, len(first), len(first) * options.width)
    if len(workers) == 1:
        yield from _batch_kept_full(session, waiting, options, first)
    else:
        shares = [first[worker :: len(workers)] for worker in range(len(workers))]  # all get short and long sources
        batches = [
            _batch_kept_full(worker, waiting, options, share) for worker, share in zip(workers, shares, strict=True)
        ]
        yield from _in_parallel(batches, most)


def _in_parallel(batches: Sequence[Iterator[Decoded]], ahead: int) -> Iterator[Decoded]:
    """What all of these yield, each in a thread of its own, at most about `ahead` results before they are asked for.

    The first error ends all of them and is raised here.
    """
    found: queue.Queue[Decoded | Exception | None] = queue.Queue(ahead)  # None: a thread has ended
    stop = threading.Event()

    def work(batch: Iterator[Decoded]) -> None:
        try:
            for one in batch:
                if stop.is_set():
                    return
                found.put(one)
        except Exception as error:  # raised where the results are read
            found.put(error)
        finally:
            found.put(None)

    threads = [threading.Thread(target=work, args=(batch,), name="decode") for batch in batches]
    for thread in threads:
        thread.start()
    try:
        running = len(threads)
        while running:
            one = found.get()
            if isinstance(one, Exception):
                raise one
            if one is None:
                running -= 1
            else:
                yield one
    finally:
        stop.set()
        for thread in threads:
            while thread.is_alive():  # it may wait for room
                with suppress(queue.Empty):
                    found.get(timeout=WAKE)
            thread.join()


def _batch_kept_full(
    session: Session, waiting: _Waiting, options: SearchOptions, first: list[_Source]
) -> Iterator[Decoded]:
    """Decodes `first` in as many rows, and in rows that get free what waits."""
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
        if 8 * len(free) < len(rows.free):  # the same eighth as in `staying_rows`: calls of the encoder are for several
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
    """One of many: its number, its tokens and the beginning of its output (None: nothing of its own)."""

    number: int
    tokens: list[int]
    prefix: list[int] | None


class _Waiting:
    """The sources that have no row yet. Several workers may take from it at the same time."""

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
        self.lock = threading.Lock()

    def next(self, count: int) -> list[_Source]:
        """Up to `count` sources; fewer only if there are no more."""
        with self.lock:
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
        self.answer = StepOutput(np.zeros(0))

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
        for places in groups_by_padding([len(source.tokens) for source in sources]):
            group = [sources[place].tokens for place in places]
            yield np.array(places), self.session.encode(*padded(group, self.session.config.pad_id))

    def step(self) -> None:
        self.tree.restart(np.flatnonzero(self.free))  # free rows are stepped as well: this keeps them out of slots
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
    """Sources that began together: a search, and its `Step`, which reads its rows of the batch's latest step.

    A search emits with every step the tokens it will ask for next, so the whole batch can be stepped before.
    """

    def __init__(self, batch: _Rows, rows: np.ndarray, sources: list[_Source]):
        self.batch, self.numbers = batch, [source.number for source in sources]
        self.rows = rows  # of the sources that are still in the search; those that are done read some other's row
        self.done = np.zeros(len(rows), dtype=bool)
        prefixes = [source.prefix for source in sources if source.prefix is not None]
        texts = [source.tokens for source in sources]
        self.search = search_over(self, texts, batch.session.config, batch.options, prefixes)

    def __call__(self, tokens: np.ndarray, parents: np.ndarray) -> StepOutput:
        going = self.rows[~self.done]
        assert np.array_equal(self.batch.tokens[going], tokens[~self.done]), "a search asks for what it emitted"
        return self.batch.answer.of(self.rows)

    def attention(self) -> np.ndarray:
        return self.batch.tree.attention()[self.rows]

    def keep(self, rows: np.ndarray) -> None:
        self.rows, self.done = self.rows[rows], self.done[rows]

    def advance(self) -> None:
        """One step of the search; the tokens it asks for next, and the sources that are done, go to the batch."""
        try:
            emitted = next(self.search)
        except NotFiniteError as error:
            raise NotFiniteError(self.numbers[error.source]) from error
        self.batch.free[self.rows[emitted.done & ~self.done]] = True
        self.done = emitted.done
        going = self.rows[~self.done]
        self.batch.tokens[going] = emitted.tokens[~self.done]
        self.batch.parents[going] = emitted.parents[~self.done]

    def finish(self) -> list[list[Hypothesis]]:
        """The hypotheses of all sources, once all are done."""

        def goes_on(emitted: Emitted) -> None:
            raise AssertionError("a search goes on although all its sources are done")

        return drain(self.search, goes_on)

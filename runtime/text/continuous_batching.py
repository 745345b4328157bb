"""Continuous batching of many sources: new ones take the rows of those that are done (running_batch.py).

Where a session decodes a large batch with several workers, each worker has its own batch, and all take from the same
sources.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice

from seq2engine.errors import RequestError

from ..encoder_inputs import listed_sources
from ..model_options import options_from_session
from ..parallel import workers_for
from ..requests import check_options, check_request
from ..search.options import SearchOptions
from ..search.step import Hypothesis
from ..session import Session
from ..threads import WORKER_WORK, row_work
from .batching import BATCH, batches_by_length
from .running_batch import Decoded, RunningBatch, Source, batch_form

WINDOW = 16  # batches of look-ahead
WAKE = 0.05  # seconds between checks of workers that must stop


def worth_it(session: Session, sources: int, rows: int, width: int, ahead: bool = False) -> bool:
    """Whether continuous batching is at least as fast as batches by length, which both drop finished sources.

    A full batch saves the cost of a step that does not grow with its rows: reading the weights. So it pays

    - only with more sources than rows, because otherwise no row gets a new source;
    - only where a step does more work than the loop around it: every group of sources that began together is a search
      of its own in each step;
    - on a CPU not with beams, which multiply the rows of a step until its weights are the smaller part of it. A GPU is
      not busy with so few rows;
    - not where a batch is decoded in a few calls of many steps (`ahead`): they leave finished sources out at once and
      have no loop around them, which gains more.
    """
    if ahead:
        return False
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
    prompts: Iterable[Sequence[int]] | None = None,
) -> Iterator[tuple[int, list[Hypothesis]]]:
    """The n-best hypotheses of every source with its number, each the same as if it were decoded alone.

    They come as they are done. The longest of the next `window` batches
    begins first: rows of like length need little padding, and the last ones to run are short. With a window of 0
    nothing is taken before there is room for it, and all begin in their order. A source that cannot be decoded raises a
    RequestError when it is taken. `prefixes` and `prompts` of each are as in `generate`.
    """
    if batch < 1 or window < 0:
        raise RequestError(f"batch {batch} and window {window}, expected at least 1 and 0")
    options = options or options_from_session(session)
    check_options(session.limits, session.config, options)
    most = batch if session.limits.batch is None else min(batch, session.limits.batch)
    beginnings, fed = (None if given is None else iter(given) for given in (prefixes, prompts))
    waiting = _Waiting(session, iter(sources), beginnings, fed, options, window * most)
    return _decoded(session, waiting, options, most)


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
    """The results of all of these, each run in its own thread, at most about `ahead` results ahead of the reader.

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
    session: Session, waiting: _Waiting, options: SearchOptions, first: list[Source]
) -> Iterator[Decoded]:
    """Decodes `first` in as many rows, and the waiting sources in rows that become free."""
    batch = RunningBatch(session, batch_form(session, first[0]), options.max_length)
    batch.admit(first)
    while batch.cohorts:
        advance = batch.step()
        for _, error in advance.failed:
            raise error
        yield from advance.done
        if not batch.settled:
            continue
        free = batch.size - batch.used
        if 8 * free < batch.size:  # the same eighth as in `staying_rows`: calls of the encoder are for several
            continue
        if coming := waiting.next(free):
            batch.admit(coming)
        else:
            batch.shrink()


class _Waiting:
    """The sources that have no row yet; thread-safe for several workers."""

    def __init__(
        self,
        session: Session,
        sources: Iterator[Sequence[int]],
        prefixes: Iterator[Sequence[int]] | None,
        prompts: Iterator[Sequence[int]] | None,
        options: SearchOptions,
        window: int,
    ):
        self.session, self.sources, self.prefixes, self.prompts = session, sources, prefixes, prompts
        self.options, self.window = options, window
        self.taken = 0
        self.seen: list[Source] = []
        self.lock = threading.Lock()

    def next(self, count: int) -> list[Source]:
        """Up to `count` sources; fewer only if there are no more."""
        with self.lock:
            while len(self.seen) < count and (more := self.take(max(self.window, count - len(self.seen)))):
                self.seen += sorted(more, key=lambda source: -len(source.tokens)) if self.window else more
            coming, self.seen = self.seen[:count], self.seen[count:]
            return coming

    def take(self, count: int) -> list[Source]:
        taken = listed_sources(list(islice(self.sources, count)), self.session.config)
        prefixes, prompts = (
            None if given is None else [list(one) for one in islice(given, len(taken))]
            for given in (self.prefixes, self.prompts)
        )
        options = self.options
        if taken:
            limits = self.session.limits
            limits = dataclasses.replace(limits, batch=None)  # a window may be larger than a batch
            check_request(limits, self.session.config, taken, options, self.taken, prefixes, prompts)
        self.taken += len(taken)
        first = self.taken - len(taken)
        own = [[None] * len(taken) if given is None else given for given in (prefixes, prompts)]
        return [
            Source(first + i, tokens, options, *parts)
            for i, (tokens, *parts) in enumerate(zip(taken, *own, strict=True))
        ]

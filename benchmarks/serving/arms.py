"""Ways to serve requests: one at a time, whole batches of waiting requests, and continuous batching."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from seq2engine.runtime.encoder_inputs import encoder_inputs
from seq2engine.runtime.generate import form_from_options, generate, search_over
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step import Hypothesis, drain
from seq2engine.runtime.search.step_output import StepOutput
from seq2engine.runtime.serving.scheduler import Scheduler
from seq2engine.runtime.serving.tickets import Request
from seq2engine.runtime.session import Session
from seq2engine.runtime.steps.tree_cache import TreeStep

ROWS = 32
Tokens = tuple[int, ...]
OnDone = Callable[[Tokens], None]


class Arm(Protocol):
    """A server under test; `done` is called with the tokens of a request, in any thread."""

    def ask(self, source: Sequence[int], done: OnDone) -> None: ...

    def close(self) -> None: ...


def decoded_whole(session: Session, sources: Sequence[Sequence[int]], options: SearchOptions) -> list[list[Hypothesis]]:
    return generate(session, sources, options)


def decoded_with_kept_rows(
    session: Session, sources: Sequence[Sequence[int]], options: SearchOptions
) -> list[list[Hypothesis]]:
    """Every step is of all sources, whoever is done."""
    state = session.encode(*encoder_inputs(sources, session.config))
    form = form_from_options(options, session.config)
    tree = TreeStep(session, state, len(sources), options.width, options.max_length, form, alike=True)
    return drain(search_over(_AllRows(tree, len(sources)), sources, session.config, options))


class WholeBatches:
    """Like a server's dynamic batcher: takes waiting requests, at most `rows`, and decodes them to the end.

    Sources that are done leave the batch, as in any decode of ours, but are answered with the last of it, and nothing
    joins meanwhile. With one row it is one request at a time.
    """

    def __init__(self, session: Session, options: SearchOptions, rows: int = ROWS):
        self.session, self.options, self.rows = session, options, rows
        self.waiting: queue.Queue[tuple[Sequence[int], OnDone] | None] = queue.Queue()
        self.thread = threading.Thread(target=self.work, name="whole batches")
        self.thread.start()

    def ask(self, source: Sequence[int], done: OnDone) -> None:
        self.waiting.put((source, done))

    def close(self) -> None:
        self.waiting.put(None)
        self.thread.join()

    def work(self) -> None:
        ending = False
        while not ending:
            batch: list[tuple[Sequence[int], OnDone]] = []
            while len(batch) < self.rows and (not batch or not self.waiting.empty()):
                one = self.waiting.get()
                if one is None:
                    ending = True
                    break
                batch.append(one)
            if batch:
                found = self.decoded([source for source, _ in batch])
                for (_, done), nbest in zip(batch, found, strict=True):
                    done(nbest[0].tokens)

    def decoded(self, sources: list[Sequence[int]]) -> list[list[Hypothesis]]:
        return decoded_whole(self.session, sources, self.options)


class KeptRows(WholeBatches):
    """The same for models whose finished sources stay in the batch until it ends, as those of most libraries do."""

    def decoded(self, sources: list[Sequence[int]]) -> list[list[Hypothesis]]:
        return decoded_with_kept_rows(self.session, sources, self.options)


class _AllRows:
    """A step of all rows of a batch, finished ones included."""

    def __init__(self, tree: TreeStep, batch: int):
        self.tree, self.rows = tree, np.arange(batch)
        self.tokens = np.zeros((batch, tree.beams), dtype=np.int64)
        self.parents = np.zeros((batch, tree.beams), dtype=np.int64)

    def __call__(self, tokens: np.ndarray, parents: np.ndarray) -> StepOutput:
        self.tokens[self.rows], self.parents[self.rows] = tokens, parents
        return self.tree(self.tokens, self.parents).of(self.rows)

    def attention(self) -> np.ndarray:
        return self.tree.attention()[self.rows]

    def keep(self, rows: np.ndarray) -> None:
        self.rows = self.rows[rows]


class OneByOne(WholeBatches):
    def __init__(self, session: Session, options: SearchOptions, rows: int = 1):
        super().__init__(session, options, rows=1)


class Continuous:
    """The scheduler."""

    def __init__(self, session: Session, options: SearchOptions, rows: int = ROWS):
        self.options = options
        self.scheduler = Scheduler(session, rows, queue=1 << 20)

    def ask(self, source: Sequence[int], done: OnDone) -> None:
        (ticket,) = self.scheduler.submit(Request(source, self.options))
        ticket.future.add_done_callback(lambda future: done(future.result()[0].tokens))

    def close(self) -> None:
        self.scheduler.close()


ARMS: dict[str, Callable[[Session, SearchOptions, int], Arm]] = {
    "one at a time": OneByOne,
    "dynamic batching that keeps finished rows": KeptRows,
    "dynamic batching of whole decodes": WholeBatches,
    "continuous batching": Continuous,
}

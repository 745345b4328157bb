"""The scheduler: requests come at any time from any thread, and one thread decodes all of them together.

    clients -> queue -> free rows of a running batch -> tokens and results, as soon as they are decoded

The batch grows from one row to `rows` and shrinks again. Requests whose steps have another form (beams, candidates)
run in a separate batch; the batches alternate step by step, and rows go to requests in order of arrival, so
none starves. The output of a request is that of `generate`, independent of the other requests.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import InvalidStateError
from contextlib import suppress
from types import TracebackType

from seq2engine.errors import BusyError, DeadlineError, RequestError, StoppingError

from ..encoder_inputs import listed_sources
from ..model_options import options_from_session
from ..requests import check_request
from ..search.step import Hypothesis
from ..session import Session
from ..text.batching import BATCH
from ..text.running_batch import RunningBatch, Source, batch_form
from .counters import Counters
from .tickets import Group, Request, Ticket

QUEUE = 256  # requests that may wait, by default
FEW = 8  # a batch with a smaller share of free rows counts as full
# New requests join a running batch once they are a quarter of its rows, or after 8 steps.
JOIN_SHARE, HELD_STEPS = 4, 8
PATIENCE = 4  # steps for which rows must be free before the batch shrinks, as others may want them


class Scheduler:
    """Owns a thread that decodes; the session stays the caller's. Close it, or use it in a `with` block."""

    def __init__(self, session: Session, rows: int = BATCH, queue: int = QUEUE):
        if rows < 1 or queue < 1:
            raise RequestError(f"{rows} rows and a queue of {queue}, expected at least 1 each")
        self.session, self.queue = session, queue
        self.rows = rows if session.limits.batch is None else min(rows, session.limits.batch)
        self.limits = dataclasses.replace(session.limits, batch=None, larger=None)  # of a request
        self.numbers = itertools.count(1)
        self.changed = threading.Condition()
        self.waiting: deque[Ticket] = deque()
        self.running: dict[int, Ticket] = {}
        self.batches: dict[Group, _Batch] = {}
        self.counters = Counters()
        self.stopping = False
        self.held = 0  # steps for which the first in the queue has waited for others, though rows were free
        self.thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self.thread.start()

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=kind is None)

    def submit(self, *requests: Request) -> list[Ticket]:
        """Queues all of these or none: a RequestError if one cannot be decoded, a BusyError if the queue is full."""
        try:
            tickets = [self._ticket(request) for request in requests]
        except RequestError:
            self.counters.count("refused", len(requests))
            raise
        if len(requests) > self.queue:
            self.counters.count("refused", len(requests))
            raise RequestError(f"{len(requests)} sources at once, at most {self.queue}; send them in parts")
        with self.changed:
            if self.stopping:
                self.counters.count("busy", len(requests))
                raise StoppingError("the server is stopping and takes no more requests")
            if len(self.waiting) + len(requests) > self.queue:
                self.counters.count("busy", len(requests))
                raise BusyError(f"{len(self.waiting)} requests are waiting, at most {self.queue}; try again later")
            self.waiting.extend(tickets)
            self.changed.notify()
        return tickets

    def generate(self, *requests: Request) -> list[list[Hypothesis]]:
        """Decodes these and waits for all of them."""
        tickets = self.submit(*requests)
        try:
            return [ticket.result() for ticket in tickets]
        finally:
            for ticket in tickets:
                ticket.cancel()  # after an error or an interrupt; finished ones stay finished

    @property
    def queued(self) -> int:
        return len(self.waiting)

    @property
    def active(self) -> int:
        """Requests being decoded."""
        return len(self.running)

    @property
    def alive(self) -> bool:
        """Whether it takes requests."""
        return self.thread.is_alive() and not self.stopping

    def close(self, drain: bool = True) -> None:
        """Accepts no more requests, finishes those it has (or cancels them) and ends its thread."""
        with self.changed:
            self.stopping = True
            if not drain:
                for ticket in [*self.waiting, *list(self.running.values())]:
                    ticket.cancel()
            self.changed.notify()
        self.thread.join()

    def _ticket(self, request: Request) -> Ticket:
        config = self.session.config
        (tokens,) = listed_sources([request.tokens], config)
        options = request.options or options_from_session(self.session)
        prefixes, prompts = (None if own is None else [own] for own in (request.prefix, request.prompt))
        check_request(self.limits, config, [tokens], options, prefixes=prefixes, prompts=prompts)
        if options.sample and options.seed is None:  # it may have to be restarted
            options = dataclasses.replace(options, seed=secrets.randbits(32))
        source = Source(next(self.numbers), tokens, options, request.prefix, request.prompt)
        return Ticket(source, request, batch_form(self.session, source))

    def _run(self) -> None:
        """The thread: one step of every batch in turn, until it is stopped and all is done."""
        try:
            while self._has_work():
                self._drop_gone()
                self._admit()
                for group in list(self.batches):
                    self._step(group)
        except BaseException as error:  # a bug of ours: no request may wait forever for a dead thread
            with self.changed:
                self.stopping = True
                for ticket in [*self.waiting, *list(self.running.values())]:
                    self._settle(ticket, error)
            raise

    def _has_work(self) -> bool:
        with self.changed:
            while not self.waiting and not self.running:
                if self.stopping:
                    return False
                self.changed.wait()
            return True

    def _drop_gone(self) -> None:
        """Frees rows and queue places of requests that were cancelled or are late."""
        now = time.monotonic()
        with self.changed:
            late = [ticket for ticket in self.waiting if ticket.gone(now)]
            if late:
                self.waiting = deque(ticket for ticket in self.waiting if not ticket.gone(now))
        gone = [ticket for ticket in self.running.values() if ticket.gone(now)]
        if gone:
            numbers = {ticket.number for ticket in gone}
            for batch in self.batches.values():
                batch.running.drop(numbers)
        for ticket in (*late, *gone):
            what = "in the queue" if ticket.begun is None else "being decoded"
            seconds = now - ticket.arrived
            self._settle(ticket, DeadlineError(f"not done after {seconds:.1f} s ({what}); ask for less or later"))

    def _admit(self) -> None:
        """Gives free rows to requests in the order they came."""
        coming: dict[Group, list[Ticket]] = {}
        now = time.monotonic()
        with self.changed:
            free = self.rows - len(self.running)
            if not self.waiting or (self.running and self._holds_back(free)):
                return
            self.held = 0
            while self.waiting and free:
                group = self.waiting[0].group
                if group in self.batches and not self.batches[group].running.settled:
                    break  # it fits in some steps; letting others pass would be unfair
                ticket = self.waiting.popleft()
                coming.setdefault(group, []).append(ticket)
                self.running[ticket.number] = ticket
                ticket.begun = now
                free -= 1
        for group, tickets in coming.items():
            batch = self.batches.get(group)
            if batch is None:
                batch = self.batches[group] = _Batch(RunningBatch(self.session, group[0], self.limits.target))
            try:
                batch.running.admit([ticket.source for ticket in tickets])
                batch.begun += tickets
            except Exception as error:  # any error goes to the requests concerned
                self._failed(group, self._members(group), error)

    def _holds_back(self, free: int) -> bool:
        """Whether waiting requests stay in the queue for some more steps, to begin together with others.

        Those that begin together share one encoder call and one search. The call stops all running requests, and it
        takes hardly longer for several sources than for one. So a small batch is joined at once, a large one only by
        several requests together; and if nearly all rows are taken, some must become free first.
        """
        if free * FEW < self.rows:
            return True
        if len(self.waiting) * JOIN_SHARE >= len(self.running) or self.held >= HELD_STEPS:
            return False
        self.held += 1
        return True

    def _step(self, group: Group) -> None:
        batch = self.batches.get(group)
        if batch is None:
            return
        if not batch.running.cohorts:  # its memory is freed
            del self.batches[group]
            return
        self.counters.step(batch.running.used, batch.running.size)
        try:
            advance = batch.running.step(tokens=any(t.on_token is not None for t in self._members(group)))
        except Exception as error:  # any error goes to the requests concerned
            self._failed(group, self._members(group), error)
            return
        now = time.monotonic()
        for ticket in batch.begun:
            ticket.first = ticket.first or now
        batch.begun.clear()
        for number, token in advance.tokens.items():
            self.running[number].next_token(token)
        for number, hypotheses in advance.done:
            self._settle(self.running[number], hypotheses)
        for numbers, failure in advance.failed:
            left = [self.running[number] for number in numbers if number in self.running]
            self._again_alone(left, failure)
        self._shrink(batch)

    def _shrink(self, batch: _Batch) -> None:
        running = batch.running
        spare = 8 * (running.size - running.used) >= running.size and not self.waiting
        batch.spare_steps = batch.spare_steps + 1 if spare else 0
        if batch.spare_steps >= PATIENCE and running.settled:
            running.shrink()
            batch.spare_steps = 0

    def _members(self, group: Group) -> list[Ticket]:
        return [ticket for ticket in self.running.values() if ticket.group == group]

    def _failed(self, group: Group, tickets: Iterable[Ticket], error: Exception) -> None:
        """A whole batch failed: it is dropped, and each of its requests restarts alone."""
        del self.batches[group]
        self._again_alone(list(tickets), error)

    def _again_alone(self, tickets: Sequence[Ticket], error: Exception) -> None:
        """Requests that failed together are decoded alone, so that only those at fault get the error."""
        for ticket in tickets:
            if ticket.alone:
                self._settle(ticket, error)
        again = [ticket for ticket in tickets if not ticket.alone]
        with self.changed:
            for ticket in reversed(again):
                del self.running[ticket.number]
                ticket.begin_again_alone()
                self.waiting.appendleft(ticket)

    def _settle(self, ticket: Ticket, outcome: list[Hypothesis] | BaseException) -> None:
        """The request has its answer."""
        self.running.pop(ticket.number, None)
        now = time.monotonic()
        if ticket.future.cancelled():
            self.counters.count("cancelled")
            return
        with suppress(InvalidStateError):  # cancelled at this moment
            if isinstance(outcome, BaseException):
                self.counters.count("deadline" if isinstance(outcome, DeadlineError) else "failed")
                ticket.future.set_exception(outcome)
            else:
                begun, first = ticket.begun or now, ticket.first or now
                tokens = len(outcome[0].tokens) if outcome else 0
                self.counters.done(tokens, begun - ticket.arrived, first - ticket.arrived, now - ticket.arrived)
                ticket.future.set_result(outcome)


@dataclasses.dataclass
class _Batch:
    """A batch, the requests in it that have not had a step yet, and for how many steps rows were free."""

    running: RunningBatch
    begun: list[Ticket] = dataclasses.field(default_factory=list)
    spare_steps: int = 0

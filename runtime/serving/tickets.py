"""A client's request to the scheduler, and the ticket it holds until the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field

from seq2engine.errors import DeadlineError

from ..search.options import SearchOptions
from ..search.step import Hypothesis
from ..text.running_batch import BatchForm, Source


@dataclass(frozen=True)
class Request:
    """One source to decode. `options` None: the model's own. `prefix` and `prompt` are as in `generate`.

    `timeout` is in seconds, waiting included; None: no limit. `on_token` gets every token of a
    request of one beam as soon as it is chosen, in the thread that decodes: it must not block.
    """

    tokens: Sequence[int]
    options: SearchOptions | None = None
    prefix: list[int] | None = None
    prompt: list[int] | None = None
    timeout: float | None = None
    on_token: Callable[[int], None] | None = field(default=None, compare=False)


Group = tuple[BatchForm, int]  # requests with the same form may share a batch; a number other than 0: decoded alone


class Ticket:
    """A pending request. Its `future` gets the n-best hypotheses or the error; any thread may cancel it."""

    def __init__(self, source: Source, request: Request, form: BatchForm):
        self.source, self.on_token = source, request.on_token
        self.group: Group = (form, 0)
        self.future: Future[list[Hypothesis]] = Future()
        self.arrived = time.monotonic()
        self.deadline = None if request.timeout is None else self.arrived + request.timeout
        self.begun: float | None = None  # when it got a row
        self.first: float | None = None  # when its first step was done
        self.seen = self.sent = 0  # tokens decoded, and tokens that the client has got

    @property
    def number(self) -> int:
        return self.source.number

    @property
    def alone(self) -> bool:
        return self.group[1] != 0

    def cancel(self) -> None:
        """Cancels it: its row is free from the next step on."""
        self.future.cancel()

    def result(self, timeout: float | None = None) -> list[Hypothesis]:
        """Waits for the hypotheses, best first; raises what went wrong."""
        try:
            return self.future.result(timeout)
        except FutureTimeoutError as error:
            if self.future.done():  # it is the request's own error
                raise
            raise DeadlineError(f"no result after {timeout:g} s") from error

    def next_token(self, token: int) -> None:
        """Sends the client a token, unless it was sent before the decode was restarted."""
        self.seen += 1
        if self.on_token is not None and self.seen > self.sent:
            self.sent = self.seen
            self.on_token(token)

    def begin_again_alone(self) -> None:
        self.group = (self.group[0], self.number)
        self.seen = 0

    def gone(self, now: float) -> bool:
        """Whether it needs no more steps: it was cancelled, or timed out."""
        return self.future.cancelled() or (self.deadline is not None and now >= self.deadline)

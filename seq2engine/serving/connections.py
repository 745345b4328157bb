"""Connections that nobody can hold open: a client that is slow to ask, or does not read its answer, is cut off.

Bodies have their own time limit (app.py), and so has every decode. What is left is the head of a request that never
ends, and an answer that fills all buffers while the client reads nothing.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol


class TimedConnection(H11Protocol):
    """Uvicorn's, with at most `limit` seconds between requests, and for a client to read while it is waited for."""

    limit: float
    asking: asyncio.TimerHandle | None = None  # runs while no request does
    reading: asyncio.TimerHandle | None = None  # runs while the client's buffers are full

    @property
    def answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.wait_for_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.answering and self.asking is not None:
            self.asking.cancel()
            self.asking = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.answering:
            self.wait_for_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.reading = self.loop.call_later(self.limit, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.reading is not None:
            self.reading.cancel()
            self.reading = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self.asking, self.reading):
            if timer is not None:
                timer.cancel()

    def wait_for_request(self) -> None:
        """Starts the timer. Received bytes do not restart it: a client that sends one now and then is slow, too."""
        if self.asking is not None:
            self.asking.cancel()
        self.asking = self.loop.call_later(self.limit, self.transport.abort)


def timed_connections(seconds: float) -> type[TimedConnection]:
    """The class that uvicorn makes connections of."""

    class Connection(TimedConnection):
        limit = seconds

    return Connection

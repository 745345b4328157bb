"""Runs the application in one process: a socket, uvicorn, and a graceful stop on signals."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette

from seq2engine.errors import SessionError

from .connections import timed_connections

STOPPING = 5.0  # seconds beyond a request's own time before a stop no longer waits
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def listening_socket(host: str, port: int) -> socket.socket:
    """A bound socket: an address that is not available is an error before a model is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except OSError as error:
        found.close()
        raise SessionError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; give another --host or --port, or "
            "--port 0 for any that is free"
        ) from error
    return found


def address_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Uvicorn that stops gracefully: after a signal it finishes the requests it has and exits with 0."""

    started_line: Callable[[], None]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Uvicorn's own handler would raise the signal again after a clean stop."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        if self.should_exit:  # a second signal
            self.force_exit = True
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.started_line()


def run_server(app: Starlette, listening: socket.socket, timeout: float, started_line: Callable[[], None]) -> None:
    """Serves until a signal; running requests are finished, within their own timeouts."""
    config = uvicorn.Config(
        app,
        http=timed_connections(timeout),
        log_level="error",
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=int(timeout + STOPPING),
    )
    server = Server(config)
    server.started_line = started_line
    asyncio.run(server.serve(sockets=[listening]))

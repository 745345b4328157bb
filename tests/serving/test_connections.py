"""A client that does not read: its connection is cut off, and the application is notified."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from uvicorn.server import ServerState

from seq2engine.serving.connections import timed_connections

SOON = 120  # seconds
PART = b"x" * 65_536


class Endless:
    """An application that sends until its client is gone."""

    def __init__(self):
        self.sent = 0
        self.gone = asyncio.Event()

    async def __call__(self, scope, receive, send):
        watching = asyncio.ensure_future(self.watch(receive))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not self.gone.is_set():
            await send({"type": "http.response.body", "body": PART, "more_body": True})
            self.sent += len(PART)
            await asyncio.sleep(0)  # to a client that is gone, nothing waits any more
        await watching

    async def watch(self, receive):
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone.set()


async def answered(limit, read):
    """Asks once, and reads so many bytes; what the application did."""
    application = Endless()
    config = uvicorn.Config(application, http=timed_connections(limit), lifespan="off", log_level="error")
    config.load()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: config.http_protocol_class(config, ServerState(), {}), "127.0.0.1", 0)
    with socket.socket() as client:
        client.setblocking(False)
        await loop.sock_connect(client, server.sockets[0].getsockname())
        await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
        found = 0
        while found < read:
            found += len(await asyncio.wait_for(loop.sock_recv(client, 1 << 20), SOON))
        if read:
            assert not application.gone.is_set()
        else:
            await asyncio.wait_for(application.gone.wait(), SOON)
    await asyncio.wait_for(application.gone.wait(), SOON)
    server.close()
    return application


def test_who_never_reads_is_cut_off():
    assert asyncio.run(answered(0.05, read=0)).sent > 0


def test_who_reads_gets_more_than_any_buffer_holds():
    """The limit is of every wait, not of the whole answer."""
    assert asyncio.run(answered(60, read=64 << 20)).sent >= 64 << 20

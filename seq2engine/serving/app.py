"""The HTTP application: requests are checked, decoded by the service, and answered as JSON or as events."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from seq2engine import __version__
from seq2engine.errors import BusyError, ConfigError, DeadlineError, RequestError, Seq2EngineError, StoppingError
from seq2engine.runtime.serving.fields import (
    BadRequestError,
    ParsedRequest,
    has_lone_surrogate,
    object_from_json,
    request_from_json,
)
from seq2engine.runtime.serving.service import Pending, TextRequest, TextService, values_of
from seq2engine.runtime.text.translate import Translated

from .attention_maps import AttentionMaps
from .metrics import Metrics
from .openapi import docs_html, openapi
from .page import CONTENT_POLICY, page_html

GONE = 499  # the client has closed the connection, so this answer is not read
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class ServerLimits:
    """Limits of one request. `token` protects everything but health and the pages; None: no authentication."""

    body: int = 1 << 20  # bytes
    timeout: float = 60.0  # seconds, waiting included
    token: str | None = None


class StatusError(Seq2EngineError):
    """An error response with its own HTTP status."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


def status_of(error: BaseException) -> int:
    if isinstance(error, StatusError):
        return error.status
    if isinstance(error, BadRequestError):
        return 400
    if isinstance(error, BusyError):
        return 503 if isinstance(error, StoppingError) else 429
    if isinstance(error, DeadlineError):
        return 504
    return 422 if isinstance(error, RequestError | ConfigError) else 500


def message_of(error: BaseException) -> str:
    """One line; for a bug a generic message, because the traceback is in the log."""
    if isinstance(error, Seq2EngineError):
        return " ".join(str(error).split())
    return "the server failed on this request; see its log"


class Application:
    """The routes of one service."""

    def __init__(self, service: TextService, name: str, limits: ServerLimits):
        self.service, self.name, self.limits = service, name, limits
        self.metrics = Metrics(service.scheduler)
        self.maps = AttentionMaps(service.model)
        self.described = openapi(name, __version__, protected=limits.token is not None)

    def starlette(self) -> Starlette:
        open_routes: list[tuple[str, str, Handler]] = [
            ("GET", "/", self.page),
            ("GET", "/docs", self.docs),
            ("GET", "/openapi.json", self.openapi),
            ("GET", "/health/live", self.live),
            ("GET", "/health/ready", self.ready),
        ]
        protected: list[tuple[str, str, Handler]] = [
            ("POST", "/translate", self.translate),
            ("POST", "/attention", self.attention),
            ("GET", "/metrics", self.metrics_text),
        ]
        routes = [Route(path, self.answered(path, call), methods=[how]) for how, path, call in open_routes]
        routes += [Route(path, self.answered(path, call, True), methods=[how]) for how, path, call in protected]
        return Starlette(routes=routes, exception_handlers={404: not_found, 405: not_found, 500: server_error})

    def answered(self, path: str, call: Handler, protected: bool = False) -> Handler:
        """A request handler that returns errors as JSON and counts responses."""

        async def handler(request: Request) -> Response:
            try:
                if protected:
                    self.check_token(request)
                response = await call(request)
            except (Seq2EngineError, CancelledError, ClientDisconnect) as error:
                response = error_response(error)
            except Exception:
                self.metrics.responses.labels(path, "500").inc()
                raise
            self.metrics.responses.labels(path, str(response.status_code)).inc()
            return response

        return handler

    def check_token(self, request: Request) -> None:
        if self.limits.token is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode(), self.limits.token.encode())
        if scheme.lower() != "bearer" or not right:
            raise StatusError(401, "the bearer token is missing or wrong; send it as: Authorization: Bearer TOKEN")

    async def body_of(self, request: Request) -> bytes:
        """The body; raises if it is too large or too slow."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise StatusError(415, f"the body is {kind or 'of no type'}, expected application/json")
        too_large = StatusError(413, f"the body is larger than {self.limits.body:,} bytes; send it in parts")
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > self.limits.body:
            raise too_large
        parts: list[bytes] = []

        async def read() -> None:
            async for part in request.stream():
                parts.append(part)
                if sum(map(len, parts)) > self.limits.body:
                    raise too_large

        try:
            await asyncio.wait_for(read(), self.limits.timeout)
        except asyncio.TimeoutError as error:  # not TimeoutError before Python 3.11
            raise StatusError(408, f"the body did not arrive in {self.limits.timeout:g} s") from error
        return b"".join(parts)

    def request_of(self, asked: ParsedRequest) -> TextRequest:
        others = asked.others
        search = {**asked.search, "scores": bool(others.get("scores", False))}
        options = self.service.options(others.get("target_language"), **search)
        timeout = min(self.limits.timeout, others.get("timeout", self.limits.timeout))
        return TextRequest(
            asked.texts, options, others.get("source_language"), bool(others.get("truncate", False)), timeout
        )

    async def translate(self, request: Request) -> Response:
        started = time.monotonic()
        asked = request_from_json(await self.body_of(request))
        texts = self.request_of(asked)
        if asked.others.get("stream"):
            tokens: asyncio.Queue[tuple[int, int] | None] = asyncio.Queue()
            loop = asyncio.get_running_loop()

            def on_token(place: int, token: int) -> None:
                loop.call_soon_threadsafe(tokens.put_nowait, (place, token))

            pending = await asyncio.to_thread(self.service.submit, texts, on_token)
            events = self.events(pending, asked, tokens, started)
            headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)
        pending = await asyncio.to_thread(self.service.submit, texts)
        try:
            await done_or_gone(pending, request)
        finally:
            for one in pending:
                one.cancel()  # those that are done stay done
        found = [result_of(one.translated(), asked) for one in pending]
        if len(found) == 1 and "error" in found[0]:
            raise RequestError(found[0]["error"])
        return JSONResponse({"results": found, "seconds": round(time.monotonic() - started, 6)})

    async def events(
        self, pending: Sequence[Pending], asked: ParsedRequest, tokens: asyncio.Queue[Any], started: float
    ) -> AsyncIterator[str]:
        """Pieces of every text as they are decoded, then its result. A disconnected client cancels the decode."""
        texts = [self.service.stream() for _ in pending]
        streamed = [False] * len(pending)
        left = len(pending)
        loop = asyncio.get_running_loop()

        def ended(place: int, future: object) -> None:
            loop.call_soon_threadsafe(tokens.put_nowait, (place, None))

        for place, one in enumerate(pending):
            if one.future is None:
                tokens.put_nowait((place, None))
            else:  # after the text's last token: both come from the same thread
                one.future.add_done_callback(partial(ended, place))
        try:
            while left:
                place, token = await tokens.get()
                if token is not None:
                    if piece := texts[place].add(token):
                        streamed[place] = True
                        yield event("piece", {"index": place, "text": piece})
                    continue
                left -= 1
                try:
                    translated = pending[place].translated()
                except Exception as error:  # the error of one text, after the response has begun
                    yield event("error", {"index": place, "error": message_of(error), "status": status_of(error)})
                    continue
                if streamed[place] and (rest := texts[place].finish(translated.outputs[0].tokens)):
                    yield event("piece", {"index": place, "text": rest})
                yield event("result", {"index": place, **result_of(translated, asked)})
            yield event("done", {"seconds": round(time.monotonic() - started, 6)})
        finally:
            for one in pending:
                one.cancel()

    async def attention(self, request: Request) -> Response:
        values = object_from_json(await self.body_of(request))
        text, tokens = values.pop("text", None), values.pop("tokens", None)
        language = values.pop("source_language", None)
        if not isinstance(text, str) or not isinstance(tokens, list) or not all(type(one) is int for one in tokens):
            raise RequestError("expected a text and tokens, a list of integers as /translate answers with tokens: true")
        if has_lone_surrogate(text):
            raise RequestError("text: half of a surrogate pair, expected characters")
        if values or not isinstance(language, str | None):
            raise RequestError(f"unknown field {next(iter(values), 'source_language')!r}, expected text and tokens")
        return JSONResponse(await asyncio.to_thread(self.maps.weights, text, tokens, language))

    async def page(self, request: Request) -> Response:
        values = page_html(self.service.model, self.name, self.limits.token is not None)
        return HTMLResponse(values, headers={"content-security-policy": CONTENT_POLICY})

    async def docs(self, request: Request) -> Response:
        return HTMLResponse(docs_html(self.described), headers={"content-security-policy": CONTENT_POLICY})

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(self.described)

    async def live(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def ready(self, request: Request) -> Response:
        if self.service.scheduler.alive:
            return PlainTextResponse("ready\n")
        return PlainTextResponse("stopping\n", 503)

    async def metrics_text(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def done_or_gone(pending: Sequence[Pending], request: Request) -> None:
    """Returns when all are done; a client that has closed the connection by then is an error for the log."""
    futures = [asyncio.wrap_future(one.future) for one in pending if one.future is not None]
    if not futures:
        return
    gone = asyncio.ensure_future(disconnected(request))
    results = asyncio.ensure_future(asyncio.wait(futures))
    await asyncio.wait({gone, results}, return_when=asyncio.FIRST_COMPLETED)
    finished = results.done()
    for task in (gone, results):
        task.cancel()
    if not finished:
        raise StatusError(GONE, "the client has gone")
    for future in futures:
        if not future.cancelled():
            future.exception()  # raised when the result is read


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def result_of(translated: Translated, asked: ParsedRequest) -> dict[str, Any]:
    """The JSON of one text."""
    if translated.error is not None:
        return {"error": translated.error.removesuffix("; shorten it or add --truncate")}
    scores, tokens = bool(asked.others.get("scores", False)), bool(asked.others.get("tokens", False))
    outputs = values_of(translated.outputs, scores, tokens)
    best = translated.outputs[0].text if translated.outputs else ""
    unknown = {"unknown": list(translated.unknown)} if translated.unknown else {}
    return {"text": best, "outputs": outputs, **unknown}


def event(name: str, values: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(values, ensure_ascii=False)}\n\n"


def error_response(error: BaseException) -> JSONResponse:
    status = GONE if isinstance(error, CancelledError | ClientDisconnect) else status_of(error)
    headers = {"retry-after": "1"} if status in (429, 503) else {"www-authenticate": "Bearer"} if status == 401 else {}
    return JSONResponse({"error": message_of(error)}, status, headers)


async def not_found(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    what = "no such page" if status == 404 else f"{request.method} is not for this page"
    return JSONResponse({"error": f"{request.url.path}: {what}; see /docs"}, status)


async def server_error(request: Request, error: Exception) -> Response:
    """A bug: the traceback is in the log, not in the response."""
    return JSONResponse({"error": message_of(error)}, 500)

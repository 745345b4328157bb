"""The Python model inside Triton: requests of all clients share one running batch, and responses are streamed.

Triton's process calls `initialize`, `execute` and `finalize`; the scheduler's thread decodes, and one more thread
sends the results, so that neither waits for the other.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from seq2engine import __version__
from seq2engine.common.atomic_folders import sha256_of
from seq2engine.common.json_files import parse_json, read_json
from seq2engine.errors import RequestError, Seq2EngineError
from seq2engine.export.artifact.bundle import MANIFEST
from seq2engine.runtime.search.step import Hypothesis
from seq2engine.runtime.serving.fields import FIELDS, problem_with
from seq2engine.runtime.serving.service import Pending, TextRequest, TextService
from seq2engine.runtime.serving.tickets import Request, Ticket
from seq2engine.runtime.text.streaming import TextStream
from seq2engine.runtime.translator import load

from .repository import DESCRIPTION, FORMAT
from .tensors import array_of, string_tensor, tensor_of

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
LOOK = 0.1  # seconds between two checks for clients that have disconnected
LAST = 5.0  # seconds that `finalize` waits for the sender
COUNT = 1.0  # and between two updates of the metrics
ENDED = object()


@dataclass(eq=False)
class Job:
    """One request: its response sender and the outputs it asked for."""

    sender: Any  # None once the last response is sent
    names: frozenset[str]  # names of the requested outputs
    pending: Pending | None = None
    ticket: Ticket | None = None
    stream: TextStream | None = None

    def finish(self, response: Any) -> None:
        """Sends the last response and drops the sender: Triton may keep the model loaded while it exists."""
        sender, self.sender = self.sender, None
        sender.send(response, flags=FINAL)

    def fail(self, error: BaseException) -> None:
        text = " ".join(str(error).split()) or type(error).__name__
        self.finish(pb_utils.InferenceResponse(error=pb_utils.TritonError(text)))


class TritonPythonModel:
    """Named and called as Triton wants it."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Loads the bundle. An error is one line in Triton's log, and the model is not loaded."""
        folder = Path(args["model_repository"])
        if args.get("model_instance_kind") == "GPU":
            os.environ["CUDA_VISIBLE_DEVICES"] = args["model_instance_device_id"]
        try:
            described = checked_description(folder, args["model_version"])
            self.model = load(
                folder / args["model_version"] / "bundle",
                described["backend"],
                described["precision"],
                described["threads"],
                described["engine"],
                deterministic=described["deterministic"],
                provider=described["provider"],
                ids=described["ids"],
            )
            self.service = TextService(self.model, described["rows"], described["queue"], described["max_beams"])
            self.service.warm_up()
        except Seq2EngineError as error:
            raise pb_utils.TritonModelException(f"seq2engine: {' '.join(str(error).split())}") from error
        self.timeout: float = described["timeout"]
        self.metrics = Metrics(args["model_name"], args["model_version"])
        self.events: queue.Queue[tuple[Job, object] | None] = queue.Queue()
        self.jobs: set[Job] = set()
        self.closing = False
        self.sending = threading.Thread(target=self.send_all, name="sender", daemon=True)
        self.sending.start()

    def execute(self, requests: Iterable[Any]) -> None:
        """Queues requests and returns at once; the sender's thread responds."""
        for request in requests:
            job = Job(request.get_response_sender(), frozenset(request.requested_output_names()))
            self.jobs.add(job)  # before its first event
            try:
                self.begin(job, request)
            except Exception as error:  # an error of this request only
                self.events.put((job, error))

    def finalize(self) -> None:
        """Finishes running requests. Triton no longer serves our calls by then, so the sender makes none."""
        self.closing = True
        self.service.scheduler.close()
        self.events.put(None)
        self.sending.join(LAST)
        self.model.close()

    def begin(self, job: Job, request: Any) -> None:
        asked = fields_from_parameters(request.parameters())
        search = {name: value for name, value in asked.items() if FIELDS[name].search}
        options = self.service.options(asked.get("target_language"), **search, scores=asked.get("scores", True))
        timeout = min(self.timeout, asked.get("timeout", self.timeout))
        source = source_of(request)
        streams = bool(asked.get("stream", False)) and options.width == 1
        job.stream = self.service.stream() if streams else None

        def on_token(token: int) -> None:
            self.events.put((job, token))

        if isinstance(source, str):
            texts = TextRequest(
                (source,), options, asked.get("source_language"), bool(asked.get("truncate", False)), timeout
            )
            (job.pending,) = self.service.submit(texts, (lambda place, token: on_token(token)) if streams else None)
            job.ticket = job.pending.ticket
        else:
            wanted = Request(source, options, timeout=timeout, on_token=on_token if streams else None)
            (job.ticket,) = self.service.scheduler.submit(wanted)
        if job.ticket is None:
            self.events.put((job, ENDED))
        else:
            job.ticket.future.add_done_callback(lambda future: self.events.put((job, ENDED)))

    def send_all(self) -> None:
        """The sender's thread: sends results in order and checks for clients that have disconnected."""
        looked = counted = 0.0
        while True:
            try:
                event = self.events.get(timeout=LOOK)
                if event is None:
                    return
                self.send(*event)
            except queue.Empty:
                pass
            now = time.monotonic()
            if self.closing:
                continue
            if now - looked >= LOOK:
                looked = now
                for job in list(self.jobs):
                    if job.ticket is not None and job.sender.is_cancelled():
                        job.ticket.cancel()
            if self.jobs and now - counted >= COUNT:  # with none left, Triton may be unloading the model
                counted = now
                self.metrics.update(self.service.scheduler)

    def send(self, job: Job, event: object) -> None:
        if job not in self.jobs:  # a token that was decoded before the client disconnected
            return
        if isinstance(event, int):
            assert job.stream is not None
            job.sender.send(response_of(job.names, (event,), job.stream.add(event), None, 0, final=False))
            return
        self.jobs.discard(job)
        if not self.jobs and not self.closing:  # before the last response: Triton may unload the model right after it
            self.metrics.update(self.service.scheduler, idle=True)
        try:
            if isinstance(event, Exception):
                raise event
            self.send_result(job)
        except BaseException as error:  # the request's own error, including cancellation
            job.fail(error)

    def send_result(self, job: Job) -> None:
        if job.pending is not None:
            translated = job.pending.translated()
            if translated.error is not None:
                raise RequestError(translated.error)
            found = [(one.tokens, one.text, one.score) for one in translated.outputs]
        else:
            assert job.ticket is not None
            decode = self.model.tokenizer.decode_target
            hypotheses: list[Hypothesis] = job.ticket.result()
            found = [(one.tokens, decode(one.tokens), one.score) for one in hypotheses]
        *others, last = [
            response_of(job.names, tokens, text, score, rank, final=True)
            for rank, (tokens, text, score) in enumerate(found or [((), "", 0.0)])
        ]
        for response in others:
            job.sender.send(response)
        job.finish(last)


def checked_description(folder: Path, version: str) -> dict[str, Any]:
    """The description of the model; raises if this environment differs from it."""
    try:
        described = read_json(folder / DESCRIPTION)
    except (OSError, ValueError) as error:
        raise RequestError(f"cannot read {folder / DESCRIPTION}: {error}; {again(folder)}") from error
    if not isinstance(described, dict) or described.get("format") != FORMAT:
        raise RequestError(f"{folder / DESCRIPTION} is of another format, expected {FORMAT}; {again(folder)}")
    if described["seq2engine"] != __version__:
        raise RequestError(
            f"the model was written by seq2engine {described['seq2engine']}, this environment has {__version__}; "
            f"install that version, or {again(folder)}"
        )
    manifest = folder / version / "bundle" / MANIFEST
    if not manifest.is_file() or sha256_of(manifest) != described["manifest_sha256"]:
        raise RequestError(f"{manifest} is not the file that was written (its hash differs); {again(folder)}")
    return described


def again(folder: Path) -> str:
    return f"write it again with: seq2engine triton BUNDLE {folder.parent} --force"


def source_of(request: Any) -> str | list[int]:
    """The text or the ids of a request; exactly one must be given."""
    given = {
        name: array_of(tensor, strings=name == "text").reshape(-1)
        for name in ("text", "text_utf8", "ids")
        if (tensor := pb_utils.get_input_tensor_by_name(request, name)) is not None
    }
    if len(given) != 1:
        raise RequestError(f"{' and '.join(given) or 'no input'} given, expected one of text, text_utf8 and ids")
    ((name, values),) = given.items()
    if name == "ids":
        return [int(value) for value in values]
    raw = bytes(values[0]) if name == "text" else values.astype(np.uint8).tobytes()
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not UTF-8: {error.reason} at byte {error.start}") from error


def fields_from_parameters(parameters: str) -> dict[str, Any]:
    """The request's parameters. Numbers may be strings: older Triton protocols have no floats."""
    values = {name: number_of(name, value) for name, value in parse_json(parameters or "{}").items()}
    if problems := [problem for name, value in values.items() if (problem := problem_with(name, value))]:
        raise RequestError("; ".join(problems))
    return values


def number_of(name: str, value: object) -> object:
    field = FIELDS.get(name)
    if field is None or not isinstance(value, str) or field.kind == "string":
        return value
    try:
        return parse_json(value)
    except ValueError:
        return value


def response_of(
    names: frozenset[str], tokens: tuple[int, ...], text: str, score: float | None, rank: int, final: bool
) -> Any:
    """A piece of an output, or a whole one."""
    made = {
        "tokens": lambda: np.array(tokens, dtype=np.int64),
        "text_utf8": lambda: np.frombuffer(text.encode(), dtype=np.uint8).copy(),
        "score": lambda: np.array([np.nan if score is None else score], dtype=np.float32),
        "rank": lambda: np.array([rank], dtype=np.int32),
        "final": lambda: np.array([final]),
    }
    tensors = [tensor_of(name, make()) for name, make in made.items() if name in names]
    if "text" in names:
        tensors.append(string_tensor("text", text))
    return pb_utils.InferenceResponse(output_tensors=tensors)


class Metrics:
    """The scheduler's counters beside Triton's own, on its metrics port."""

    def __init__(self, name: str, version: str):
        labels = {"model": name, "version": version}
        self.families: list[Any] = []
        self.gauges = {
            "queued": self.metric("seq2engine_queue_length", "Requests waiting for a row.", False, labels),
            "active": self.metric("seq2engine_rows_used", "Requests being decoded.", False, labels),
        }
        self.counts = {
            "tokens": self.metric("seq2engine_tokens_total", "Tokens of the best outputs.", True, labels),
            "steps": self.metric("seq2engine_steps_total", "Decoder steps.", True, labels),
            "rows": self.metric("seq2engine_step_rows_total", "Rows in use, summed over steps.", True, labels),
        }
        self.reported = dict.fromkeys(self.counts, 0)
        self.state: tuple[int, ...] = ()

    def metric(self, name: str, about: str, counter: bool, labels: dict[str, str]) -> Any:
        kind = pb_utils.MetricFamily.COUNTER if counter else pb_utils.MetricFamily.GAUGE
        family = pb_utils.MetricFamily(name=name, description=about, kind=kind)
        self.families.append(family)  # Triton drops metrics whose family is gone
        return family.Metric(labels=labels)

    def update(self, scheduler: Any, idle: bool = False) -> None:
        """Reports changed counters to Triton. `idle`: no request is left, so gauges are 0."""
        held = {name: 0 if idle else getattr(scheduler, name) for name in self.gauges}
        state = (*held.values(), *(getattr(scheduler.counters, name) for name in self.counts))
        if state == self.state:
            return
        self.state = state
        for name, gauge in self.gauges.items():
            gauge.set(held[name])
        for name, counter in self.counts.items():
            now = getattr(scheduler.counters, name)
            counter.increment(now - self.reported[name])
            self.reported[name] = now

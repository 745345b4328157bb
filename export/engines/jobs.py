"""Builds of several graphs: one after another in this process, or side by side in processes of their own.

Not in threads: TensorRT logs to Python under a lock, and a crash of it would take the caller along. A worker reads its
job from standard input and writes lines of JSON; when its input ends, its caller has died, and it ends as well.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import onnx

from seq2engine.common.atomic_folders import sha256_of
from seq2engine.common.progress import Progress
from seq2engine.common.tensorrt_module import load_tensorrt
from seq2engine.errors import BuildError

from ..artifact.build_flags import BuildFlags
from ..artifact.profiles import Shapes
from .build import build_engine
from .cache import EngineFacts
from .memory import available_memory, peak_memory

PEAK_PER_BYTE = 8  # the most memory a build was seen to take, by the size of the graph and its weights
WORKER_MEMORY = 200 << 20  # of a process before it builds


@dataclass(frozen=True)
class EngineJob:
    """One engine to build: `model` is the graph as TensorRT gets it, its weights are in the folder of `path`."""

    stage: str
    model: bytes
    path: Path
    weight_bytes: int
    profiles: tuple[Shapes, ...]
    targets: tuple[str, ...]
    flags: BuildFlags
    timings: Path | None
    file: Path  # to write

    @property
    def memory(self) -> int:
        return PEAK_PER_BYTE * (len(self.model) + self.weight_bytes) + WORKER_MEMORY


def build_jobs(trt: Any, jobs: Sequence[EngineJob], workers: int, progress: Progress) -> list[EngineFacts]:
    """Builds all, with up to `workers` at once as far as memory goes. On failure files may be left.

    A graph without weights is built here in any case: to start a process for it takes longer.
    """
    large = [job for job in jobs if job.weight_bytes]
    built: dict[Path, EngineFacts] = {}
    if min(workers, len(large)) > 1 and fits_memory(large):
        facts = build_side_by_side(trt.__name__, large, workers, progress)
        built = {job.file: one for job, one in zip(large, facts, strict=True)}
    return [built.get(job.file) or build_here(trt, job, partial(progress, job.stage)) for job in jobs]


def fits_memory(jobs: Sequence[EngineJob]) -> bool:
    available = available_memory()
    return available is None or sum(job.memory for job in jobs) <= available


def build_here(trt: Any, job: EngineJob, report: Callable[[float], None]) -> EngineFacts:
    started = time.monotonic()
    with peak_memory() as peak:
        model = onnx.load_from_string(job.model)
        first, *others = job.profiles
        engine = build_engine(trt, model, job.path, first, job.targets, report, others, job.flags, job.timings)
    seconds = time.monotonic() - started
    job.file.write_bytes(engine)
    report(1.0)
    return EngineFacts(len(engine), sha256_of(job.file), round(seconds, 2), peak.bytes)


def build_side_by_side(flavour: str, jobs: Sequence[EngineJob], workers: int, progress: Progress) -> list[EngineFacts]:
    """One progress bar for all: they are built in parallel, and the slowest determines it."""
    fractions = dict.fromkeys(range(len(jobs)), 0.0)
    stage = " + ".join([jobs[0].stage, *(job.stage.removeprefix("build: ") for job in jobs[1:])])
    changed = threading.Lock()

    def report(number: int, fraction: float) -> None:
        with changed:
            fractions[number] = fraction
            progress(stage, min(sum(fractions.values()) / len(jobs), 0.99))

    with ThreadPoolExecutor(workers) as pool, ExitStack() as running:
        try:
            futures = [
                pool.submit(run_worker, running, flavour, job, partial(report, number))
                for number, job in enumerate(jobs)
            ]
            facts = [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            running.close()  # ends the workers, and with them the threads that listen to them
            raise
    progress(stage, 1.0)
    return facts


def run_worker(running: ExitStack, flavour: str, job: EngineJob, report: Callable[[float], None]) -> EngineFacts:
    values = {**dataclasses.asdict(job), "model": len(job.model), "flavour": flavour}
    command = [sys.executable, "-m", __name__]
    message: dict[str, Any] = {}
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # an interrupt is ours to pass on
        ) as worker,
    ):
        running.callback(worker.kill)
        assert worker.stdin
        assert worker.stdout
        worker.stdin.write(json.dumps(values, default=os.fspath).encode() + b"\n" + job.model)
        worker.stdin.flush()  # and left open: its end is the worker's
        for line in worker.stdout:
            message = json.loads(line)
            if "fraction" in message:
                report(message["fraction"])
        code = worker.wait()
        errors.seek(0)
        last = errors.read().decode(errors="replace").strip().split("\n")[-1]
    if "error" in message:
        raise BuildError(message["error"])
    if "facts" not in message:
        raise BuildError(f"{flavour} could not build {job.path.name}: its process ended with {code} {last}".rstrip())
    return EngineFacts(**message["facts"])


def work() -> None:
    """A worker: one job in, lines of JSON out."""
    source, out = sys.stdin.buffer, sys.stdout
    sys.stdout = sys.stderr  # other output must not mix with our lines
    values = json.loads(source.readline())
    flavour = values.pop("flavour")
    values |= {
        "model": source.read(values["model"]),
        "flags": BuildFlags(**values["flags"]),
        "profiles": tuple(values["profiles"]),
        "targets": tuple(values["targets"]),
        **{name: Path(values[name]) for name in ("path", "timings", "file") if values[name] is not None},
    }
    threading.Thread(target=end_with_caller, daemon=True).start()

    def send(**what: Any) -> None:
        out.write(json.dumps(what) + "\n")
        out.flush()

    try:
        facts = build_here(load_tensorrt(flavour), EngineJob(**values), lambda fraction: send(fraction=fraction))
        send(facts=dataclasses.asdict(facts))
    except BuildError as error:
        send(error=str(error))


def end_with_caller() -> None:
    os.read(sys.stdin.fileno(), 1)  # nothing more is sent: this returns when the caller has ended
    os._exit(1)


if __name__ == "__main__":
    work()

"""Blocks of a corpus decoded by the workers of a Ray cluster. Ray Data places the workers and replaces lost ones.

A worker opens the model once, reads its blocks, decodes them and writes their shards itself; what goes over Ray is a
few hundred bytes a block. Every worker holds one GPU or some CPUs, and at least one CPU of the cluster stays free:
Ray hangs where its actors take all of them (docs/DEPLOY.md).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seq2engine.common.progress import Progress, silent
from seq2engine.errors import RequestError, Seq2EngineError, SessionError, UsageError, missing_package

from ..text.lines import Line
from .corpus import Block, lines_of
from .shards import Record, missing_blocks, remove_unfinished, shard_path, write_shard

LOCAL, AUTO = "local", "auto"
PATIENCE = 10.0  # seconds to wait for the head of a cluster to answer at all
TASKS_PER_WORKER = 16  # at least this many groups of blocks, so that all workers end at about the same time
FEWEST_TASKS = 200
START = "ray start --head, and on other machines: ray start --address HOST:PORT"

MOST_CORES = 4  # default for a worker: decoding does not scale well beyond

Decode = Callable[[Iterable[Line]], Iterable[Record]]
OpenDecode = Callable[[int | None], Decode]  # given the threads of a worker; None is all it finds


@dataclass(frozen=True)
class ClusterOptions:
    """`address` is local (this machine alone), auto (the cluster this machine belongs to) or HOST:PORT of its head."""

    address: str
    cores: int | None = None  # CPUs of each worker that has no GPU; None is 4, or fewer where nodes are smaller
    gpus: bool = False  # a worker for every GPU


def check_address(address: str) -> None:
    if address not in (LOCAL, AUTO) and not re.fullmatch(r"(ray://)?[\w.-]+:\d{1,5}", address):
        raise UsageError(f"--cluster {address!r}, expected local, auto or HOST:PORT of the head, such as 10.0.0.1:6379")


def decode_blocks(
    open_decode: OpenDecode,
    blocks: Sequence[Block],
    out: Path,
    options: ClusterOptions,
    progress: Progress = silent,
) -> int:
    """Decodes the blocks whose shards are not there yet; gives how many lines that were.

    `open_decode` is called once by every worker; it must be picklable and give the same records everywhere. The first
    failure that is not one line's own ends the job; what is written stays, and the same call goes on from there.
    """
    missing = missing_blocks(out, blocks)
    total = sum(block.count for block in blocks)
    done = total - sum(blocks[number].count for number in missing)
    decoded = 0
    if missing:
        progress("decode", done / total, "starting Ray")
        with connected(options) as ray, redirect_stdout(sys.stderr):  # Ray would print lost machines among the results
            workers = workers_of(ray.nodes(), options)
            for row in results(ray, open_decode, rows_of(out, blocks, missing), workers):
                decoded += row["lines"]
                progress("decode", (done + decoded) / total, f"{workers.count} workers")
    progress("decode", 1.0)
    remove_unfinished(out)
    return decoded


def rows_of(out: Path, blocks: Sequence[Block], numbers: Iterable[int]) -> list[dict[str, str]]:
    """A block as rows for Ray Data. As text: Ray would infer types, and a missing column is None."""
    return [
        {
            "shard": str(shard_path(out.absolute(), number, blocks[number])),
            "block": json.dumps(dataclasses.asdict(blocks[number])),
        }
        for number in numbers
    ]


def results(
    ray: Any, open_decode: OpenDecode, rows: list[dict[str, str]], workers: Workers
) -> Iterator[Mapping[str, Any]]:
    """A row for every shard that was written, as they come; a failure is raised."""
    from ray.data import ActorPoolStrategy, DataContext
    from ray.exceptions import RayError

    context = DataContext.get_current()
    context.enable_progress_bars = context.enable_operator_progress_bars = False
    pieces = min(len(rows), max(FEWEST_TASKS, TASKS_PER_WORKER * workers.count))
    held: dict[str, Any] = {"num_gpus": 1} if workers.cores is None else {"num_cpus": workers.cores}
    decoded = ray.data.from_items(rows, override_num_blocks=pieces).map(
        BlockWorker,
        fn_constructor_args=(open_decode, workers.cores),
        compute=ActorPoolStrategy(size=workers.count),
        **held,
    )
    try:
        for row in decoded.iter_rows():
            if row["failure"]:
                raise UsageError(row["failure"]) if row["kind"] == UsageError.__name__ else RequestError(row["failure"])
            yield row
    except RayError as error:
        raise SessionError(f"the cluster gave up ({last_line(error)}); run it again, it goes on from here") from error


class BlockWorker:
    """One worker: opens the model at its first block, then decodes block after block."""

    def __init__(self, open_decode: OpenDecode, threads: int | None):
        self.open_decode, self.threads = open_decode, threads
        self.decode: Decode | None = None

    def __call__(self, row: dict[str, str]) -> dict[str, Any]:
        path, block = Path(row["shard"]), Block(**json.loads(row["block"]))
        answer = {"shard": path.name, "lines": block.count, "failure": "", "kind": ""}
        if path.is_file():  # written already, before the first machine was lost
            return answer
        try:
            if self.decode is None:
                self.decode = self.open_decode(self.threads)
            lines, _ = write_shard(path, self.decode(lines_of(block)))
        except Seq2EngineError as error:
            return {**answer, "failure": str(error), "kind": type(error).__name__}
        except OSError as error:
            if error.strerror is None:
                raise
            return {**answer, "failure": f"{error.filename or path}: {error.strerror} on {socket.gethostname()}"}
        if lines != block.count:
            path.unlink()
            changed = f"{block.path} has {lines} lines where {block.count} were counted"
            return {**answer, "failure": f"{changed}: it was changed; start again with it as it is"}
        return answer


@contextmanager
def connected(options: ClusterOptions) -> Iterator[Any]:
    """Ray, connected to a cluster; an existing connection is kept."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # its log messages are not about the job
    ray = ray_package()
    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if ray.is_initialized():
        yield ray
        return
    check_reachable(options.address)
    more: dict[str, Any] = {"address": options.address}
    if options.address == LOCAL:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        more |= {"num_cpus": cores + 1, "include_dashboard": False}  # one more than there are: see `workers_of`
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, configure_logging=False, **more)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise SessionError(
            f"no Ray cluster at {options.address} ({last_line(error)}); start one with: {START}"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def check_reachable(address: str) -> None:
    """Raises at once where nothing listens; Ray itself would try for a minute."""
    if address in (LOCAL, AUTO):
        return
    host, _, port = address.removeprefix("ray://").partition(":")
    try:
        socket.create_connection((host, int(port)), PATIENCE).close()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise SessionError(f"nothing answers at {address} ({why}); start a Ray cluster with: {START}") from error


def ray_package() -> Any:
    try:
        import ray
        import ray.data
    except ModuleNotFoundError as error:
        if missing := missing_package(error, "run --cluster"):
            raise missing from error
        raise
    return ray


@dataclass(frozen=True)
class Workers:
    count: int
    cores: int | None  # None: each has a GPU


def workers_of(nodes: Sequence[Mapping[str, Any]], options: ClusterOptions) -> Workers:
    """How many workers the nodes of a cluster hold, while one CPU somewhere stays free for Ray's own tasks."""
    alive = [node.get("Resources", {}) for node in nodes if node.get("Alive")]
    if options.gpus:
        count = sum(int(node.get("GPU", 0)) for node in alive)
        if not count:
            raise SessionError("the cluster has no GPU; start Ray on machines that have one, or take another backend")
        return Workers(count, None)
    cpus = [int(node.get("CPU", 0)) for node in alive]
    cores = options.cores or max(1, min(MOST_CORES, max(cpus, default=0) - 1))
    count = sum(cpu // cores for cpu in cpus)
    if sum(cpus) - count * cores < 1:
        count -= 1
    if count < 1:
        raise SessionError(
            f"a worker of {cores} cores and one free CPU do not fit a cluster of {', '.join(map(str, cpus)) or 'no'} "
            "CPUs; ask for fewer with --cores, or add a machine"
        )
    return Workers(count, cores)


def last_line(error: BaseException) -> str:
    """The last line of an error's text, where Ray has its reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__

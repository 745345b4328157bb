"""`run --cluster` without Ray: one worker, in this process, takes all blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from seq2engine.errors import RequestError
from seq2engine.runtime.cluster import ray_data

CLUSTER = "--cluster local --shard 2 --keep-order --quiet"


@contextmanager
def one_worker() -> Iterator[None]:
    with (
        patch.object(ray_data, "ray_package", lambda: None),
        patch.object(ray_data, "connected", connected),
        patch.object(ray_data, "workers_of", lambda nodes, options: SimpleNamespace(count=1, cores=1)),
        patch.object(ray_data, "results", results),
    ):
        yield


@contextmanager
def connected(options: ray_data.ClusterOptions) -> Iterator[Any]:
    yield SimpleNamespace(nodes=list)


def results(
    ray: Any, open_decode: ray_data.OpenDecode, rows: list[dict[str, str]], workers: Any
) -> Iterator[Mapping[str, Any]]:
    """As Ray gives them; but an exception of a worker, of which Ray shows the last line, is raised as it is."""
    worker = ray_data.BlockWorker(open_decode, workers.cores)
    for row in rows:
        done = worker(row)
        if done["failure"]:
            raise RequestError(done["failure"])
        yield done

"""The same load through a real Triton server: python -m seq2engine.benchmarks.serving.through_triton OUT.html

One server holds all models (triton_models.py), each with the same number of threads; a client process sends Poisson
arrivals over gRPC. Times are wall-clock times and include clients and the server's own work, so run it on an idle
machine; requests per second of the server's CPU time are reported as well, which other work hardly affects.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from seq2engine.errors import ConfigError
from seq2engine.export.artifact.bundle import open_bundle
from seq2engine.exporting import onnx_from_model
from seq2engine.model.checkpoint import random_model

from .load import Measured, poisson_arrivals
from .ragged import LENGTHS, SMALL, ragged_sources
from .run import CONTINUOUS, KEPT, ONE, WHOLE, arguments_parser, result_of_arms, write_report
from .triton_models import ModelSettings, write_models
from .triton_server import MISSING, PYTHON, TritonServer, ending_by_sigterm, present

CLIENT = Path(__file__).parent / "triton_load.py"
MODELS = {ONE: "one", KEPT: "kept", WHOLE: "whole", CONTINUOUS: "continuous"}
WARM, WARM_RATE = 8, 1000.0  # requests before anything is measured
TICK = 0.01  # seconds, the resolution of CPU time


class TritonLoad:
    """Measures one arm at a time on a server that has all of them."""

    def __init__(self, server: TritonServer, longest: int):
        self.server, self.longest = server, longest
        self.per_cpu_second: dict[str, list[float]] = {arm: [] for arm in MODELS}  # requests, where all come at once

    def __call__(self, arm: str, sources: Sequence[Sequence[int]], rate: float, seed: int) -> Measured:
        due, ours = poisson_arrivals(rate, len(sources), seed), arm == CONTINUOUS
        asked = {
            "address": f"127.0.0.1:{self.server.grpc}",
            "model": MODELS[arm],
            "streams": ours,  # a decoupled model answers in a stream only
            "parameters": {"max_length": self.longest, "scores": False} if ours else None,
            "width": 0 if ours else self.longest,
            "sources": sources,
            "due": due.tolist(),
        }
        before = self.server.cpu_seconds()
        done = subprocess.run([str(PYTHON), str(CLIENT)], input=json.dumps(asked), capture_output=True, text=True)
        if done.returncode:
            raise ConfigError(f"{arm} failed under load: {done.stderr.strip()}")
        if np.isinf(rate):
            spent = self.server.cpu_seconds() - before
            self.per_cpu_second[arm].append(len(sources) / max(spent, TICK))
        found = json.loads(done.stdout)
        return Measured(rate, due, np.array(found["done"]), tuple(map(tuple, found["tokens"])))


def main() -> None:
    args = arguments_parser("Load benchmark of the models on a Triton server").parse_args()
    if not present():
        raise SystemExit(f"error: {MISSING}")
    with ending_by_sigterm(), tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        bundle = (
            onnx_from_model(random_model(SMALL, 0), work / "b", ("fp32",))
            if args.bundle is None
            else open_bundle(args.bundle)
        )
        lengths = LENGTHS[args.lengths]
        longest = min(lengths.most, bundle.config.max_source, bundle.config.max_target)
        settings = ModelSettings(args.precision, args.threads, args.rows, longest)
        write_models(bundle.root.absolute(), settings, work / "repository")
        server = TritonServer(work / "repository", work, *MODELS.values())
        try:
            server.wait()
            measure = TritonLoad(server, longest)
            sources = ragged_sources(bundle.config, args.count, lengths=lengths)
            for arm in MODELS:
                measure(arm, sources[:WARM], WARM_RATE, 0)
            result = result_of_arms(measure, tuple(MODELS), sources, args.rounds, args.shares)
            result = dataclasses.replace(result, per_cpu_second=measure.per_cpu_second)
        finally:
            server.kill()
    where = "tritonserver, gRPC clients on the same machine, wall-clock seconds"
    write_report(args, result, bundle.config, where)


if __name__ == "__main__":
    main()

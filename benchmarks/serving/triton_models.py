"""The models of the load benchmark on a Triton server, as a repository: ours, and two that decode whole batches.

    continuous   what `seq2engine triton` writes
    whole        Triton's dynamic batcher over a model that calls `generate` for what it is given
    kept         the same with finished sources kept in the batch until it ends, as in most libraries' decodes
    one          the first with one request at a time

All end their outputs as RaggedSession does, so that lengths are mixed and equal.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from seq2engine.errors import ConfigError

from .arms import decoded_whole, decoded_with_kept_rows

CONTINUOUS_PY = """from seq2engine.benchmarks.serving.ragged import RaggedSession
from seq2engine.export.artifact.bundle import open_bundle
from seq2engine.triton import backend
from seq2engine.triton.backend import TritonPythonModel


def ragged(bundle, *options, **more):
    model = load(bundle, *options, **more)
    precision = model.session.precision
    model.session.close()
    model.session = RaggedSession.from_bundle(open_bundle(bundle), precision, threads={threads})
    return model


load, backend.load = backend.load, ragged
"""

WHOLE_PY = """import numpy as np
import triton_python_backend_utils as pb_utils
from seq2engine.benchmarks.serving.arms import decoded_whole, decoded_with_kept_rows
from seq2engine.benchmarks.serving.ragged import RaggedSession
from seq2engine.export.artifact.bundle import open_bundle
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.triton.tensors import array_of, tensor_of


class TritonPythonModel:
    def initialize(self, args):
        self.session = RaggedSession.from_bundle(open_bundle({bundle!r}), {precision!r}, threads={threads})
        self.options = SearchOptions(max_length={longest}, scores=False)

    def execute(self, requests):
        rows = [array_of(pb_utils.get_input_tensor_by_name(one, "ids")).reshape(-1) for one in requests]
        found = {decode}(self.session, [row[row >= 0].tolist() for row in rows], self.options)
        return [
            pb_utils.InferenceResponse([tensor_of("tokens", np.array([nbest[0].tokens], dtype=np.int64))])
            for nbest in found
        ]
"""

WHOLE_CONFIG = """name: "{name}"
backend: "python"
max_batch_size: {rows}
input [ {{ name: "ids" data_type: TYPE_INT64 dims: [ {width} ] }} ]
output [ {{ name: "tokens" data_type: TYPE_INT64 dims: [ -1 ] }} ]
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
{batching}
"""


@dataclass(frozen=True)
class ModelSettings:
    """How all models run: sources and outputs have at most `longest` tokens."""

    precision: str
    threads: int
    rows: int
    longest: int


def write_models(bundle: Path, settings: ModelSettings, repository: Path) -> None:
    flags = ("--name", "continuous", "--precision", settings.precision, "--threads", str(settings.threads), "--ids")
    more = ("--batch", str(settings.rows), "--instances", "1", "--queue", "100000", "--timeout", "3600")
    command = [sys.executable, "-m", "seq2engine", "triton", str(bundle), str(repository), *flags, *more]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"the model repository was not written: {done.stderr.strip()}")
    (repository / "continuous" / "1" / "model.py").write_text(CONTINUOUS_PY.format(threads=settings.threads))
    for name, rows, decode in (
        ("whole", settings.rows, decoded_whole),
        ("kept", settings.rows, decoded_with_kept_rows),
        ("one", 1, decoded_whole),
    ):
        folder = repository / name / "1"
        folder.mkdir(parents=True)
        values = {**dataclasses.asdict(settings), "bundle": str(bundle), "decode": decode.__name__}
        (folder / "model.py").write_text(WHOLE_PY.format(**values))
        batching = "dynamic_batching { }" if rows > 1 else ""
        text = WHOLE_CONFIG.format(name=name, rows=rows, width=settings.longest, batching=batching)
        (folder.parent / "config.pbtxt").write_text(text)

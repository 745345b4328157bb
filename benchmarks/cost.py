"""Costs of an arm besides time: the peak memory of a process that only runs it, and the time of its export.

As a program (`python -m seq2engine.benchmarks.cost REQUEST`) it is that process.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from seq2engine.common.measured import user_cache
from seq2engine.errors import SessionError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.runtime.generate import generate
from seq2engine.runtime.model_options import measured_options
from seq2engine.runtime.opening import open_session

from .cases import Case, sources_for
from .options import Plan
from .peers.worker import peak_bytes
from .result import Arm
from .timed_decode import case_options, fixed_length


def peak_of_arm(plan: Plan, arm: Arm, provider: str | None) -> int:
    """Peak bytes of a new process that opens the arm's session and decodes every case, with free and fixed length."""
    request = {
        "bundle": str(plan.bundle.root),
        "backend": arm.backend,
        "precision": arm.precision,
        "threads": plan.threads_of(arm.backend),
        "provider": provider,
        "cases": [dataclasses.asdict(case) for case in plan.cases],
        "natural": [dataclasses.asdict(batch) for batch in natural_batches(plan)],
        "seed": plan.options.seed,
        "draft": arm.draft,
    }
    command = [sys.executable, "-m", "seq2engine.benchmarks.cost", json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        name = f"{arm.backend} {arm.precision}"
        raise SessionError(f"{name} failed in the process that measures its memory: {reason}")
    return int(done.stdout.splitlines()[-1])


@dataclasses.dataclass(frozen=True)
class NaturalBatch:
    """The batch of a natural workload that takes the most memory."""

    beam: int
    sources: list[list[int]]


def natural_batches(plan: Plan) -> list[NaturalBatch]:
    references, natural = plan.options.references, plan.options.natural
    if not natural or references is None:
        return []
    tokenizer = plan.bundle.tokenizer()
    sources = [tokenizer.encode_source(text, plan.options.source_language) for text in references]
    longest = sorted(sources, key=len)
    return [NaturalBatch(each.beam, longest[-each.batch :]) for each in natural]


def decode_all(request: dict[str, Any]) -> None:
    with open_session(
        request["bundle"],
        request["backend"],
        request["precision"],
        request["threads"],
        provider=request["provider"],
        draft=request["draft"],
        cache=user_cache(),
    ) as session:
        for case in (Case(**values) for values in request["cases"]):
            sources = sources_for(case, session.config, request["seed"])
            options = case_options(session, case)
            generate(session, sources, options)
            generate(session, sources, fixed_length(options))
        for batch in (NaturalBatch(**values) for values in request["natural"]):
            generate(session, batch.sources, measured_options(session, batch.beam))


def export_seconds(bundle: Bundle, precision: str) -> float:
    """How long an export of the bundle's reference weights in this precision takes, calibration included."""
    from seq2engine.exporting import onnx_from_model
    from seq2engine.model.checkpoint import load_checkpoint

    bundle.reference_path()
    model = load_checkpoint(bundle.root)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        onnx_from_model(model, Path(folder) / "again", (precision,), bundle.cache_form)
        return time.perf_counter() - started


def build_seconds(bundle: Bundle, precision: str) -> float:
    """Build time of the engines, from their passport."""
    from seq2engine.runtime.trt.selection import choose_engine

    return sum(entry.build_seconds for entry in choose_engine(bundle, precision, None)[1].engines.values())


if __name__ == "__main__":
    decode_all(json.loads(sys.argv[1]))
    print(peak_bytes())

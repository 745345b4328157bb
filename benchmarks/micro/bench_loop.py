"""The cost of the decode loop around the graph, on the shipped model, which is small; for pytest-benchmark.

A whole decode is timed; `extra_info` has the loop in percent of a step, from the same runs: all that is neither
encoder nor session.step, which is search, compaction and copies.

Run with: pytest benchmarks/micro/bench_loop.py --benchmark-only -o python_files='bench_*.py'
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

import pytest

from seq2engine.benchmarks.cases import Case, sources_for
from seq2engine.benchmarks.timed_decode import Split, fixed_length, timed_decode
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.exporting import onnx_from_model
from seq2engine.model.checkpoint import load_checkpoint
from seq2engine.model.shipped import shipped_checkpoint
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.session import Session

PRECISIONS = ("fp32", "w8a8")
AROUND = ("search", "compaction", "copies")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    shipped = shipped_checkpoint("g2p")
    folder = tmp_path_factory.mktemp("bench") / "g2p"
    return onnx_from_model(load_checkpoint(shipped), folder, PRECISIONS, companions=shipped)


@pytest.fixture(scope="module", params=PRECISIONS)
def session(bundle: Bundle, request: pytest.FixtureRequest) -> Iterator[Session]:
    with open_session(bundle, "onnxruntime", request.param, threads=1) as opened:
        yield opened


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("batch", [1, 8])
def test_loop(benchmark: Any, session: Session, batch: int, beam: int) -> None:
    case = Case("loop", batch=batch, beam=beam, source=16, target=32)
    sources = sources_for(case, session.config)
    options = fixed_length(SearchOptions(max_length=case.target, beam=beam))
    splits: list[Split] = []
    decode = lambda: splits.append(timed_decode(session, sources, options))  # noqa: E731
    benchmark.pedantic(decode, rounds=30, warmup_rounds=3)
    beside = [100 * sum(split[piece] for piece in AROUND) / split["step"] for split in splits]
    benchmark.extra_info["loop, % of a step"] = round(median(beside[3:]), 1)
    assert len(splits) == 33

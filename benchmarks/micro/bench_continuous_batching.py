"""A ragged corpus in fixed batches, in batches by length, and by continuous batching, for pytest-benchmark.

Run with: pytest benchmarks --benchmark-only -o python_files='bench_*.py'
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from seq2engine.benchmarks.serving.ragged import COUNT, LONGEST, SMALL, TINY, RaggedSession, ragged_sources
from seq2engine.exporting import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.runtime.generate import generate
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step import Hypothesis
from seq2engine.runtime.session import Session
from seq2engine.runtime.text.batching import batches_by_length
from seq2engine.runtime.text.continuous_batching import translate_many

BATCH = 32


def fixed(session: Session, sources: list[list[int]], options: SearchOptions) -> dict[int, list[Hypothesis]]:
    starts = range(0, len(sources), BATCH)
    found = [nbest for start in starts for nbest in generate(session, sources[start : start + BATCH], options)]
    return dict(enumerate(found))


def by_length(session: Session, sources: list[list[int]], options: SearchOptions) -> dict[int, list[Hypothesis]]:
    found: dict[int, list[Hypothesis]] = {}
    for batch in batches_by_length([len(source) for source in sources], BATCH):
        found.update(zip(batch, generate(session, [sources[i] for i in batch], options), strict=True))
    return found


def fed(session: Session, sources: list[list[int]], options: SearchOptions) -> dict[int, list[Hypothesis]]:
    return dict(translate_many(session, sources, options, BATCH))


def fed_in_order(session: Session, sources: list[list[int]], options: SearchOptions) -> dict[int, list[Hypothesis]]:
    return dict(translate_many(session, sources, options, BATCH, window=0))


ARMS = {"fixed": fixed, "by-length": by_length, "fed": fed, "fed-in-order": fed_in_order}


@pytest.fixture(scope="module", params=[TINY, SMALL], ids=["tiny", "small"])
def session(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Session]:
    bundle = onnx_from_model(random_model(request.param), tmp_path_factory.mktemp("bench") / "ragged")
    with RaggedSession.from_bundle(bundle, "fp32", threads=1) as opened:
        yield opened


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("arm", ARMS)
def test_ragged(benchmark: Any, session: Session, arm: str, beam: int) -> None:
    sources = ragged_sources(session.config)
    options = SearchOptions(max_length=LONGEST, beam=beam)
    found = benchmark.pedantic(ARMS[arm], (session, sources, options), rounds=3)
    assert sorted(found) == list(range(COUNT))

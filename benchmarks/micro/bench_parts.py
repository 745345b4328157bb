"""The parts of a decode on a tiny model, for pytest-benchmark: where a change to the runtime shows first.

Run with: pytest benchmarks --benchmark-only -o python_files='bench_*.py'
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from seq2engine.benchmarks.cases import Case, sources_for
from seq2engine.benchmarks.timed_decode import case_options, fixed_decode, fixed_length, repeated_step
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.exporting import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.runtime.encoder_inputs import padded
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.session import Session
from seq2engine.runtime.steps.tree_cache import TreeStep

CASE = Case("8x4x32x32", batch=8, beam=4, source=32, target=32)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return onnx_from_model(random_model("tiny"), tmp_path_factory.mktemp("bench") / "tiny")


@pytest.fixture(scope="module", params=["torch", "onnxruntime"])
def session(bundle: Bundle, request: pytest.FixtureRequest) -> Iterator[Session]:
    with open_session(bundle, request.param, threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def sources(bundle: Bundle) -> list[list[int]]:
    return sources_for(CASE, bundle.config)


def test_encoder(benchmark: Any, session: Session, sources: list[list[int]]) -> None:
    state = benchmark(session.encode, *padded(sources, session.config.pad_id))
    assert session.tensor(state, "encoder_states").shape == (CASE.batch, CASE.source, session.config.d_model)


def test_step(benchmark: Any, session: Session, sources: list[list[int]]) -> None:
    options = SearchOptions(max_length=CASE.target, beam=CASE.beam)
    trail = fixed_decode(session, sources, options).trail
    answer = benchmark(repeated_step(session, *padded(sources, session.config.pad_id), options, trail))
    assert answer.logits.shape == (CASE.batch, CASE.beam, session.config.target_vocab)


def test_end_to_end(benchmark: Any, session: Session, sources: list[list[int]]) -> None:
    found = benchmark(generate, session, sources, fixed_length(case_options(session, CASE)))
    assert all(len(nbest[0].tokens) == CASE.target for nbest in found)


def test_compaction(benchmark: Any, session: Session, sources: list[list[int]]) -> None:
    """A cache of 32 slots of which a quarter is alive: every beam continued the first one, every time."""
    ids, mask = padded(sources, session.config.pad_id)
    tokens = np.full((CASE.batch, CASE.beam), 5, dtype=np.int64)
    steps = []

    def filled() -> tuple[tuple[Any, ...], dict[str, Any]]:
        step = TreeStep(session, session.encode(ids, mask), CASE.batch, CASE.beam, CASE.target)
        for _ in range(8):
            step(tokens, np.zeros_like(tokens))
        steps.append(step)
        return (step, step.capacity), {}

    benchmark.pedantic(TreeStep.compact, setup=filled, rounds=20, warmup_rounds=2)
    assert (steps[-1].used == 7 + CASE.beam).all()  # one slot of every step but the last, and all of the last

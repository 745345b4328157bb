"""A ragged corpus in fixed batches, in batches by length, and by continuous batching, for pytest-benchmark.

Run with: pytest benchmarks --benchmark-only -o python_files='bench_*.py'
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from seq2engine.benchmarks.cases import ordinary_ids
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.config import PRESETS, ModelConfig
from seq2engine.runtime.generate import generate
from seq2engine.runtime.ort.session import OrtSession
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step import Hypothesis
from seq2engine.runtime.search.step_output import StepOutput
from seq2engine.runtime.session import Session, State
from seq2engine.runtime.text.batching import batches_by_length
from seq2engine.runtime.text.continuous_batching import translate_many

COUNT, BATCH, LONGEST, MEAN = 256, 32, 200, 24
TINY = dataclasses.replace(PRESETS["tiny"], max_source=LONGEST, max_target=LONGEST)
SMALL = dataclasses.replace(
    TINY, encoder_layers=3, decoder_layers=3, d_model=256, d_ff=1024, source_vocab=4000, target_vocab=4000
)


class RaggedSession(OrtSession):
    """Ends every output after 0.6 to 1.4 times the length of its source, by the source's tokens."""

    def encode(self, source_ids: np.ndarray, source_mask: np.ndarray) -> State:
        state = super().encode(source_ids, source_mask)
        share = 0.6 + 0.8 * (source_ids.sum(axis=1) % 101) / 100  # padding adds nothing
        state["ends"] = np.clip(np.rint(share * source_mask.sum(axis=1)), 1, LONGEST)
        return state

    def step(
        self, state: State, tokens: np.ndarray, position: np.ndarray, write_index: np.ndarray, self_mask: np.ndarray
    ) -> StepOutput:
        logits = super().step(state, tokens, position, write_index, self_mask).logits
        logits[..., self.config.end_id] = np.where(position + 1 >= state["ends"], 1e3, -1e3)[:, None]
        return StepOutput(logits)

    def replace(self, state: State, rows: np.ndarray, newcomers: State, width: int) -> None:
        super().replace(state, rows, newcomers, width)
        state["ends"][rows] = newcomers["ends"]


def ragged_sources(config: ModelConfig, count: int = COUNT, seed: int = 0) -> list[list[int]]:
    """Lengths are lognormal with a mean of 24 tokens and at most 200, in no order."""
    rng = np.random.default_rng(seed)
    spread = 0.8
    lengths = np.clip(np.rint(rng.lognormal(np.log(MEAN) - spread**2 / 2, spread, count)), 1, LONGEST).astype(int)
    return [rng.choice(ordinary_ids(config), length).tolist() for length in lengths]


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

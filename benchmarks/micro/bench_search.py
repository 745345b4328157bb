"""Search without a model, for pytest-benchmark: the cost of the loop at real vocabulary sizes.

Run with: pytest benchmarks --benchmark-only -o python_files='bench_*.py'
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from seq2engine.runtime.search.beam import beam_search
from seq2engine.runtime.search.greedy import greedy_search
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step import Special, drain
from seq2engine.runtime.search.step_output import StepOutput

VOCAB, LENGTH = 32000, 8
SPECIAL = Special(start=1, end=-1)  # no source ends early


class PrecomputedStep:
    """A Step that returns precomputed logits, so that only the search is timed."""

    def __init__(self, batch: int, beam: int):
        shape = (2, batch, beam, VOCAB)
        self.answers = np.random.default_rng(0).normal(0, 2, shape).astype(np.float32)
        self.calls = 0

    def __call__(self, tokens: np.ndarray, parents: np.ndarray) -> StepOutput:
        self.calls += 1
        return StepOutput(self.answers[self.calls % 2])

    def keep(self, rows: np.ndarray) -> None:
        raise AssertionError("no source is done before the others")

    def attention(self) -> np.ndarray:
        raise AssertionError("this search reads no cross-attention weights")


@pytest.mark.parametrize("batch", [1, 8])
def test_greedy(benchmark: Any, batch: int) -> None:
    step, options = PrecomputedStep(batch, 1), SearchOptions(max_length=LENGTH)
    found = benchmark(lambda: drain(greedy_search(step, batch, SPECIAL, options)))
    assert [len(nbest[0].tokens) for nbest in found] == [LENGTH] * batch


@pytest.mark.parametrize("batch", [1, 8])
def test_beam(benchmark: Any, batch: int) -> None:
    step, options = PrecomputedStep(batch, 4), SearchOptions(max_length=LENGTH, beam=4)
    found = benchmark(lambda: drain(beam_search(step, batch, SPECIAL, options)))
    assert [len(nbest[0].tokens) for nbest in found] == [LENGTH] * batch

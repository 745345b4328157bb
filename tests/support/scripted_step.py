"""A decoder whose every answer is written down, so that what a search should find can be worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from seq2engine.runtime.search.step import Emitted, Hypothesis, Search, drain
from seq2engine.runtime.search.step_output import StepOutput
from support.rounding import of_written_logits

Prefix = tuple[int, ...]  # the tokens chosen so far, the start token not among them
Script = Callable[[Prefix], np.ndarray]  # prefix -> logits [V]


def from_table(table: Mapping[Prefix, Sequence[float]], otherwise: Sequence[float]) -> Script:
    """A script that reads probabilities from a table; an impossible token has probability 0."""

    def script(prefix: Prefix) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return np.log(np.array(table.get(prefix, otherwise), dtype=np.float32))

    return script


def from_seed(seed: int, vocab: int, spread: float = 2.0) -> Script:
    """A script of random logits that depend on the whole prefix, and on nothing else."""

    def script(prefix: Prefix) -> np.ndarray:
        noise = np.random.default_rng([seed, len(prefix), *prefix]).normal(size=vocab)
        return (spread * noise).astype(np.float32)

    return script


def by_hand(value: float | Sequence[float], tokens: int = 1, vocab: int = 8, largest: float = 5.0) -> Any:
    """The log-probability of this many tokens together, worked out by hand, and what a search may make of it.

    Scripts are rounded to fp32. A table of at most `vocab` probabilities has logits of at most 5, unless one is tiny.
    """
    return pytest.approx(value, rel=0, abs=of_written_logits(vocab, largest).score(tokens))


SEEDED = {"vocab": 24, "largest": 12.0}  # of `from_seed` with its usual spread: 6 standard deviations


class ScriptedStep:
    """A Step over one script per source. It holds the caller to the contract of `Step` and notes what it was asked."""

    def __init__(self, scripts: Sequence[Script], start: int = 0):
        self.start = start
        self.scripts = list(scripts)
        self.prefixes: list[list[Prefix]] | None = None  # of every source and beam, None before the first call
        self.batches: list[int] = []  # B of every call
        self.kept: list[list[int]] = []  # rows of every keep()
        self.answer = np.zeros(0)

    def __call__(self, tokens: np.ndarray, parents: np.ndarray) -> StepOutput:
        self.answer[...] = np.nan  # logits are valid until the next call and not a moment longer
        assert tokens.shape == parents.shape
        assert np.issubdtype(tokens.dtype, np.integer)
        assert np.issubdtype(parents.dtype, np.integer)
        batch, beams = tokens.shape
        assert batch == len(self.scripts), f"{batch} rows, but {len(self.scripts)} sources were kept"
        if self.prefixes is None:
            assert (tokens == self.start).all()
            self.prefixes = [[()] * beams for _ in range(batch)]
        else:
            assert ((parents >= 0) & (parents < beams)).all()
            self.prefixes = [
                [(*before[parents[row, beam]], int(tokens[row, beam])) for beam in range(beams)]
                for row, before in enumerate(self.prefixes)
            ]
        self.batches.append(batch)
        self.answer = np.stack(
            [
                np.stack([script(prefix) for prefix in row])
                for script, row in zip(self.scripts, self.prefixes, strict=True)
            ]
        )
        assert ((tokens >= 0) & (tokens < self.answer.shape[-1])).all()
        return StepOutput(self.answer)

    def keep(self, rows: np.ndarray) -> None:
        assert self.prefixes is not None
        assert 0 < len(rows) < len(self.scripts), "a keep() that drops nobody, or everybody, is a wasted copy"
        assert (np.diff(rows) > 0).all()
        self.kept.append(rows.tolist())
        self.scripts = [self.scripts[row] for row in rows]
        self.prefixes = [self.prefixes[row] for row in rows]


def run(search: Search) -> tuple[list[list[Hypothesis]], list[Emitted]]:
    """What a search finds, and everything it emitted on the way."""
    emitted: list[Emitted] = []
    return drain(search, emitted.append), emitted

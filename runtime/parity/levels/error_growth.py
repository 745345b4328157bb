"""How errors grow with the steps: teacher forcing up to the maximum length, every layer's cache and the logits by step.

The oracle's own outputs are fed, but none may end: a model whose outputs are short is still driven to the last step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...generate import generate
from ...numerics.budgets import ErrorTally, TensorResult, ratio
from ...numerics.error_scale import EPSILON, errors_of, normalised, normalised_logits
from ...numerics.teacher_forcing import ForcedRun, forced_tokens
from ...search.options import SearchOptions
from ...session import Session

LOGITS = "logits"


@dataclass(frozen=True)
class Drift:
    """Relative L2 errors against the oracle, each element in units of its scale: of the keys and values that a step
    wrote, layer by layer, and of its logits. `floor` is the least that PyTorch's is put at: a fraction of a unit in the
    last place.
    """

    rows: tuple[str, ...]  # self_k.0, self_v.0, ..., logits
    reference: tuple[tuple[float, ...], ...]  # [rows][steps]
    candidate: tuple[tuple[float, ...], ...]
    floor: float

    @property
    def steps(self) -> int:
        return len(self.reference[0]) if self.reference else 0

    @property
    def ratios(self) -> np.ndarray:
        """The candidate's errors over PyTorch's, [rows, steps]."""
        pairs = zip(self.candidate, self.reference, strict=True)
        return np.array([[ratio(a, b, self.floor) for a, b in zip(*pair, strict=True)] for pair in pairs])


class SquaresByStep:
    """Sums of squares of errors and of the oracle, by step, over any number of batches."""

    def __init__(self, steps: int):
        self.wrong = np.zeros((2, steps))
        self.squares = np.zeros(steps)

    def add(self, step: int | slice, exact: np.ndarray, *others: np.ndarray) -> None:
        """Arrays of one step, or [B,T,...] of all of them, in units of their scales."""
        axes = tuple(axis for axis in range(exact.ndim) if isinstance(step, int) or axis != 1)
        with np.errstate(over="ignore"):
            self.squares[step] += np.square(exact).sum(axis=axes)
            for which, other in enumerate(others):
                self.wrong[which, step] += np.square(errors_of(exact, other)).sum(axis=axes)

    def relative(self, which: int) -> tuple[float, ...]:
        with np.errstate(invalid="ignore", divide="ignore"):
            return tuple(np.sqrt(self.wrong[which] / self.squares).tolist())


def drift_of(
    oracle: Session,
    reference: Session,
    candidate: Session,
    sources: Sequence[Sequence[int]],
    steps: int,
    batch: int,
) -> tuple[Drift, TensorResult]:
    """Errors by layer and step, and the logits of all steps as one tensor with a verdict."""
    layers = [f"self_{part}.{i}" for i in range(oracle.config.decoder_layers) for part in "kv"]
    sums = {name: SquaresByStep(steps) for name in (*layers, LOGITS)}
    precision = candidate.precision
    tally = ErrorTally(precision)
    options = SearchOptions(steps, min_length=steps)
    batches = -(-len(sources) // batch)
    for first in range(batches):
        rows = sources[first::batches]
        fed, _ = forced_tokens([found[0].tokens for found in generate(oracle, rows, options)], oracle.config)
        runs = [ForcedRun(session, rows, steps) for session in (oracle, reference, candidate)]
        for step in range(steps):
            exact, *others = (run.step(fed[:, step]) for run in runs)
            sums[LOGITS].add(step, *normalised_logits(exact, others, precision))
            tally.add_logits(exact, *others)
        for name in layers:  # one beam: slot t is what step t wrote
            exact, *others = (run.tensor(name).swapaxes(1, 2)[:, :steps] for run in runs)  # [B, T, H, E]
            flat = normalised(as_rows(exact), [as_rows(other) for other in others], precision)
            sums[name].add(slice(None), *(array.reshape(exact.shape) for array in flat))
    drift = Drift(
        rows=tuple(sums),
        reference=tuple(found.relative(0) for found in sums.values()),
        candidate=tuple(found.relative(1) for found in sums.values()),
        floor=EPSILON[precision] / 4,
    )
    return drift, tally.result("steps", "logits, to the last step")


def as_rows(cache: np.ndarray) -> np.ndarray:
    """[B,T,H,E] -> [B*T,H,E]: every position is a row of its own."""
    return cache.reshape(-1, *cache.shape[2:])

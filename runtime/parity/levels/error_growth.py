"""How errors grow with the step: teacher forcing up to the maximum length, every layer's KV cache and the logits.

The oracle's own outputs are fed without end tokens, so that a model with short outputs is run to the last step as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...numerics.budgets import ErrorTally, TensorResult, ratio
from ...numerics.error_scale import EPSILON, errors_of, normalised

LOGITS = "logits"


@dataclass(frozen=True)
class ErrorGrowth:
    """Relative L2 errors against the oracle, each element in units of its scale: of the keys and values that a step
    writes, by layer, and of its logits. PyTorch's error counts as at least `floor`, a fraction of a unit in the last
    place.
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
        self.squared_errors = np.zeros((2, steps))
        self.squares = np.zeros(steps)

    def add(self, step: int | slice, exact: np.ndarray, *others: np.ndarray) -> None:
        """Arrays of one step, or [B,T,...] of all of them, in units of their scales."""
        axes = tuple(axis for axis in range(exact.ndim) if isinstance(step, int) or axis != 1)
        with np.errstate(over="ignore"):
            self.squares[step] += np.square(exact).sum(axis=axes)
            for which, other in enumerate(others):
                self.squared_errors[which, step] += np.square(errors_of(exact, other)).sum(axis=axes)

    def relative(self, which: int) -> tuple[float, ...]:
        with np.errstate(invalid="ignore", divide="ignore"):
            return tuple(np.sqrt(self.squared_errors[which] / self.squares).tolist())


class ErrorGrowthTally:
    """Errors by layer and step, and the logits of all steps as one tensor with a verdict, over all batches."""

    def __init__(self, caches: Sequence[str], steps: int, precision: str):
        self.precision = precision
        self.caches = {name: SquaresByStep(steps) for name in caches}
        self.by_step = [ErrorTally(precision) for _ in range(steps)]  # of logits

    def add_cache(self, name: str, exact: np.ndarray, *others: np.ndarray) -> None:
        """The keys or values of all steps, [B,T,H,E]."""
        flat = normalised(as_rows(exact), [as_rows(other) for other in others], self.precision)
        self.caches[name].add(slice(None), *(array.reshape(exact.shape) for array in flat))

    def relative(self, which: int) -> tuple[tuple[float, ...], ...]:
        logits = tuple(tally.errors(which).relative for tally in self.by_step)
        return (*(sums.relative(which) for sums in self.caches.values()), logits)

    def result(self) -> ErrorGrowth:
        return ErrorGrowth((*self.caches, LOGITS), self.relative(0), self.relative(1), EPSILON[self.precision] / 4)

    def at_length(self) -> TensorResult:
        tally = ErrorTally(self.precision)
        for step in self.by_step:
            tally.merge(step)
        return tally.result("steps", "logits, to the last step")


def as_rows(cache: np.ndarray) -> np.ndarray:
    """[B,T,H,E] -> [B*T,H,E]: every position is a row of its own."""
    return cache.reshape(-1, *cache.shape[2:])

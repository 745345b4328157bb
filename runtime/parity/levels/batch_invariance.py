"""Batch invariance: the candidate against itself, with the same sources alone, in other batches and with more padding.

The oracle's outputs are fed to a sample as one batch, and again in other arrangements. The logits may differ by no more
than rounding explains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...encoder_inputs import encoder_inputs
from ...generate import generate
from ...numerics.budgets import WORST_FACTOR, ratio
from ...numerics.error_scale import EPSILON, errors_of, normalised_logits
from ...numerics.teacher_forcing import forced_tokens
from ...search.options import SearchOptions
from ...search.step import Emitted
from ...session import Session
from ...steps.tree_cache import TreeStep

SAMPLE = 8  # sources
STEPS = 16
COLUMNS = 7  # of padding, if the model takes as many


@dataclass(frozen=True)
class InvarianceResult:
    """One arrangement: how many sources keep their likeliest tokens, and the largest difference of a logit. The budget
    is 16 times PyTorch's largest error in the same logits; both are in units of the logit's scale.
    """

    arrangement: str
    sources: int
    equal: int
    difference: float
    budget: float

    @property
    def budgets(self) -> float:
        return ratio(self.difference, self.budget, 0.0)

    @property
    def reason(self) -> str:
        if self.difference <= self.budget:
            return ""
        if not math.isfinite(self.difference):
            return f"{self.arrangement}: logits are not finite"
        return f"{self.arrangement}: logits change by {self.difference:.2g} of their scale, budget {self.budget:.2g}"

    def __bool__(self) -> bool:
        return not self.reason


def invariance_of(
    oracle: Session,
    reference: Session,
    candidate: Session,
    sources: Sequence[Sequence[int]],
    longest: int,
    batch: int = SAMPLE,
) -> tuple[InvarianceResult, ...]:
    limits = candidate.limits
    rows = list(sources[: min(SAMPLE, batch)])
    everyone = list(range(len(rows)))
    targets, exact = outputs_with_logits(oracle, rows, min(longest, STEPS))
    together, rounded = (forced(session, rows, targets, [everyone]) for session in (candidate, reference))
    precision = candidate.precision
    error = max(EPSILON[precision], *(largest_error(a, a, b, precision) for a, b in zip(exact, rounded, strict=True)))
    arrangements = {"alone": ([[row] for row in everyone], 0)}
    if len(rows) > 2:
        backwards = everyone[::-1]
        arrangements["in other batches"] = ([backwards[::2], backwards[1::2]], 0)
    spare = min(COLUMNS, limits.source - max(map(len, rows)))
    if spare > 0:
        arrangements[f"with {spare} more columns of padding"] = ([everyone], spare)
    found = []
    for name, (batches, columns) in arrangements.items():
        apart = forced(candidate, rows, targets, batches, columns)
        pairs = list(zip(together, apart, strict=True))
        equal = sum(bool((a.argmax(axis=1) == b.argmax(axis=1)).all()) for a, b in pairs)
        most = max(largest_error(truth, a, b, precision) for truth, (a, b) in zip(exact, pairs, strict=True))
        found.append(InvarianceResult(name, len(rows), equal, most, WORST_FACTOR * error))
    return tuple(found)


def largest_error(exact: np.ndarray, first: np.ndarray, second: np.ndarray, precision: str) -> float:
    """Logits [T,V] -> the largest difference of two of them, in units of the oracle's scales."""
    _, one, other = normalised_logits(exact, (first, second), precision)
    return float(errors_of(one, other).max(initial=0.0))


def outputs_with_logits(
    oracle: Session, sources: Sequence[Sequence[int]], steps: int
) -> tuple[list[tuple[int, ...]], list[np.ndarray]]:
    """The oracle's outputs, and the logits [T,V] of each."""
    logits: list[list[np.ndarray]] = [[] for _ in sources]

    def note(emitted: Emitted) -> None:
        for source, row in zip(emitted.sources.tolist(), emitted.answer.logits[:, 0], strict=True):
            logits[source].append(row.copy())

    outputs = [found[0].tokens for found in generate(oracle, sources, SearchOptions(steps), note, logits=True)]
    return outputs, [np.stack(rows[: len(tokens)]) for rows, tokens in zip(logits, outputs, strict=True)]


def forced(
    session: Session,
    sources: Sequence[Sequence[int]],
    targets: Sequence[tuple[int, ...]],
    batches: Sequence[Sequence[int]],
    columns: int = 0,
) -> list[np.ndarray]:
    """The logits [T,V] of every source when `targets` are fed in these batches, with that many columns of padding."""
    found: list[np.ndarray] = [np.zeros(0)] * len(sources)
    for batch in batches:
        fed, counts = forced_tokens([targets[row] for row in batch], session.config)
        given, mask = encoder_inputs([sources[row] for row in batch], session.config)
        if columns:
            given = np.pad(given, ((0, 0), (0, columns)), constant_values=session.config.pad_id)
        state = session.encode(given, np.pad(mask, ((0, 0), (0, columns))))
        tree = TreeStep(session, state, len(batch), 1, fed.shape[1])
        parents = np.zeros((len(batch), 1), dtype=np.int64)
        by_step = [tree(fed[:, [step]], parents).logits[:, 0].copy() for step in range(fed.shape[1])]
        answers = np.stack(by_step, axis=1)  # [B, T, V]
        for row, logits, real in zip(batch, answers, counts, strict=True):
            found[row] = logits[real]
    return found

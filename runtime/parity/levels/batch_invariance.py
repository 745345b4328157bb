"""Does what a source gets depend on its company? The candidate against itself: alone, in other batches, padded more.

A sample is run once as one batch. The oracle's outputs are fed, and fed again in other arrangements; the logits may
differ by as much as rounding explains, and the likeliest token may change only where that much could turn it around.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...generate import generate, padded
from ...numerics.budgets import WORST_FACTOR, ratio
from ...numerics.error_scale import EPSILON, errors_of, normalised_logits
from ...numerics.teacher_forcing import forced_tokens
from ...search.options import SearchOptions
from ...search.step import Emitted
from ...session import Session
from ...tree_cache import TreeStep

SAMPLE = 8  # sources
STEPS = 16
COLUMNS = 7  # of padding, where the model takes as many


@dataclass(frozen=True)
class CompanyResult:
    """One arrangement: sources whose tokens stay the same, and the largest difference of a logit against its budget,
    which is 16 times the worst error that PyTorch makes in the same logits; both in units of the logit's scale.
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
        much = f"{self.difference:.2g}" if math.isfinite(self.difference) else "numbers that are not finite"
        return f"{self.arrangement}: logits move by {much} of their scale, where rounding explains {self.budget:.2g}"

    def __bool__(self) -> bool:
        return not self.reason


def companies_of(
    oracle: Session,
    reference: Session,
    candidate: Session,
    sources: Sequence[Sequence[int]],
    longest: int,
    batch: int = SAMPLE,
) -> tuple[CompanyResult, ...]:
    limits = candidate.limits
    rows = [list(source) for source in sources[: min(SAMPLE, batch)]]
    everyone = list(range(len(rows)))
    said, exact = outputs_with_logits(oracle, rows, min(longest, STEPS))
    together, rounded = (forced(session, rows, said, [everyone]) for session in (candidate, reference))
    precision = candidate.precision
    error = max(EPSILON[precision], *(largest_error(a, a, b, precision) for a, b in zip(exact, rounded, strict=True)))
    arrangements = {"alone": ([[row] for row in everyone], 0)}
    if len(rows) > 2:
        turned = everyone[::-1]
        arrangements["in other batches"] = ([turned[::2], turned[1::2]], 0)
    spare = min(COLUMNS, limits.source - max(map(len, rows)))
    if spare > 0:
        arrangements[f"with {spare} columns more of padding"] = ([everyone], spare)
    found = []
    for name, (batches, columns) in arrangements.items():
        apart = forced(candidate, rows, said, batches, columns)
        pairs = list(zip(together, apart, strict=True))
        equal = sum(bool((a.argmax(axis=1) == b.argmax(axis=1)).all()) for a, b in pairs)
        most = max(largest_error(truth, a, b, precision) for truth, (a, b) in zip(exact, pairs, strict=True))
        found.append(CompanyResult(name, len(rows), equal, most, WORST_FACTOR * error))
    return tuple(found)


def largest_error(exact: np.ndarray, first: np.ndarray, second: np.ndarray, precision: str) -> float:
    """Logits [T,V] -> the largest difference of two of them, in units of the oracle's scales."""
    _, one, other = normalised_logits(exact, (first, second), precision)
    return float(errors_of(one, other).max(initial=0.0))


def outputs_with_logits(
    oracle: Session, sources: Sequence[Sequence[int]], steps: int
) -> tuple[list[tuple[int, ...]], list[np.ndarray]]:
    """Its outputs, and the logits [T,V] that it chose each of them from."""
    logits: list[list[np.ndarray]] = [[] for _ in sources]

    def note(emitted: Emitted) -> None:
        for source, row in zip(emitted.sources.tolist(), emitted.answer.logits[:, 0], strict=True):
            logits[source].append(row.copy())

    said = [found[0].tokens for found in generate(oracle, sources, SearchOptions(steps), note)]
    return said, [np.stack(rows[: len(tokens)]) for rows, tokens in zip(logits, said, strict=True)]


def forced(
    session: Session,
    sources: Sequence[Sequence[int]],
    said: Sequence[tuple[int, ...]],
    batches: Sequence[Sequence[int]],
    columns: int = 0,
) -> list[np.ndarray]:
    """The logits [T,V] of every source when its tokens are fed to the session in these batches, padded by so much."""
    found: list[np.ndarray] = [np.zeros(0)] * len(sources)
    for batch in batches:
        targets = [said[row] for row in batch]
        fed, counts = forced_tokens(targets, session.config)
        ids, mask = padded([sources[row] for row in batch], session.config.pad_id)
        ids = np.pad(ids, ((0, 0), (0, columns)), constant_values=session.config.pad_id)
        state = session.encode(ids, np.pad(mask, ((0, 0), (0, columns))))
        tree = TreeStep(session, state, len(batch), 1, fed.shape[1])
        parents = np.zeros((len(batch), 1), dtype=np.int64)
        by_step = [tree(fed[:, [step]], parents).logits[:, 0].copy() for step in range(fed.shape[1])]
        answers = np.stack(by_step, axis=1)  # [B, T, V]
        for row, logits, real in zip(batch, answers, counts, strict=True):
            found[row] = logits[real]
    return found

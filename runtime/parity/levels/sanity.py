"""Failures regardless of the budgets: most outputs differ, or quality is significantly worse.

Budgets are computed, so they can be wrong; outputs are what users get. A run within all budgets still fails if its
outputs contradict that:

    fp32, or two sessions compared with `--against`   always: equal outputs are expected
    another precision, against fp32 over its weights  unless PyTorch at that precision does no better: with random
                                                      weights, rounded activations alone change most outputs
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...generate import generate
from ...numerics.budgets import DecodeResult
from ...numerics.teacher_forcing import Tokens
from ...quality.intervals import Rate, difference_text
from ...search.options import SearchOptions
from ...session import Session
from ...text.batching import mixed_batches
from .decodes import RowOutputs

SAMPLE = 32  # sources that PyTorch at the candidate's precision decodes: it is slow in fp16 on a CPU
LINES = 256  # of references, likewise
UNLIKELY = 0.025  # one-sided, as one end of a 95 % interval


@dataclass(frozen=True)
class Doubt:
    """A search whose outputs contradict a pass. `excuse` is set if PyTorch at the same precision is no better."""

    level: str  # decodes or quality
    search: str
    fact: str
    excuse: str = ""

    @property
    def reason(self) -> str:
        return "" if self.excuse else f"{self.search}: {self.fact}, which fails even within budget"

    def __bool__(self) -> bool:
        return not self.reason


def most_differ(decode: DecodeResult) -> bool:
    """More than half the outputs of a completed decode."""
    return not decode.failure and 2 * len(decode.divergences) > decode.sources


def decode_doubt(
    decode: DecodeResult,
    options: SearchOptions,
    sources: Sequence[Sequence[int]],
    expected: RowOutputs,
    reference: Session | None,
    batch: int,
) -> Doubt | None:
    """None unless most outputs differ from the `expected` ones of the baseline; `reference` may excuse that."""
    if not most_differ(decode):
        return None
    fact = f"most outputs differ, {decode.equal} of {decode.sources} equal"
    if reference is None:
        return Doubt("decodes", decode.search, fact)
    rows = spread_rows(len(sources), SAMPLE)
    own = outputs_of(reference, sources, rows, options, batch)
    theirs = {divergence.source for divergence in decode.divergences}
    ours = {row for row in rows if own[row] != expected[row]}
    counted = f"PyTorch {reference.precision}: {len(rows) - len(ours)} of {len(rows)} equal"
    if not ours or more_often(len(theirs.intersection(rows) - ours), len(ours - theirs)):
        return Doubt("decodes", decode.search, f"{fact} ({counted})")
    return Doubt("decodes", decode.search, fact, f"no fewer than of {counted}")


def more_often(first: int, second: int) -> bool:
    """Exact sign test over the sources where only one of two sides differs: `first` of one, `second` of the other."""
    total = first + second
    return sum(math.comb(total, k) for k in range(first, total + 1)) <= UNLIKELY * 2**total


def quality_doubts(rates: Sequence[Rate], own: Sequence[Rate] | None, reference: str) -> tuple[Doubt, ...]:
    """One for each rate that is significantly worse. `own` are the candidate's rates against PyTorch at its precision,
    named `reference`; None if that is no excuse.
    """
    found = []
    for rate in significantly_worse(rates):
        fact = f"{rate.metric} {difference_text(rate)}, significantly worse"
        again = [other for other in own or () if (other.search, other.metric) == (rate.search, rate.metric)]
        if again and not again[0].significantly_worse:
            excuse = f"not so against {reference}, {difference_text(again[0])} on {again[0].lines} lines"
            found.append(Doubt("quality", rate.search, fact, excuse))
        else:
            found.append(Doubt("quality", rate.search, fact))
    return tuple(found)


def significantly_worse(rates: Sequence[Rate]) -> list[Rate]:
    return [rate for rate in rates if rate.significantly_worse]


def spread_rows(count: int, most: int) -> list[int]:
    """At most that many rows, spread evenly."""
    return list(range(count)) if count <= most else [round(i * (count - 1) / (most - 1)) for i in range(most)]


def outputs_of(
    session: Session, sources: Sequence[Sequence[int]], rows: Sequence[int], options: SearchOptions, batch: int
) -> dict[int, Tokens]:
    """A session's best outputs for some of the sources, by row."""
    found: dict[int, Tokens] = {}
    for places in mixed_batches(len(rows), min(batch, session.limits.batch or batch)):
        chosen = [rows[place] for place in places]
        best = generate(session, [sources[row] for row in chosen], options)
        found.update((row, hypotheses[0].tokens) for row, hypotheses in zip(chosen, best, strict=True))
    return found

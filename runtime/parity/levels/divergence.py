"""Where two decodes part, and whether PyTorch's own rounding error explains it: a tie, drift, or a bug."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...generate import generate
from ...numerics.budgets import DIVERGENCE_FACTOR, Divergence
from ...numerics.teacher_forcing import Scored, Tokens, scored
from ...search.options import SearchOptions
from ...search.step import Emitted
from ...session import Session


@dataclass(frozen=True)
class Gap:
    """What the oracle puts between two choices, and what PyTorch's own error could have made of it."""

    margin: float
    budget: float

    def __bool__(self) -> bool:
        """Whether the two are as good as equal; False also where PyTorch's error is not a number."""
        return self.margin <= self.budget

    @property
    def verdict(self) -> str:
        """tie: PyTorch itself could have chosen so. drift: the precision explains it. bug: it does not."""
        return "tie" if DIVERGENCE_FACTOR * self.margin <= self.budget else "drift" if self else "bug"


def first_difference(first: Sequence[int], second: Sequence[int]) -> int:
    """Where two sequences part; the shorter one's length if it begins the other."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def gap_since_fork(first: Scored, second: Scored) -> Gap:
    """Between two sequences of one length. What they have in common was scored once and cannot set them apart."""
    fork = first_difference(first.tokens, second.tokens)
    margin = abs(float(first.log_probs[fork:].sum() - second.log_probs[fork:].sum()))
    return Gap(margin, DIVERGENCE_FACTOR * float(np.maximum(first.spreads[fork:], second.spreads[fork:]).sum()))


def gap_of_scores(first: Scored, second: Scored, length_penalty: float) -> Gap:
    """Between two outputs, scored as beam search scores them."""
    sizes = [len(scored.tokens) ** length_penalty for scored in (first, second)]
    margin = abs(float(first.log_probs.sum() / sizes[0] - second.log_probs.sum() / sizes[1]))
    return Gap(margin, DIVERGENCE_FACTOR * float(max(first.spreads.sum() / sizes[0], second.spreads.sum() / sizes[1])))


@dataclass(frozen=True)
class Traced:
    """A batch decoded, with what every step of the search chose: sources [B], tokens and parents [B,K]."""

    tokens: list[Tokens]
    trail: list[tuple[np.ndarray, np.ndarray, np.ndarray]]
    last: list[Tokens] = field(default_factory=list)  # the worst hypothesis of each: it decides when a search may stop


def traced(session: Session, sources: Sequence[Sequence[int]], options: SearchOptions) -> Traced:
    trail: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def note(emitted: Emitted) -> None:
        trail.append((emitted.sources.copy(), emitted.tokens.copy(), emitted.parents.copy()))

    found = generate(session, sources, dataclasses.replace(options, nbest=options.beam), note)
    return Traced([nbest[0].tokens for nbest in found], trail, [nbest[-1].tokens for nbest in found])


Fork = tuple[list[Tokens], list[Tokens]]
Stop = tuple[Tokens, list[Tokens]]


def fork_of(wanted: Traced, given: Traced, source: int, end: int) -> Fork | None:
    """The prefixes only one and only the other search kept, where they first kept different ones; None if never.

    Their order among the beams is no difference: it changes nothing that comes after.
    """
    for ours, theirs in zip(beams_of(wanted, source, end), beams_of(given, source, end), strict=False):
        if ours != theirs:
            return sorted(ours - theirs), sorted(theirs - ours)
    return None


def stop_of(wanted: Traced, given: Traced, source: int, end: int) -> Stop | None:
    """Where both kept the same prefixes, but one search was done before the other: its worst hypothesis, which no
    running one could pass, and the prefixes that the other still ran; None if they stopped together.
    """
    runs = [(run, list(beams_of(run, source, end))) for run in (wanted, given)]
    (first, beams), (_, longer) = sorted(runs, key=lambda pair: len(pair[1]))
    if not first.last or len(beams) == len(longer):
        return None
    return first.last[source], sorted(longer[len(beams)])


def beams_of(run: Traced, source: int, end: int) -> Iterator[set[Tokens]]:
    """The running prefixes of a source after every step, as long as it is not done."""
    prefixes: list[Tokens] = []
    for sources, tokens, parents in run.trail:
        row = np.flatnonzero(sources == source)
        if not row.size or end in tokens[row[0]]:  # a running beam has not ended: from here on it is filler
            return
        chosen = zip(tokens[row[0]].tolist(), parents[row[0]].tolist(), strict=True)
        prefixes = [(*(prefixes[parent] if prefixes else ()), token) for token, parent in chosen]
        yield set(prefixes)


@dataclass(frozen=True)
class Parted:
    """A source whose two decodes differ, still to be judged. `row` is its place among all sources."""

    row: int
    source: Sequence[int]
    wanted: Tokens
    given: Tokens
    fork: Fork | None
    stop: Stop | None = None

    @property
    def step(self) -> int:
        return first_difference(self.wanted, self.given)

    @property
    def earlier(self) -> Fork | None:
        """What the two searches held against each other before their outputs: the fork, or one's last and the other's
        running prefixes; None if there is neither."""
        if self.fork is not None:
            return self.fork
        return None if self.stop is None else ([self.stop[0]], self.stop[1])

    def judged(self, gap: Gap, parted: str, top_two: np.ndarray) -> Divergence:
        """`top_two` [T] is of the tokens that PyTorch said; the other may be the longer one."""
        here = float(top_two[self.step]) if self.step < len(top_two) else float("nan")
        return Divergence(
            self.row, self.step, gap.verdict, parted, gap.margin, gap.budget, self.wanted, self.given, here
        )


def parted_at(wanted: Traced, given: Traced, place: int, row: int, source: Sequence[int], end: int) -> Parted:
    """A source of a batch whose outputs differ; `place` is its number in the batch, `row` among all."""
    fork = fork_of(wanted, given, place, end)
    stop = stop_of(wanted, given, place, end) if fork is None else None
    return Parted(row, source, wanted.tokens[place], given.tokens[place], fork, stop)


@dataclass(frozen=True)
class Judge:
    """Weighs divergences by forcing both decodes through the oracle and PyTorch, `batch` of them at a time."""

    oracle: Session
    reference: Session
    batch: int
    usual: float  # the spread of PyTorch's usual errors in a step's logits; no step is judged by less

    def greedy(self, cases: Sequence[Parted]) -> list[Divergence]:
        """Up to the step where they part both chose alike, so the margin is that of two tokens of one step."""
        pairs = [(case.source, tokens[: case.step + 1]) for case in cases for tokens in (case.wanted, case.given)]
        found = self.scored(pairs)
        pairs_of = zip(cases, found[::2], found[1::2], strict=True)
        return [case.judged(gap_since_fork(ours, theirs), "tokens", ours.top_two) for case, ours, theirs in pairs_of]

    def beams(self, cases: Sequence[Parted], length_penalty: float) -> list[Divergence]:
        """Two outputs with the same score are as good as equal. If theirs differ, rounding may still have decided it,
        but long before the end: where one search first kept other prefixes than the other, or was done before it.
        """
        found = self.scored([(case.source, tokens) for case in cases for tokens in (case.wanted, case.given)])
        gaps = [
            gap_of_scores(ours, theirs, length_penalty) for ours, theirs in zip(found[::2], found[1::2], strict=True)
        ]
        earlier = self.scored_earlier([case for case, gap in zip(cases, gaps, strict=True) if not gap])
        judged = []
        for case, gap, ours in zip(cases, gaps, found[::2], strict=True):
            chosen, parted = gap, "scores"
            if not gap and case.fork is not None:
                at_fork = widest_gap(*earlier[case.row])
                if at_fork:
                    chosen, parted = at_fork, "beams"
            elif not gap and case.stop is not None:
                at_stop = gap_at_stop(*earlier[case.row], length_penalty)
                if at_stop:
                    chosen, parted = at_stop, "stop"
            judged.append(case.judged(chosen, parted, ours.top_two))
        return judged

    def scored_earlier(self, cases: Sequence[Parted]) -> dict[int, tuple[list[Scored], list[Scored]]]:
        """Row -> both sides of the fork, or of the stop, of every case that has one. Scored together: a step of many
        rows costs hardly more than one of a few."""
        sides = {case.row: (case.source, case.earlier) for case in cases if case.earlier is not None}
        flat = [(source, prefix) for source, both in sides.values() for side in both for prefix in side]
        found = iter(self.scored(flat))
        return {
            row: (list(itertools.islice(found, len(both[0]))), list(itertools.islice(found, len(both[1]))))
            for row, (_, both) in sides.items()
        }

    def scored(self, pairs: Sequence[tuple[Sequence[int], Tokens]]) -> list[Scored]:
        """In the order of the pairs; batches are of like lengths, as each runs to the end of its longest."""
        order = sorted(range(len(pairs)), key=lambda place: len(pairs[place][1]))
        sources, targets = [pairs[place][0] for place in order], [pairs[place][1] for place in order]
        found = scored(self.oracle, self.reference, sources, targets, self.batch, self.usual)
        by_place = dict(zip(order, found, strict=True))
        return [by_place[place] for place in range(len(pairs))]


def widest_gap(ours: Sequence[Scored], theirs: Sequence[Scored]) -> Gap:
    """One search ranked all of the first before all of the second, the other the reverse: the least explained."""
    gaps = [gap_since_fork(a, b) for a, b in itertools.product(ours, theirs)]
    return max(gaps, key=lambda gap: gap.margin / gap.budget if gap.budget else np.inf)


def gap_at_stop(worst: Sequence[Scored], running: Sequence[Scored], length_penalty: float) -> Gap:
    """One search found its worst hypothesis (the only one of `worst`) better than the best running one, the other the
    reverse."""
    best = max(running, key=lambda scored: float(scored.log_probs.sum()))
    return gap_of_scores(worst[0], best, length_penalty)

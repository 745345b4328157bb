"""Where two decodes diverge, and whether PyTorch's own rounding error explains it: a tie, drift, or a bug."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...generate import generate, start_of
from ...numerics.budgets import DIVERGENCE_FACTOR, Divergence, ScoreResult, ratio
from ...numerics.teacher_forcing import Scored, Tokens, scored
from ...search.options import SearchOptions
from ...search.step import Emitted
from ...session import Session

MOST_SCORES = 16  # pairs of scores that are measured by teacher forcing


@dataclass(frozen=True)
class Gap:
    """The oracle's margin between two choices, and the margin that PyTorch's own error could overturn."""

    margin: float
    budget: float

    def __bool__(self) -> bool:
        """Whether rounding explains the margin; False if PyTorch's error is not finite."""
        return self.margin <= self.budget

    @property
    def verdict(self) -> str:
        """tie: within PyTorch's own error. drift: within the budget, so the precision explains it. bug: beyond it."""
        return "tie" if DIVERGENCE_FACTOR * self.margin <= self.budget else "drift" if self else "bug"


def first_difference(first: Sequence[object], second: Sequence[object]) -> int:
    """The first position where two sequences differ; the length of the shorter one if it begins the other."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def gap_since_fork(first: Scored, second: Scored) -> Gap:
    """The gap between two sequences of one length from where they differ: their common prefix has the same score."""
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
    """A decoded batch with the choices of every step: sources [B], tokens and parents [B,K]."""

    tokens: list[Tokens]
    trail: list[tuple[np.ndarray, np.ndarray, np.ndarray]]
    last: list[Tokens] = field(
        default_factory=list
    )  # the worst hypothesis of each source: it decides when a search may stop
    scores: list[float] = field(default_factory=list)  # of the best one


def traced(session: Session, sources: Sequence[Sequence[int]], options: SearchOptions) -> Traced:
    trail: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def note(emitted: Emitted) -> None:
        trail.append((emitted.sources.copy(), emitted.tokens.copy(), emitted.parents.copy()))

    found = generate(session, sources, dataclasses.replace(options, nbest=options.beam), note)
    best, last = [nbest[0] for nbest in found], [nbest[-1].tokens for nbest in found]
    return Traced([one.tokens for one in best], trail, last, [one.score for one in best])


Fork = tuple[list[Tokens], list[Tokens]]
Stop = tuple[Tokens, list[Tokens]]


def fork_of(wanted: Traced, given: Traced, source: int, end: int) -> Fork | None:
    """The prefixes that only one of the two searches kept, at the first step where they kept different ones.

    None if there is no such step. The order of beams does not count: it changes nothing later.
    """
    for ours, theirs in zip(beams_of(wanted, source, end), beams_of(given, source, end), strict=False):
        if ours != theirs:
            return sorted(ours - theirs), sorted(theirs - ours)
    return None


def stop_of(wanted: Traced, given: Traced, source: int, end: int) -> Stop | None:
    """For searches with the same prefixes of which one stopped first: its worst hypothesis, which no running prefix
    could beat, and the prefixes with which the other went on; None if both stopped at the same step.
    """
    runs = [(run, list(beams_of(run, source, end))) for run in (wanted, given)]
    (first, beams), (_, longer) = sorted(runs, key=lambda pair: len(pair[1]))
    if not first.last or len(beams) == len(longer):
        return None
    return first.last[source], sorted(longer[len(beams)])


def beams_of(run: Traced, source: int, end: int) -> Iterator[set[Tokens]]:
    """The running prefixes of a source after every step, until it is done."""
    prefixes: list[Tokens] = []
    for sources, tokens, parents in run.trail:
        row = np.flatnonzero(sources == source)
        if not row.size or end in tokens[row[0]]:  # a running beam has no end token: the source is done
            return
        chosen = zip(tokens[row[0]].tolist(), parents[row[0]].tolist(), strict=True)
        prefixes = [(*(prefixes[parent] if prefixes else ()), token) for token, parent in chosen]
        yield set(prefixes)


@dataclass(frozen=True)
class Diverged:
    """A source with two different outputs, not judged yet. `row` is its place among all sources."""

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
        """The prefixes to compare besides the outputs: those of the fork, or those of the stop; None if there is
        neither."""
        if self.fork is not None:
            return self.fork
        return None if self.stop is None else ([self.stop[0]], self.stop[1])

    def judged(self, gap: Gap, kind: str, top_two: np.ndarray) -> Divergence:
        """`top_two` [T] belongs to the baseline's output; the other may be longer."""
        here = float(top_two[self.step]) if self.step < len(top_two) else float("nan")
        return Divergence(self.row, self.step, gap.verdict, kind, gap.margin, gap.budget, self.wanted, self.given, here)


@dataclass(frozen=True)
class Rescored:
    """A source whose two outputs have the same tokens, and how far apart their scores are."""

    row: int
    source: Sequence[int]
    tokens: Tokens
    difference: float


def diverged_at(wanted: Traced, given: Traced, place: int, row: int, source: Sequence[int], end: int) -> Diverged:
    """A source of a batch whose outputs differ; `place` is its number in the batch, `row` among all."""
    fork = fork_of(wanted, given, place, end)
    stop = stop_of(wanted, given, place, end) if fork is None else None
    return Diverged(row, source, wanted.tokens[place], given.tokens[place], fork, stop)


@dataclass(frozen=True)
class Judge:
    """Judges divergences by teacher forcing: both outputs through the oracle and PyTorch, `batch` at a time."""

    oracle: Session
    reference: Session
    batch: int
    usual: float  # the median spread of PyTorch's errors in a step's logits: the least that counts for any step

    def greedy(self, cases: Sequence[Diverged], options: SearchOptions) -> list[Divergence]:
        """Both chose the same tokens before they diverge, so the margin is that of two tokens of one step."""
        pairs = [(case.source, tokens[: case.step + 1]) for case in cases for tokens in (case.wanted, case.given)]
        found = self.scored(pairs, options)
        pairs_of = zip(cases, found[::2], found[1::2], strict=True)
        return [case.judged(gap_since_fork(ours, theirs), "tokens", ours.top_two) for case, ours, theirs in pairs_of]

    def beams(self, cases: Sequence[Diverged], options: SearchOptions) -> list[Divergence]:
        """Two outputs of the same score are a tie. If the scores differ, rounding may still be the cause at an earlier
        step: where one search first kept other prefixes, or stopped before the other.
        """
        length_penalty = options.length_penalty
        found = self.scored([(case.source, tokens) for case in cases for tokens in (case.wanted, case.given)], options)
        gaps = [
            gap_of_scores(ours, theirs, length_penalty) for ours, theirs in zip(found[::2], found[1::2], strict=True)
        ]
        earlier = self.scored_earlier([case for case, gap in zip(cases, gaps, strict=True) if not gap], options)
        judged = []
        for case, gap, ours in zip(cases, gaps, found[::2], strict=True):
            chosen, kind = gap, "scores"
            if not gap and case.fork is not None:
                at_fork = widest_gap(*earlier[case.row])
                if at_fork:
                    chosen, kind = at_fork, "beams"
            elif not gap and case.stop is not None:
                at_stop = gap_at_stop(*earlier[case.row], length_penalty)
                if at_stop:
                    chosen, kind = at_stop, "stop"
            judged.append(case.judged(chosen, kind, ours.top_two))
        return judged

    def scores(self, cases: Sequence[Rescored], options: SearchOptions) -> ScoreResult | None:
        """Two scores of the same tokens may differ by what PyTorch's error may move them by.

        The usual error of a step is the least that this can be. Only pairs further apart than that are measured, the
        furthest first.
        """
        if not cases:
            return None
        penalty = 0.0 if options.beam == 1 else options.length_penalty
        usual = [self.usual * len(case.tokens) / len(case.tokens) ** penalty for case in cases]
        strains = [case.difference / least if least else 0.0 for case, least in zip(cases, usual, strict=True)]
        order = sorted(range(len(cases)), key=lambda place: -strains[place])
        budgets = {place: DIVERGENCE_FACTOR * usual[place] for place in order}
        far = [place for place in order[:MOST_SCORES] if strains[place] > 1.0]
        measured = self.scored([(cases[place].source, cases[place].tokens) for place in far], options)
        for place, one in zip(far, measured, strict=True):
            spread = float(one.spreads.sum()) / len(one.tokens) ** penalty
            budgets[place] = max(budgets[place], DIVERGENCE_FACTOR * spread)
        worst = max(order, key=lambda place: ratio(cases[place].difference, budgets[place], 0.0))
        largest = max(case.difference for case in cases)
        return ScoreResult(len(cases), cases[worst].row, cases[worst].difference, budgets[worst], largest)

    def scored_earlier(
        self, cases: Sequence[Diverged], options: SearchOptions
    ) -> dict[int, tuple[list[Scored], list[Scored]]]:
        """Row -> both sides of the fork, or of the stop, of every case that has one. Scored together: a step of many
        rows costs hardly more than one of a few."""
        sides = {case.row: (case.source, case.earlier) for case in cases if case.earlier is not None}
        flat = [(source, prefix) for source, both in sides.values() for side in both for prefix in side]
        found = iter(self.scored(flat, options))
        return {
            row: (list(itertools.islice(found, len(both[0]))), list(itertools.islice(found, len(both[1]))))
            for row, (_, both) in sides.items()
        }

    def scored(self, pairs: Sequence[tuple[Sequence[int], Tokens]], options: SearchOptions) -> list[Scored]:
        """As the search scores them, in the order of the pairs; batches are sorted by length, as each runs to the end
        of its longest."""
        order = sorted(range(len(pairs)), key=lambda place: len(pairs[place][1]))
        sources, targets = [pairs[place][0] for place in order], [pairs[place][1] for place in order]
        found = scored(self.oracle, self.reference, sources, targets, self.batch, self.usual)
        start = start_of(self.oracle.config, options)
        penalty, greedy = options.repetition_penalty, options.beam == 1
        by_place = {
            place: one.with_repetition_penalty(penalty, start, greedy) for place, one in zip(order, found, strict=True)
        }
        return [by_place[place] for place in range(len(pairs))]


def widest_gap(ours: Sequence[Scored], theirs: Sequence[Scored]) -> Gap:
    """The least explained gap, where one search ranked all of the first above all of the second and the other not."""
    gaps = [gap_since_fork(a, b) for a, b in itertools.product(ours, theirs)]
    return max(gaps, key=lambda gap: gap.margin / gap.budget if gap.budget else np.inf)


def gap_at_stop(worst: Sequence[Scored], running: Sequence[Scored], length_penalty: float) -> Gap:
    """One search ranked its worst hypothesis (the only one of `worst`) above the best running prefix, the other did
    not."""
    best = max(running, key=lambda scored: float(scored.log_probs.sum()))
    return gap_of_scores(worst[0], best, length_penalty)

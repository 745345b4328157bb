"""Hypotheses of a beam search that have finished, and the record of choices that their tokens are read back from.

Beams hold only scores while decoding: tokens, parents and log-probabilities of every step are written to one record,
and each hypothesis is read back from it at the end. So nothing grows, and nothing is copied when beams switch.
Shapes: B sources, K beams, C candidates, N n-best, T steps.
"""

from __future__ import annotations

from operator import itemgetter
from typing import NamedTuple

import numpy as np

from .step import Hypothesis

SCORE = itemgetter(0)
Index = slice | np.ndarray  # sources of the whole batch: all as a slice, which makes views, or some by number


class Continuations(NamedTuple):
    """Candidates [B,C] of one step, best first: score, token, beam that it continues, and the token's log-probability.

    The score sums the log-probabilities of the beam search; `log_probs` are the model's own, before rules.
    """

    scores: np.ndarray
    tokens: np.ndarray
    parents: np.ndarray
    log_probs: np.ndarray

    def first(self, count: int) -> Continuations:
        return Continuations(*[part[:, :count] for part in self])

    def at(self, rows: np.ndarray, columns: np.ndarray) -> Continuations:
        return Continuations(*[part[rows, columns] for part in self])


class Record:
    """What every step chose: arrays [T,B,K]."""

    def __init__(self, steps: int, batch: int, beam: int):
        shape = (steps, batch, beam)
        self.tokens, self.parents = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        self.log_probs = np.zeros(shape)
        self.attended = np.zeros(shape, dtype=np.int64)  # source position with the largest weight, of the parent beam
        self.waiting: list[tuple[int, Index, np.ndarray, np.ndarray, np.ndarray]] = []

    def add(self, step: int, here: Index, tokens: np.ndarray, parents: np.ndarray, log_probs: np.ndarray) -> None:
        """Takes the arrays of a step, which nobody changes any more; they are written down when they are read."""
        self.waiting.append((step, here, tokens, parents, log_probs))

    def write(self) -> None:
        for step, here, tokens, parents, log_probs in self.waiting:
            self.tokens[step, here], self.parents[step, here], self.log_probs[step, here] = tokens, parents, log_probs
        self.waiting.clear()


class End(NamedTuple):
    """The last token of a finished hypothesis, and the beam that it continues."""

    score: float
    length: int
    parent: int
    token: int
    log_prob: float


class Finished:
    """The K best finished hypotheses of every source, best first: their scores, and where each ended."""

    def __init__(self, batch: int, beam: int):
        self.scores = np.full((batch, beam), -np.inf)  # -inf: none yet
        self.ends: list[list[End]] = [[] for _ in range(batch)]
        self.count = np.zeros(batch, dtype=np.int64)  # of all that have finished, among the K best or not
        self.most = 0  # the largest of them
        self.best_finished = np.zeros(batch, dtype=bool)  # whether the best candidate of some step finished

    def add(self, here: Index, scores: np.ndarray, length: int, found: Continuations) -> None:
        """Candidates of the sources `here`, best first, with their final scores [B,C]; -inf does not finish."""
        rows, columns = np.nonzero(scores > -np.inf)
        sources = rows if isinstance(here, slice) else here[rows]
        values = (part[rows, columns].tolist() for part in (scores, found.parents, found.tokens, found.log_probs))
        for source, column, score, parent, token, log_prob in zip(
            sources.tolist(), columns.tolist(), *values, strict=True
        ):
            ends = self.ends[source]
            ends.append(End(score, length, parent, token, log_prob))
            ends.sort(key=SCORE, reverse=True)  # of equals the earlier one first
            del ends[self.scores.shape[1] :]
            self.scores[source, : len(ends)] = [end.score for end in ends]
            self.count[source] += 1
            self.most = max(self.most, int(self.count[source]))
            if column == 0:
                self.best_finished[source] = True

    def hypotheses(self, sources: np.ndarray, record: Record, nbest: int, alignments: bool) -> list[list[Hypothesis]]:
        """Reads each hypothesis of these sources back from the record, last token first."""
        record.write()
        return [
            [hypothesis_from_end(end, source, record, alignments) for end in self.ends[source][:nbest]]
            for source in sources.tolist()
        ]


def hypothesis_from_end(end: End, source: int, record: Record, alignments: bool) -> Hypothesis:
    steps = np.arange(end.length - 1)
    parents = record.parents[: len(steps), source].tolist()
    beams = [end.parent]  # of the record in each step, the last one first
    for chosen in reversed(parents):
        beams.append(chosen[beams[-1]])
    before, *own = reversed(beams)
    attended = record.attended[np.arange(end.length), source, [before, *own]].tolist() if alignments else ()
    return Hypothesis(
        (*record.tokens[steps, source, own].tolist(), end.token),
        end.score,
        (*record.log_probs[steps, source, own].tolist(), end.log_prob),
        tuple(attended),
    )

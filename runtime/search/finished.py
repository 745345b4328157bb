"""Hypotheses of a beam search that have finished, and the record of choices that their tokens are read back from.

Beams hold only scores while decoding: tokens, parents and log-probabilities of every step are written to one record,
and each hypothesis is read back from it at the end. So nothing grows, and nothing is copied when beams switch.
Shapes: B sources, K beams, C candidates, N n-best, T steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .step import Hypothesis

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

    def add(self, step: int, here: Index, tokens: np.ndarray, parents: np.ndarray, log_probs: np.ndarray) -> None:
        self.tokens[step, here], self.parents[step, here], self.log_probs[step, here] = tokens, parents, log_probs


class Finished:
    """The K best finished hypotheses of every source, best first: their scores, and where each ended."""

    def __init__(self, batch: int, beam: int):
        self.scores = np.full((batch, beam), -np.inf)  # -inf: none yet
        self.ends = np.zeros((batch, beam, 3), dtype=np.int64)  # length, the beam it continues, its last token
        self.log_probs = np.zeros((batch, beam))  # of the last token
        self.count = np.zeros(batch, dtype=np.int64)  # of all that have finished, among the K best or not
        self.some = False  # whether there is any
        self.best_finished = np.zeros(batch, dtype=bool)  # whether the best candidate of some step finished

    def add(self, here: Index, scores: np.ndarray, length: int, found: Continuations) -> None:
        """Candidates of the sources `here`, best first, with their final scores [B,C]; -inf does not finish."""
        new = scores > -np.inf
        if not new.any():
            return
        self.some = True
        self.count[here] += new.sum(axis=1)
        self.best_finished[here] |= new[:, 0]
        ends = np.stack([np.full_like(found.tokens, length), found.parents, found.tokens], axis=-1)
        all_scores = np.concatenate([self.scores[here], scores], axis=1)
        all_ends = np.concatenate([self.ends[here], ends], axis=1)
        all_log_probs = np.concatenate([self.log_probs[here], found.log_probs], axis=1)
        best = np.argsort(-all_scores, axis=1, kind="stable")[:, : self.scores.shape[1]]
        self.log_probs[here] = np.take_along_axis(all_log_probs, best, axis=1)
        self.scores[here] = np.take_along_axis(all_scores, best, axis=1)
        self.ends[here] = np.take_along_axis(all_ends, best[..., None], axis=1)

    def hypotheses(
        self, sources: np.ndarray, record: Record, steps: int, nbest: int, alignments: bool
    ) -> list[list[Hypothesis]]:
        """Reads each hypothesis of these sources back from the record, last token first."""
        scores = self.scores[sources, :nbest]
        last_log_probs = self.log_probs[sources, :nbest]
        lengths, beams, last = np.moveaxis(self.ends[sources, :nbest], -1, 0)  # [B, N] each
        batch, rows = len(scores), sources[:, None]
        tokens, attended = np.zeros((2, batch, nbest, steps), dtype=np.int64)
        log_probs = np.zeros((batch, nbest, steps))
        for step in reversed(range(steps)):
            final = step == lengths - 1
            tokens[..., step] = np.where(final, last, record.tokens[step, rows, beams])
            log_probs[..., step] = np.where(final, last_log_probs, record.log_probs[step, rows, beams])
            beams = np.where(step < lengths - 1, record.parents[step, rows, beams], beams)
            if alignments:
                attended[..., step] = record.attended[step, rows, beams]
        return [
            [
                Hypothesis(
                    tuple(tokens[source, rank, : lengths[source, rank]].tolist()),
                    float(scores[source, rank]),
                    tuple(log_probs[source, rank, : lengths[source, rank]].tolist()),
                    tuple(attended[source, rank, : lengths[source, rank]].tolist()) if alignments else (),
                )
                for rank in np.flatnonzero(scores[source] > -np.inf)
            ]
            for source in range(batch)
        ]

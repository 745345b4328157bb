"""Next-token distributions of two models compared: KL divergence and agreement of the likeliest tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...numerics.error_scale import row_blocks

BEST = 5


@dataclass(frozen=True)
class NextToken:
    """Against the oracle, over `rows` distributions: KL divergence in nats (mean and maximum), the share of rows with
    the same likeliest token (top-1), and the mean share of the five likeliest in common (top-5).
    """

    rows: int
    kl: float
    worst_kl: float
    top1: float
    top5: float


class NextTokenTally:
    def __init__(self) -> None:
        self.rows = 0
        self.kl = self.worst_kl = self.top1 = self.top5 = 0.0

    def add(self, exact: np.ndarray, given: np.ndarray) -> None:
        """Logits [B,V] of the oracle and of another."""
        for rows in row_blocks(exact):
            self.add_block(exact[rows], given[rows])

    def add_block(self, exact: np.ndarray, given: np.ndarray) -> None:
        given = given.astype(np.float64)
        ours, theirs = log_softmax(exact), log_softmax(given)
        with np.errstate(invalid="ignore"):
            likely = np.exp(ours)
            parts = np.where(likely > 0.0, likely * (ours - theirs), 0.0)  # tokens of probability 0 add nothing
            kl = np.maximum(parts.sum(axis=1), 0.0)  # below zero is rounding
        best = min(BEST, exact.shape[1])
        # A partition, not a sort: sorting a large vocabulary takes longer than the step that computed its logits.
        top, other = (np.argpartition(x, -best, axis=1)[:, -best:] for x in (exact, given))
        self.rows += len(exact)
        self.kl += float(kl.sum())
        self.worst_kl = float(np.fmax(self.worst_kl, kl.max()))
        self.top1 += float((exact.argmax(axis=1) == given.argmax(axis=1)).sum())
        self.top5 += float((top[:, :, None] == other[:, None, :]).any(axis=2).mean(axis=1).sum())

    def result(self) -> NextToken:
        rows = max(self.rows, 1)
        return NextToken(self.rows, self.kl / rows, self.worst_kl, self.top1 / rows, self.top5 / rows)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        shifted = logits - logits.max(axis=1, keepdims=True)
        shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        return shifted

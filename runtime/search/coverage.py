"""Where beams looked: how much of the source each has covered so far, and what it looks at most just now.

    cross-attention of the last decoder layer, mean of its heads  [B,K,S] -> summed along every beam's own steps

Shapes: B sources, K beams, S source tokens, as many as the longest of this search has.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .options import SearchOptions

LEAST = float(np.finfo(np.float32).tiny)  # of what nothing looked at, whose logarithm must stay a number


class Coverage:
    """Follows every beam. Score of a hypothesis: its own + beta * sum over its source of log(min(coverage, 1))."""

    def __init__(self, texts: Sequence[Sequence[int]], options: SearchOptions):
        lengths = np.array([len(text) for text in texts])
        self.beta = options.coverage_penalty
        self.inside: np.ndarray = np.arange(lengths.max()) < lengths[:, None]  # [B, S]
        self.covered = np.zeros((len(texts), options.beam, lengths.max()))  # [B, K, S]
        self.places = np.zeros((len(texts), options.beam), dtype=np.int64)  # [B, K] looked at most

    def add(self, attention: np.ndarray, parents: np.ndarray) -> None:
        """One step's attention, of beams that continue `parents` [B,K] of the step before.

        Its S is that of the batch: more, where others are longer, or less, where the longest source has left.
        """
        looked = attention[..., : self.inside.shape[1]]
        self.places = looked.argmax(axis=-1)
        if self.beta:
            self.covered = np.take_along_axis(self.covered, parents[..., None], axis=1)
            self.covered[..., : looked.shape[-1]] += looked

    def penalty(self) -> np.ndarray:
        """[B,K] what a hypothesis that ends in this step adds to its score: 0 or less."""
        if not self.beta:
            return np.zeros(self.places.shape)
        logs = np.log(np.clip(self.covered, LEAST, 1.0))
        return self.beta * np.where(self.inside[:, None], logs, 0.0).sum(axis=-1)

    def keep(self, rows: np.ndarray) -> None:
        self.inside, self.covered, self.places = self.inside[rows], self.covered[rows], self.places[rows]

"""Coverage penalty and alignments, from the cross-attention weights of the last decoder layer.

    mean of the heads' weights  [B,K,S] -> summed over the steps of every beam -> coverage of each source token

Shapes: B sources, K beams, S source tokens of the longest source of this search.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .options import SearchOptions

LEAST = float(np.finfo(np.float32).tiny)  # coverage of a token without any attention: its logarithm must be finite


class Coverage:
    """Score of a hypothesis: its own + beta * sum over its source tokens of log(min(coverage, 1))."""

    def __init__(self, texts: Sequence[Sequence[int]], options: SearchOptions):
        lengths = np.array([len(text) for text in texts])
        self.beta = options.coverage_penalty
        self.inside: np.ndarray = np.arange(lengths.max()) < lengths[:, None]  # [B, S]
        self.covered = np.zeros((len(texts), options.beam, lengths.max()))  # [B, K, S]
        self.places = np.zeros((len(texts), options.beam), dtype=np.int64)  # [B, K] with the largest weight

    def add(self, attention: np.ndarray, parents: np.ndarray) -> None:
        """The weights of one step, of beams that continue `parents` [B,K] of the step before.

        Their S is that of the batch: more if other sources are longer, less once the longest source has left.
        """
        weights = attention[..., : self.inside.shape[1]]
        self.places = weights.argmax(axis=-1)
        if self.beta:
            self.covered = np.take_along_axis(self.covered, parents[..., None], axis=1)
            self.covered[..., : weights.shape[-1]] += weights

    def penalty(self) -> np.ndarray:
        """[B,K] added to the score of a hypothesis that finishes in this step: 0 or less."""
        if not self.beta:
            return np.zeros(self.places.shape)
        logs = np.log(np.clip(self.covered, LEAST, 1.0))
        return self.beta * np.where(self.inside[:, None], logs, 0.0).sum(axis=-1)

    def keep(self, rows: np.ndarray) -> None:
        self.inside, self.covered, self.places = self.inside[rows], self.covered[rows], self.places[rows]

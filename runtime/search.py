"""What search is: the one thing it sees of a model, what it may be asked for, and what it gives back.

Greedy and beam search are generators over a `Step`. They know nothing of engines, caches or text.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..errors import ConfigError


class Step(Protocol):
    """One decoder step for K beams of B sources.

    A call takes the tokens just chosen [B,K] and, for each, the beam [B,K] of the previous call that it continues
    (ignored in the first call), and returns the next token's logits [B,K,V], which stay valid until the next call.
    """

    def __call__(self, tokens: np.ndarray, parents: np.ndarray) -> np.ndarray: ...

    def keep(self, rows: np.ndarray) -> None:
        """From the next call on only these sources (indices into the current B) are decoded."""


@dataclass(frozen=True)
class SearchOptions:
    """How to decode, in the words of Hugging Face `generate`. `max_length` counts new tokens, the end token too."""

    max_length: int = 64
    beam: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False  # True, False or "never"
    nbest: int = 1

    def __post_init__(self) -> None:
        problems = []
        if self.max_length < 1:
            problems.append(f"max length {self.max_length}, expected at least 1")
        if self.beam < 1:
            problems.append(f"beam {self.beam}, expected at least 1")
        if not 1 <= self.nbest <= max(self.beam, 1):
            problems.append(f"nbest {self.nbest}, expected 1 to the beam size {self.beam}")
        if self.early_stopping not in (True, False, "never"):
            problems.append(f"early stopping {self.early_stopping!r}, expected true, false or never")
        if problems:
            raise ConfigError("search options: " + "; ".join(problems))


@dataclass(frozen=True)
class Special:
    """The token ids a search must know."""

    start: int
    end: int


@dataclass(frozen=True)
class Hypothesis:
    """One output: tokens without the start token, with the end token if it was reached, and its score."""

    tokens: tuple[int, ...]
    score: float


@dataclass(frozen=True)
class Emitted:
    """What one step of a search did: the sources it worked on, its choice, and the logits it chose from.

    `sources` [B] are indices into the original batch, `tokens` and `parents` [B,K] the beams that go on, `logits`
    [B,K,V] the model's answer (valid until the search goes on).
    """

    step: int
    sources: np.ndarray
    tokens: np.ndarray
    parents: np.ndarray
    logits: np.ndarray


Search = Generator[Emitted, None, list[list[Hypothesis]]]  # returns n-best hypotheses of every source, best first

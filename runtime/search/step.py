"""What search is: the one thing it sees of a model, what it may be asked for, and what it gives back.

Greedy search, beam search and sampling are generators over a `Step`. They know nothing of engines, caches or text.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from .step_output import Answer


class Step(Protocol):
    """One decoder step for K beams of B sources.

    A call takes the tokens just chosen [B,K] and, for each, the beam [B,K] of the previous call that it continues
    (ignored in the first call), and returns the answer for the next token, which stays valid until the next call.
    """

    def __call__(self, tokens: np.ndarray, parents: np.ndarray) -> Answer: ...

    def keep(self, rows: np.ndarray) -> None:
        """From the next call on only these sources (indices into the current B) are decoded."""

    def attention(self) -> np.ndarray:
        """Where the beams of the latest call looked: [B,K,S], 0 for padding. Only where the session keeps it."""


@dataclass(frozen=True)
class Special:
    """The token ids a search must know."""

    start: int
    end: int


@dataclass(frozen=True)
class Start:
    """What one source's output begins with: a prefix, and then, if it is an alternative, its so manieth best token."""

    prefix: tuple[int, ...] = ()
    rank: int | None = None  # 0 is the best


@dataclass(frozen=True)
class Hypothesis:
    """One output: tokens without the start token, with the end token if it was reached, and its score.

    `log_probs` are its tokens' log-probabilities as the model has them, forced ones too, so that they are what
    `score_targets` says of these tokens. `alignments` are, where asked for, the places in the source that each of them
    looked at most. Two hypotheses are the same if they say the same at the same score. One without a score has NaN.
    """

    tokens: tuple[int, ...]
    score: float
    log_probs: tuple[float, ...] = field(default=(), compare=False, repr=False)
    alignments: tuple[int, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True)
class Emitted:
    """What one step of a search did: the sources it worked on, its choice, and the answer it chose from.

    `sources` [B] are indices into the original batch, `tokens` and `parents` [B,K] the beams that go on, `answer` is
    the model's (valid until the search goes on), `done` [B] the sources that need no more steps.
    """

    step: int
    sources: np.ndarray
    tokens: np.ndarray
    parents: np.ndarray
    answer: Answer
    done: np.ndarray


Search = Generator[Emitted, None, list[list[Hypothesis]]]  # returns n-best hypotheses of every source, best first


def drain(search: Search, on_step: Callable[[Emitted], None] | None = None) -> list[list[Hypothesis]]:
    """Runs a search to its end, shows `on_step` every step, and gives back what the search returns."""
    with closing(search) as steps:
        while True:
            try:
                emitted = next(steps)
            except StopIteration as finished:
                return finished.value
            if on_step is not None:
                on_step(emitted)

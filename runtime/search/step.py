"""The interface between search and model (`Step`), and the results of a search.

Greedy search, beam search and sampling are generators over a `Step`. They know nothing of engines, caches or text.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np

from .step_output import StepOutput

NO_TOKEN = -1  # an id that no token has


class Step(Protocol):
    """One decoder step for K beams of B sources.

    A call takes the tokens just chosen [B,K] and, for each, the beam [B,K] of the previous call that it continues
    (ignored in the first call). It returns the logits of the next token, which stay valid until the next call.
    """

    def __call__(self, tokens: np.ndarray, parents: np.ndarray) -> StepOutput: ...

    def keep(self, rows: np.ndarray) -> None:
        """From the next call on only these sources (indices into the current B) are decoded."""

    def attention(self) -> np.ndarray:
        """Cross-attention weights of the latest call [B,K,S], 0 for padding. Only if the session keeps them."""


@dataclass(frozen=True)
class Special:
    """The token ids a search must know. `end` is NO_TOKEN where nothing ends an output but its maximum length."""

    start: int
    end: int


@dataclass(frozen=True)
class Start:
    """The forced beginning of one source's output: a prefix and, for an alternative, the rank of its next token."""

    prefix: tuple[int, ...] = ()
    rank: int | None = None  # rank of the forced next token among those allowed there; 0 is the likeliest


@dataclass(frozen=True)
class Hypothesis:
    """One output: tokens without the start token, with the end token if it was reached, and its score.

    `log_probs` are the model's log-probabilities of the tokens, forced ones included: what `score_targets` returns for
    them. `alignments`, where asked for, are the source positions with the largest attention weight, one for each token.
    Two hypotheses are equal if their tokens and scores are. A hypothesis without a score has NaN.
    """

    tokens: tuple[int, ...]
    score: float
    log_probs: tuple[float, ...] = field(default=(), compare=False, repr=False)
    alignments: tuple[int, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True)
class Emitted:
    """One step of a search: the sources it decoded, the tokens it chose, and the logits it chose from.

    `sources` [B] are indices into the original batch, `tokens` and `parents` [B,K] the beams that run on, `answer` the
    model's output (valid until the next step), `done` [B] the sources that need no more steps. `hypotheses` of sources
    that are done, by their indices into the original batch, are what the search returns of them at its end.
    """

    step: int
    sources: np.ndarray
    tokens: np.ndarray
    parents: np.ndarray
    answer: StepOutput
    done: np.ndarray
    hypotheses: Callable[[np.ndarray], list[list[Hypothesis]]] = field(repr=False)


Search = Generator[Emitted, None, list[list[Hypothesis]]]  # returns n-best hypotheses of every source, best first


class Keeps(Protocol):
    """What a search needs of any step when finished sources leave."""

    def keep(self, rows: np.ndarray) -> None: ...


StepT = TypeVar("StepT", bound=Keeps, contravariant=True)
AnyStep = TypeVar("AnyStep", bound=Keeps)


class SearchState(Protocol[StepT]):
    """The state of a search between two steps: a row for every source that is still in the batch."""

    length: int
    sources: np.ndarray
    tokens: np.ndarray
    done: np.ndarray
    done_count: int

    @property
    def parents(self) -> np.ndarray: ...

    @property
    def all_done(self) -> bool: ...

    def advance(self, step: StepT) -> StepOutput:
        """One decoder step: chooses tokens and marks sources that are done."""

    def keep(self, rows: np.ndarray) -> None:
        """Keeps only these sources from now on."""

    def hypotheses(self, sources: np.ndarray) -> list[list[Hypothesis]]:
        """Of sources that are done, by their numbers in the whole batch."""


def searched(step: AnyStep, batch: int, state: SearchState[AnyStep]) -> Search:
    """Runs a search to its end: yields an Emitted for every step, and drops finished sources from the batch."""
    while not state.all_done:
        answer = state.advance(step)
        yield Emitted(
            state.length - 1, state.sources, state.tokens, state.parents, answer, state.done, state.hypotheses
        )
        if state.done_count and (rows := staying_rows(state.done)) is not None:
            step.keep(rows)
            state.keep(rows)
    return state.hypotheses(np.arange(batch))


def drain(search: Search, on_step: Callable[[Emitted], None] | None = None) -> list[list[Hypothesis]]:
    """Runs a search to its end, calls `on_step` for every step, and returns the search's result."""
    with closing(search) as steps:
        while True:
            try:
                emitted = next(steps)
            except StopIteration as finished:
                return finished.value
            if on_step is not None:
                on_step(emitted)


def staying_rows(done: np.ndarray) -> np.ndarray | None:
    """The rows of a batch that are not done [B], once finished sources should leave it; None while they should stay.

    Removing rows copies the caches of all others, so it waits until an eighth of the batch is done. Nothing leaves a
    batch that is done as a whole.
    """
    finished = np.count_nonzero(done)
    worth_a_copy = 0 < finished < len(done) and 8 * finished >= len(done)
    return np.flatnonzero(~done) if worth_a_copy else None

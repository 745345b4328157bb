"""Alternatives at a position: the N likeliest next tokens, each completed by a search of its own.

    source 0   the cat | sat .       beams 0 .. K-1        one tree cache, one decoder call a step:
                       | lay down .  beams K .. 2K-1       the searches see B*N sources of K beams,
                       | is ...      beams 2K .. 3K-1      the decoder sees B sources of N*K beams

Shapes: B sources, N alternatives, K beams of each, V vocab, S source tokens, R searches still running.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

from .beam import beam_search
from .greedy import greedy_search
from .options import SearchOptions
from .step import Emitted, Hypothesis, Search, Special, Start, Step
from .step_output import StepOutput

Found = Callable[[np.ndarray], list[list[Hypothesis]]]


def alternatives_search(
    step: Step,
    batch: int,
    special: Special,
    options: SearchOptions,
    texts: Sequence[Sequence[int]],
    starts: Sequence[Start] = (),
) -> Search:
    """Up to `nbest` hypotheses of every source, ordered by their differing token, likeliest first."""
    count = options.nbest
    opened = starts or [Start(options.forced_start)] * batch
    groups = _Groups(step, batch, count, options.beam, special.end)
    search = (greedy_search if options.greedy else beam_search)(
        groups,
        batch * count,
        special,
        options,
        [text for text in texts for _ in range(count)],
        [Start(start.prefix, rank) for start in opened for rank in range(count)],
    )
    while True:
        try:
            emitted = next(search)
        except StopIteration as finished:
            return joined(finished.value, count)
        tokens, parents = groups.spread(emitted.tokens, emitted.parents)
        done = np.ones(len(groups.sources), dtype=bool)
        np.logical_and.at(done, groups.rows, emitted.done)

        def hypotheses(numbers: np.ndarray, of_searches: Found = emitted.hypotheses) -> list[list[Hypothesis]]:
            return joined(of_searches((numbers[:, None] * count + np.arange(count)).ravel()), count)

        yield Emitted(emitted.step, groups.sources, tokens, parents, groups.answer, done, hypotheses)


def joined(found: list[list[Hypothesis]], count: int) -> list[list[Hypothesis]]:
    """The hypotheses of every search -> those of every source, which has `count` searches."""
    return [list(chain.from_iterable(found[first : first + count])) for first in range(0, len(found), count)]


class _Groups:
    """A Step for B*N sources of K beams, over one for B sources of N*K beams. Ended searches are fed end tokens."""

    def __init__(self, step: Step, batch: int, count: int, beam: int, end: int):
        self.step, self.count, self.beam, self.end = step, count, beam, end
        self.sources = np.arange(batch)  # of the step's rows
        self.rows = np.repeat(np.arange(batch), count)  # [R] the step's row of every search
        self.ranks = np.tile(np.arange(count), batch)  # [R] and its place there
        self.answer = StepOutput(np.zeros(0))

    def __call__(self, tokens: np.ndarray, parents: np.ndarray) -> StepOutput:
        self.answer = self.step(*self.spread(tokens, parents))
        return StepOutput(self.split(self.answer.logits))

    def attention(self) -> np.ndarray:
        return self.split(self.step.attention())

    def split(self, array: np.ndarray) -> np.ndarray:
        """[B, N*K, ...] -> [R, K, ...]"""
        return array.reshape(len(array), self.count, self.beam, -1)[self.rows, self.ranks]

    def spread(self, tokens: np.ndarray, parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Both [R,K] -> [B, N*K]."""
        width = self.count * self.beam
        all_tokens = np.full((len(self.sources), width), self.end, dtype=np.int64)
        all_parents = np.tile(np.arange(width), (len(self.sources), 1))
        columns = self.ranks[:, None] * self.beam + np.arange(self.beam)  # [R, K]
        all_tokens[self.rows[:, None], columns] = tokens
        all_parents[self.rows[:, None], columns] = parents + self.ranks[:, None] * self.beam
        return all_tokens, all_parents

    def keep(self, rows: np.ndarray) -> None:
        """Keeps only these searches; a source leaves with the last of its searches."""
        staying, places = np.unique(self.rows[rows], return_inverse=True)
        self.ranks, self.rows = self.ranks[rows], places
        if len(staying) < len(self.sources):
            self.step.keep(staying)
            self.sources = self.sources[staying]

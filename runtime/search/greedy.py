"""Greedy search: the likeliest token at every step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .options import SearchOptions
from .rules import Rules
from .step import Hypothesis, Search, Special, Start, Step, searched
from .step_output import Candidates, StepOutput, finite


def greedy_search(
    step: Step,
    batch: int,
    special: Special,
    options: SearchOptions,
    texts: Sequence[Sequence[int]] = (),
    starts: Sequence[Start] = (),
) -> Search:
    """Decodes `batch` sources to one hypothesis each; of the options `max_length` and the rules apply.

    `texts` are the source tokens, for rules that read them. `starts` are what each output begins with (none: what the
    options force). An alternative that does not exist has no hypothesis.

    A source is done at the end token, which is part of its output, or at the maximum length. Its score is the sum of
    its log-probabilities without length penalty, as there is nothing to compare with; NaN if no score was asked for.
    Yields an Emitted for every step; a source that is done but still in the batch emits, and is fed, the end token.
    """
    return searched(step, batch, GreedyState(batch, special, options, texts, starts))


class GreedyState:
    """The state of greedy search between two steps: a row for every source that is still in the batch.

    `sources` are their numbers in the whole batch, and `here` the same as an index.
    """

    def __init__(
        self,
        batch: int,
        special: Special,
        options: SearchOptions,
        texts: Sequence[Sequence[int]],
        starts: Sequence[Start],
    ):
        self.options, self.unscored = options, options.unscored
        self.rules = Rules(options, special, texts, starts)
        self.end = np.array(special.end)  # a numpy scalar: numpy would convert a Python int in every step
        # Of the whole batch, for all steps:
        self.chosen = np.zeros((batch, options.max_length), dtype=np.int64)
        self.attended = np.zeros((batch, options.max_length), dtype=np.int64)
        self.log_probs = np.zeros((batch, options.max_length))
        self.absent = np.zeros(batch, dtype=bool)  # alternatives that do not exist

        self.length = 0
        self.sources = np.arange(batch)
        self.here: slice | np.ndarray = slice(None)  # a slice makes views, as long as no source has left
        self.done, self.done_count = np.zeros(batch, dtype=bool), 0
        self.tokens = np.full((batch, 1), special.start, dtype=np.int64)
        self.parents = np.zeros((batch, 1), dtype=np.int64)

    @property
    def all_done(self) -> bool:
        return self.done_count == len(self.done)

    def advance(self, step: Step) -> StepOutput:
        """One step: the likeliest allowed token of every source; those that are done are fed the end token."""
        answer = step(self.tokens, self.parents)
        self.length += 1
        # Where log-probabilities are not asked for, the best logit also shows whether all are finite.
        scored = not self.options.allowed_log_probs or self.options.alternatives
        normaliser = finite(answer.normaliser if scored else answer.best.logits[..., 0], self.sources)
        allowed = self.rules.answer(answer, self.tokens, self.parents, self.length)
        allowed = self.rules.opened(allowed, normaliser, self.length)
        best = allowed.best
        self.tokens = best.tokens[..., 0].copy()  # [B, 1]
        if self.options.allowed_log_probs:
            normaliser = allowed.normaliser
        if self.options.alternatives:
            self.mark_absent(best)
        if not self.unscored:
            # Rules may have changed a logit; without rules a candidate's logit is the model's own.
            own = allowed.own or self.options.allowed_log_probs
            logits = best.logits[..., 0] if own else answer.logits_of(self.tokens)
            log_probs = logits.astype(np.float64) - normaliser
            if self.done_count:
                log_probs[self.done] = 0.0
            self.log_probs[self.here, self.length - 1] = log_probs[:, 0]
        if self.done_count:
            self.tokens[self.done] = self.end

        self.chosen[self.here, self.length - 1] = self.tokens[:, 0]
        if self.options.alignments:
            self.attended[self.here, self.length - 1] = step.attention()[:, 0].argmax(axis=-1)
        last = self.length == self.options.max_length
        self.done = np.ones_like(self.done) if last else self.done | (self.tokens[:, 0] == self.end)
        self.done_count = int(np.count_nonzero(self.done))
        return answer

    def mark_absent(self, best: Candidates) -> None:
        """An alternative without an allowed token does not exist."""
        missing = ~self.done & (best.logits[:, 0, 0] == -np.inf)
        self.absent[self.sources[missing]] = True
        self.done = self.done | missing
        self.done_count = int(np.count_nonzero(self.done))

    def keep(self, rows: np.ndarray) -> None:
        """Keeps only these sources from now on."""
        self.rules.keep(rows)
        self.sources, self.done = self.sources[rows], self.done[rows]
        self.tokens, self.parents = self.tokens[rows], self.parents[rows]
        self.here, self.done_count = self.sources, int(np.count_nonzero(self.done))

    def hypotheses(self, sources: np.ndarray) -> list[list[Hypothesis]]:
        """Of sources that are done, by their numbers in the whole batch."""
        chosen = self.chosen[sources]
        ended = chosen == self.end
        lengths = np.where(ended.any(axis=1), ended.argmax(axis=1) + 1, self.options.max_length)
        lengths[self.absent[sources]] = 0
        return hypotheses_of(chosen, self.log_probs[sources], self.attended[sources], lengths, self.options)


def hypotheses_of(
    tokens: np.ndarray, log_probs: np.ndarray, attended: np.ndarray, lengths: np.ndarray, options: SearchOptions
) -> list[list[Hypothesis]]:
    """Rows [N,T], zeros after their lengths [N] -> a hypothesis of each row; none of a row of length 0."""
    ends = lengths.tolist()
    rows = [tuple(row[:end]) for row, end in zip(tokens.tolist(), ends, strict=True)]
    scores, own = [math.nan] * len(ends), [()] * len(ends)
    if not options.unscored:
        scores = log_probs.cumsum(axis=1)[:, -1].tolist()
        own = [tuple(row[:end]) for row, end in zip(log_probs.tolist(), ends, strict=True)]
    places = [()] * len(ends)
    if options.alignments:
        places = [tuple(row[:end]) for row, end in zip(attended.tolist(), ends, strict=True)]
    found = zip(rows, scores, own, places, strict=True)
    return [[Hypothesis(*parts)] if parts[0] else [] for parts in found]

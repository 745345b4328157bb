"""Greedy search: the likeliest token, every time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .answers import finite
from .leaving import staying_rows
from .rules import Rules
from .search import Emitted, Hypothesis, Search, SearchOptions, Special, Step


def greedy_search(
    step: Step, batch: int, special: Special, options: SearchOptions, texts: Sequence[Sequence[int]] = ()
) -> Search:
    """Decodes `batch` sources to one hypothesis each; of the options `max_length` and the rules matter.

    `texts` are the sources' tokens, for rules that look at them.

    A source is done at the end token, which is one of its tokens, or at the maximum length. Its score is the sum of its
    tokens' log-probabilities, whatever the length penalty: with one hypothesis there is nothing to compare. Yields an
    Emitted for every step; a done source that has not left the batch yet emits, and is fed, the end token.
    """
    rules = Rules(options, special, texts)
    chosen = np.zeros((batch, options.max_length), dtype=np.int64)
    lengths = np.zeros(batch, dtype=np.int64)
    scores = np.zeros(batch)

    sources = np.arange(batch)
    done = np.zeros(batch, dtype=bool)
    tokens = np.full((batch, 1), special.start, dtype=np.int64)
    parents = np.zeros((batch, 1), dtype=np.int64)
    length = 0
    while not done.all():
        answer = step(tokens, parents)
        length += 1
        normaliser = finite(answer.normaliser, sources)
        tokens = rules.answer(answer, tokens, parents, length).candidates.tokens[..., 0].copy()  # [B, 1]
        gained = answer.logits_of(tokens) - normaliser
        tokens[done] = special.end

        scores[sources] += np.where(done, 0.0, gained[:, 0])
        chosen[sources, length - 1] = tokens[:, 0]
        lengths[sources[~done]] = length
        done = done | (tokens[:, 0] == special.end) | (length == options.max_length)
        yield Emitted(length - 1, sources, tokens, parents, answer, done)

        rows = staying_rows(done)
        if rows is not None:
            step.keep(rows)
            rules.keep(rows)
            sources, done, tokens, parents = sources[rows], done[rows], tokens[rows], parents[rows]

    return [
        [Hypothesis(tuple(row[:end].tolist()), float(score))]
        for row, end, score in zip(chosen, lengths, scores, strict=True)
    ]

"""Greedy search: the likeliest token, every time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .answers import finite
from .leaving import staying_rows
from .rules import Rules
from .search import Emitted, Hypothesis, Search, SearchOptions, Special, Start, Step


def greedy_search(
    step: Step,
    batch: int,
    special: Special,
    options: SearchOptions,
    texts: Sequence[Sequence[int]] = (),
    starts: Sequence[Start] = (),
) -> Search:
    """Decodes `batch` sources to one hypothesis each; of the options `max_length` and the rules matter.

    `texts` are the sources' tokens, for rules that look at them, `starts` what each output begins with (none: what the
    options force). An alternative that does not exist has no hypothesis.

    A source is done at the end token, which is one of its tokens, or at the maximum length. Its score is the sum of its
    tokens' log-probabilities, whatever the length penalty: with one hypothesis there is nothing to compare. Yields an
    Emitted for every step; a done source that has not left the batch yet emits, and is fed, the end token.
    """
    rules = Rules(options, special, texts, starts)
    chosen = np.zeros((batch, options.max_length), dtype=np.int64)
    looks = np.zeros((batch, options.max_length), dtype=np.int64)
    log_probs = np.zeros((batch, options.max_length))
    lengths = np.zeros(batch, dtype=np.int64)

    sources = np.arange(batch)
    done = np.zeros(batch, dtype=bool)
    tokens = np.full((batch, 1), special.start, dtype=np.int64)
    parents = np.zeros((batch, 1), dtype=np.int64)
    length = 0
    while not done.all():
        answer = step(tokens, parents)
        length += 1
        normaliser = finite(answer.normaliser, sources)
        allowed = rules.opened(rules.answer(answer, tokens, parents, length), normaliser, length)
        tokens = allowed.candidates.tokens[..., 0].copy()  # [B, 1]
        if options.alternatives:
            missing = ~done & (allowed.candidates.logits[:, 0, 0] == -np.inf)
            lengths[sources[missing]] = 0
            done = done | missing
        gained = answer.logits_of(tokens) - normaliser
        tokens[done] = special.end

        chosen[sources, length - 1] = tokens[:, 0]
        log_probs[sources, length - 1] = np.where(done, 0.0, gained[:, 0])
        if options.alignments:
            looks[sources, length - 1] = step.attention()[:, 0].argmax(axis=-1)
        lengths[sources[~done]] = length
        done = done | (tokens[:, 0] == special.end) | (length == options.max_length)
        yield Emitted(length - 1, sources, tokens, parents, answer, done)

        rows = staying_rows(done)
        if rows is not None:
            step.keep(rows)
            rules.keep(rows)
            sources, done, tokens, parents = sources[rows], done[rows], tokens[rows], parents[rows]

    return [
        hypotheses_of(row[None], prices[None], looked[None], end, options)
        for row, prices, looked, end in zip(chosen, log_probs, looks, lengths[:, None], strict=True)
    ]


def hypotheses_of(
    tokens: np.ndarray, log_probs: np.ndarray, looks: np.ndarray, lengths: np.ndarray, options: SearchOptions
) -> list[Hypothesis]:
    """Rows [N,T] that were chosen for one source, with zeros behind their lengths [N]; none of a row of length 0."""
    return [
        Hypothesis(
            tuple(said[:end].tolist()),
            float(prices.cumsum()[-1]),
            tuple(prices[:end].tolist()),
            tuple(looked[:end].tolist()) if options.alignments else (),
        )
        for said, prices, looked, end in zip(tokens, log_probs, looks, lengths.tolist(), strict=True)
        if end
    ]

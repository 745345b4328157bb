"""Greedy search: the likeliest token, every time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .leaving import staying_rows
from .options import SearchOptions
from .rules import Rules
from .step import Emitted, Hypothesis, Search, Special, Start, Step
from .step_output import finite


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
    tokens' log-probabilities, whatever the length penalty: with one hypothesis there is nothing to compare; NaN, if
    none was asked for. Yields an Emitted for every step; a done source that has not left the batch yet emits, and is
    fed, the end token.
    """
    rules, unscored = Rules(options, special, texts, starts), options.unscored
    chosen = np.zeros((batch, options.max_length), dtype=np.int64)
    looks = np.zeros((batch, options.max_length), dtype=np.int64)
    log_probs = np.zeros((batch, options.max_length))
    absent = np.zeros(batch, dtype=bool)  # alternatives that do not exist

    sources = np.arange(batch)
    here: slice | np.ndarray = slice(None)  # the sources as an index, which is a view as long as nobody has left
    done = np.zeros(batch, dtype=bool)
    finished = 0  # how many are done
    tokens = np.full((batch, 1), special.start, dtype=np.int64)
    parents = np.zeros((batch, 1), dtype=np.int64)
    end = np.array(special.end)  # of the tokens' type: numbers of Python's own would be converted in every step
    length = 0
    while finished < len(done):
        answer = step(tokens, parents)
        length += 1
        normaliser = finite(answer.normaliser, sources)
        allowed = rules.opened(rules.answer(answer, tokens, parents, length), normaliser, length)
        best = allowed.candidates
        tokens = best.tokens[..., 0].copy()  # [B, 1]
        # Rules may have put a price of their own on it; where there are none, a candidate's logit is the model's.
        logits = best.logits[..., 0] if allowed is answer or unscored else answer.logits_of(tokens)
        gained = logits.astype(np.float64) - normaliser
        if options.alternatives:
            missing = ~done & (best.logits[:, 0, 0] == -np.inf)
            absent[sources[missing]] = True
            done = done | missing
            finished = int(np.count_nonzero(done))
        if finished:
            tokens[done], gained[done] = end, 0.0

        chosen[here, length - 1] = tokens[:, 0]
        log_probs[here, length - 1] = gained[:, 0]
        if options.alignments:
            looks[here, length - 1] = step.attention()[:, 0].argmax(axis=-1)
        done = done | (tokens[:, 0] == end) if length < options.max_length else np.ones_like(done)
        yield Emitted(length - 1, sources, tokens, parents, answer, done)

        finished = int(np.count_nonzero(done))
        if finished and (rows := staying_rows(done)) is not None:
            step.keep(rows)
            rules.keep(rows)
            sources, done, tokens, parents = sources[rows], done[rows], tokens[rows], parents[rows]
            here, finished = sources, int(np.count_nonzero(done))

    ended = chosen == end
    lengths = np.where(ended.any(axis=1), ended.argmax(axis=1) + 1, options.max_length)
    lengths[absent] = 0
    return [
        hypotheses_of(row[None], prices[None], looked[None], total, options)
        for row, prices, looked, total in zip(chosen, log_probs, looks, lengths[:, None], strict=True)
    ]


def hypotheses_of(
    tokens: np.ndarray, log_probs: np.ndarray, looks: np.ndarray, lengths: np.ndarray, options: SearchOptions
) -> list[Hypothesis]:
    """Rows [N,T] that were chosen for one source, with zeros behind their lengths [N]; none of a row of length 0."""
    scored = not options.unscored
    return [
        Hypothesis(
            tuple(said[:end].tolist()),
            float(prices.cumsum()[-1]) if scored else math.nan,
            tuple(prices[:end].tolist()) if scored else (),
            tuple(looked[:end].tolist()) if options.alignments else (),
        )
        for said, prices, looked, end in zip(tokens, log_probs, looks, lengths.tolist(), strict=True)
        if end
    ]

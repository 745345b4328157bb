"""Greedy search: the likeliest token at every step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .options import SearchOptions
from .rules import Rules
from .step import Emitted, Hypothesis, Search, Special, Start, Step, staying_rows
from .step_output import finite


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
    rules, unscored = Rules(options, special, texts, starts), options.unscored
    chosen = np.zeros((batch, options.max_length), dtype=np.int64)
    attended = np.zeros((batch, options.max_length), dtype=np.int64)
    log_probs = np.zeros((batch, options.max_length))
    absent = np.zeros(batch, dtype=bool)  # alternatives that do not exist

    sources = np.arange(batch)
    here: slice | np.ndarray = slice(None)  # a slice makes views, as long as no source has left
    done = np.zeros(batch, dtype=bool)
    finished = 0  # how many are done
    tokens = np.full((batch, 1), special.start, dtype=np.int64)
    parents = np.zeros((batch, 1), dtype=np.int64)
    end = np.array(special.end)  # of the tokens' type: numpy would convert a Python int in every step
    length = 0
    while finished < len(done):
        answer = step(tokens, parents)
        length += 1
        normaliser = finite(answer.normaliser, sources)
        allowed = rules.opened(rules.answer(answer, tokens, parents, length), normaliser, length)
        best = allowed.candidates
        tokens = best.tokens[..., 0].copy()  # [B, 1]
        # Rules may have changed a logit; without rules a candidate's logit is the model's own.
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
            attended[here, length - 1] = step.attention()[:, 0].argmax(axis=-1)
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
        hypotheses_of(row[None], own[None], positions[None], total, options)
        for row, own, positions, total in zip(chosen, log_probs, attended, lengths[:, None], strict=True)
    ]


def hypotheses_of(
    tokens: np.ndarray, log_probs: np.ndarray, attended: np.ndarray, lengths: np.ndarray, options: SearchOptions
) -> list[Hypothesis]:
    """Rows [N,T] of one source, zeros after their lengths [N] -> hypotheses; none for a row of length 0."""
    scored = not options.unscored
    return [
        Hypothesis(
            tuple(row[:end].tolist()),
            float(own.cumsum()[-1]) if scored else math.nan,
            tuple(own[:end].tolist()) if scored else (),
            tuple(positions[:end].tolist()) if options.alignments else (),
        )
        for row, own, positions, end in zip(tokens, log_probs, attended, lengths.tolist(), strict=True)
        if end
    ]

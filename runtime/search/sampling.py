"""Sampling: every token is drawn from the model's distribution; the same seed draws the same tokens.

    logits -> rules -> / temperature -> the top_k likeliest -> the fewest that sum to top_p -> one token

A draw depends only on the seed, the source's tokens, the number of the sample and the step, not on the rest of the
batch, and hardly on the backend: the random number is drawn first and selects a token by the cumulative distribution
in the order of token ids. So a backend's rounding matters only if the number falls next to the boundary of two
tokens, or if two tokens are equally likely at the top_k or top_p cut.

Shapes: B sources, K samples of each, V vocab, T maximum length.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from .greedy import hypotheses_of
from .options import SearchOptions
from .rules import Rules
from .step import Emitted, Hypothesis, Search, Special, Start, Step, staying_rows
from .step_output import finite


def sampling_search(
    step: Step,
    batch: int,
    special: Special,
    options: SearchOptions,
    texts: Sequence[Sequence[int]],
    starts: Sequence[Start] = (),
) -> Search:
    """Draws `nbest` outputs for each of `batch` sources, whose tokens are `texts`; in the order of their numbers.

    The K samples of a source are K beams that never switch. A sample's score is the sum of the model's own
    log-probabilities, before rules, temperature and cuts. Yields an Emitted for every step; a sample that has ended
    emits, and is fed, the end token until the last of its source has ended.
    """
    count = options.nbest
    rules = Rules(options, special, texts, starts)
    draws = draws_for(texts, options)
    chosen = np.zeros((batch, count, options.max_length), dtype=np.int64)
    attended = np.zeros((batch, count, options.max_length), dtype=np.int64)
    log_probs = np.zeros((batch, count, options.max_length))
    lengths = np.zeros((batch, count), dtype=np.int64)

    def hypotheses(numbers: np.ndarray) -> list[list[Hypothesis]]:
        found = (chosen[numbers], log_probs[numbers], attended[numbers], lengths[numbers])
        return [hypotheses_of(*rows, options) for rows in zip(*found, strict=True)]

    sources = np.arange(batch)
    done = np.zeros((batch, count), dtype=bool)
    tokens = np.full((batch, count), special.start, dtype=np.int64)
    parents = np.tile(np.arange(count), (batch, 1))
    length = 0
    while not done.all():
        answer = step(tokens, parents)
        length += 1
        normaliser = finite(answer.normaliser, sources)
        allowed = rules.answer(answer, tokens, parents, length)
        tokens = drawn(probabilities(allowed.logits, options), draws[sources, :, length - 1])
        if options.allowed_log_probs:
            gained = allowed.logits_of(tokens) - allowed.normaliser
        else:
            gained = answer.logits_of(tokens) - normaliser
        tokens[done] = special.end

        chosen[sources, :, length - 1] = tokens
        log_probs[sources, :, length - 1] = np.where(done, 0.0, gained)
        if options.alignments:
            attended[sources, :, length - 1] = step.attention().argmax(axis=-1)
        lengths[sources] += ~done
        done = done | (tokens == special.end) | (length == options.max_length)
        yield Emitted(length - 1, sources, tokens, parents, answer, done.all(axis=1), hypotheses)

        rows = staying_rows(done.all(axis=1))
        if rows is not None:
            step.keep(rows)
            rules.keep(rows)
            sources, done, tokens, parents = sources[rows], done[rows], tokens[rows], parents[rows]

    return hypotheses(np.arange(batch))


def draws_for(texts: Sequence[Sequence[int]], options: SearchOptions) -> np.ndarray:
    """Random numbers [B,K,T] in [0, 1). A longer maximum or more samples extend them and change none.

    With a seed, equal sources draw equal numbers.
    """
    draws = np.zeros((len(texts), options.nbest, options.max_length))
    for source, text in enumerate(texts):
        seed = np.random.SeedSequence().entropy if options.seed is None else options.seed
        named = f"{seed}: {' '.join(map(str, text))}".encode()
        key = np.frombuffer(hashlib.blake2b(named, digest_size=16).digest(), dtype="<u8").astype(np.uint64)
        for sample in range(options.nbest):
            raw = np.random.Philox(key=key, counter=[0, 0, sample, 0]).random_raw(options.max_length)
            draws[source, sample] = (raw >> np.uint64(11)) * 2.0**-53
    return draws


def probabilities(logits: np.ndarray, options: SearchOptions) -> np.ndarray:
    """Logits [B,K,V] -> unnormalised probabilities in fp64, 0 for tokens that are cut off.

    Tokens as likely as the last one kept are kept too. A row without an allowed token (its sample has ended) is zeros.
    """
    scaled = logits.astype(np.float64)
    top = scaled.max(axis=-1, keepdims=True)
    likely = np.exp((scaled - np.where(np.isfinite(top), top, 0.0)) / options.temperature)
    if 0 < options.top_k < likely.shape[-1]:
        likely[likely < np.partition(likely, -options.top_k, axis=-1)[..., -options.top_k, None]] = 0.0
    if options.top_p < 1.0:
        ranked = -np.sort(-likely, axis=-1)
        before = np.cumsum(ranked, axis=-1) - ranked  # sum over all likelier tokens
        within = before < options.top_p * ranked.sum(axis=-1, keepdims=True)
        last = np.maximum(np.count_nonzero(within, axis=-1, keepdims=True) - 1, 0)
        likely[likely < np.take_along_axis(ranked, last, axis=-1)] = 0.0
    return likely


def drawn(likely: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Unnormalised probabilities [B,K,V] and random numbers [B,K] in [0, 1) -> tokens [B,K]."""
    borders = np.cumsum(likely, axis=-1)
    total = borders[..., -1]
    place = np.minimum(draws * total, np.nextafter(total, 0.0))  # a number next to 1 must not round to 1
    return np.argmax(borders > place[..., None], axis=-1)

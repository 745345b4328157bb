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
from itertools import chain

import numpy as np

from .greedy import hypotheses_of
from .options import SearchOptions
from .rules import Rules
from .step import Hypothesis, Search, Special, Start, Step, searched
from .step_output import StepOutput, finite


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
    return searched(step, batch, SamplingState(batch, special, options, texts, starts))


class SamplingState:
    """The state of sampling between two steps: a row of K samples for every source that is still in the batch.

    `sources` are their numbers in the whole batch; `ended` [B,K] are samples that need no more tokens.
    """

    def __init__(
        self,
        batch: int,
        special: Special,
        options: SearchOptions,
        texts: Sequence[Sequence[int]],
        starts: Sequence[Start],
    ):
        count = options.nbest
        self.options, self.end = options, special.end
        self.rules = Rules(options, special, texts, starts)
        self.draws = draws_for(texts, options)
        # Of the whole batch, for all steps:
        self.chosen = np.zeros((batch, count, options.max_length), dtype=np.int64)
        self.attended = np.zeros((batch, count, options.max_length), dtype=np.int64)
        self.log_probs = np.zeros((batch, count, options.max_length))
        self.lengths = np.zeros((batch, count), dtype=np.int64)

        self.length = 0
        self.sources = np.arange(batch)
        self.ended = np.zeros((batch, count), dtype=bool)
        self.done: np.ndarray = np.zeros(batch, dtype=bool)
        self.done_count = 0
        self.tokens = np.full((batch, count), special.start, dtype=np.int64)
        self.parents = np.tile(np.arange(count), (batch, 1))

    @property
    def all_done(self) -> bool:
        return self.done_count == len(self.done)

    def advance(self, step: Step) -> StepOutput:
        """One step: a token is drawn for every sample; those that have ended are fed the end token."""
        answer = step(self.tokens, self.parents)
        self.length += 1
        place = self.length - 1
        normaliser = finite(answer.normaliser, self.sources)
        allowed = self.rules.answer(answer, self.tokens, self.parents, self.length)
        self.tokens = drawn(probabilities(allowed.logits, self.options), self.draws[self.sources, :, place])
        if self.options.allowed_log_probs:
            gained = allowed.logits_of(self.tokens) - allowed.normaliser
        else:
            gained = answer.logits_of(self.tokens) - normaliser
        self.tokens[self.ended] = self.end

        self.chosen[self.sources, :, place] = self.tokens
        self.log_probs[self.sources, :, place] = np.where(self.ended, 0.0, gained)
        if self.options.alignments:
            self.attended[self.sources, :, place] = step.attention().argmax(axis=-1)
        self.lengths[self.sources] += ~self.ended
        self.ended = self.ended | (self.tokens == self.end) | (self.length == self.options.max_length)
        self.done = np.asarray(self.ended.all(axis=1))
        self.done_count = int(np.count_nonzero(self.done))
        return answer

    def keep(self, rows: np.ndarray) -> None:
        """Keeps only these sources from now on."""
        self.rules.keep(rows)
        self.sources, self.ended, self.done = self.sources[rows], self.ended[rows], self.done[rows]
        self.tokens, self.parents = self.tokens[rows], self.parents[rows]
        self.done_count = int(np.count_nonzero(self.done))

    def hypotheses(self, sources: np.ndarray) -> list[list[Hypothesis]]:
        """Of sources that are done, by their numbers in the whole batch."""
        found = (self.chosen[sources], self.log_probs[sources], self.attended[sources], self.lengths[sources])
        return [list(chain(*hypotheses_of(*rows, self.options))) for rows in zip(*found, strict=True)]


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

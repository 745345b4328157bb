"""The rules of a search (logits processors), applied to the model's logits before a token is chosen.

They have the semantics of Hugging Face `generate`: beam search adds up the model's own
log-probabilities, which a rule does not renormalise, and a forced token costs nothing. Shapes: B sources, K beams, V
vocab, T tokens so far, the start token included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from seq2engine.errors import RequestError

from .constraints.phrases import PhraseConstraint
from .constraints.timestamps import TimestampConstraint
from .constraints.trie import TrieConstraint
from .option_checks import barred_of, offset_of, room_of
from .options import SearchOptions
from .step import Special, Start
from .step_output import Candidates, Reduced, StepOutput


class Constraint(Protocol):
    """A rule that keeps a state for every beam: its node in a trie, or the phrases it has completed."""

    def follow(self, tokens: np.ndarray, parents: np.ndarray, length: int) -> None:
        """`tokens` and `parents` [B,K] are what the step was given; the token to be chosen now is number `length`."""

    def limit(self, logits: np.ndarray, length: int) -> np.ndarray:
        """Logits [B,K,V], which may be written to, with -inf for tokens that may not come next."""

    def keep(self, rows: np.ndarray) -> None:
        """Keeps only these sources from now on."""


class Rules:
    """Keeps the tokens of every beam so far, if a rule needs them.

    `starts` are what each source's output begins with; without them, all begin with what the options force.
    """

    def __init__(
        self,
        options: SearchOptions,
        special: Special,
        sources: Sequence[Sequence[int]],
        starts: Sequence[Start] = (),
    ):
        self.options, self.special = options, special
        prefixes = [start.prefix for start in starts] or [options.forced_start]
        self.starts = forced_table(prefixes)  # [B or 1, P]
        self.start_lengths = np.array([len(prefix) for prefix in prefixes])
        self.ranks = np.array([-1 if start.rank is None else start.rank for start in starts] or [-1])
        self.sources = [np.asarray(source, dtype=np.int64) for source in sources]
        self.always = np.array(sorted(options.always_banned - {special.end}), dtype=np.int64)
        self.first = np.array(options.first_banned, dtype=np.int64)
        self.sequences = [np.array(tokens, dtype=np.int64) for tokens in options.banned if len(tokens) > 1]
        self.needs_history = bool(
            self.sequences
            or options.no_repeat_ngram
            or options.source_no_repeat_ngram
            or options.repetition_penalty != 1.0
        )
        self.phrases = phrase_constraint(options, special.end) if options.phrases else None
        self.constraints: list[Constraint] = [] if self.phrases is None else [self.phrases]
        if options.trie is not None:
            place = offset_of(options), room_of(options), barred_of(options)
            self.constraints.append(TrieConstraint(options.trie, special.end, *place))
        if options.timestamps is not None:  # last: it depends on what the other rules allow
            self.constraints.append(TimestampConstraint(options.timestamps, special.end))
        self.idle = options.unruled and not self.starts.size
        self.history: np.ndarray | None = None  # [B, K, T]
        self.barred: np.ndarray | None = None  # [V] tokens that are not in `allowed`, once V is known

    def answer(
        self,
        answer: StepOutput,
        tokens: np.ndarray,
        parents: np.ndarray,
        length: int,
        normaliser: np.ndarray | None = None,
    ) -> StepOutput:
        """The output with the rules applied (see `allowed`). Without rules no full row of logits is read."""
        if self.idle:
            return answer
        if self.candidates_suffice(answer, length):
            return self.among(answer, length)
        return StepOutput(self.allowed(answer.logits, tokens, parents, length, normaliser), own=False)

    def candidates_suffice(self, answer: StepOutput, length: int) -> bool:
        """Whether the candidates suffice for the rules.

        The score of a forced token needs its own logit, which may not be among them.
        """
        if not answer.raw.shape[-1] or isinstance(answer.raw, np.ndarray):
            return not answer.raw.shape[-1]
        forced = not self.options.unscored and (self.forced_at(length, len(answer.candidates.tokens)) >= 0).any()
        needed = self.options.greedy_candidates if self.options.unscored else self.options.best
        return not forced and 0 < needed <= answer.candidates.tokens.shape[-1]

    def among(self, answer: StepOutput, length: int) -> StepOutput:
        """The same for an output that has only candidates, as many as the options need."""
        best = answer.candidates
        barred = np.isin(best.tokens, self.always)
        opening = self.start_lengths + 1 == length
        barred |= opening[:, None, None] & np.isin(best.tokens, self.first)
        if self.options.bars_eos and length < self.options.min_length:
            barred |= best.tokens == self.special.end
        forced = self.forced_at(length, len(best.tokens))
        barred[forced >= 0] = False  # no rule applies to forced tokens
        order = np.argsort(barred, axis=-1, kind="stable")
        tokens = np.take_along_axis(best.tokens, order, axis=-1)
        tokens[forced >= 0] = forced[forced >= 0, None, None]
        assert answer.reduced is not None
        logits = np.where(barred, -np.inf, best.logits).astype(best.logits.dtype)
        found = Candidates(tokens, np.take_along_axis(logits, order, axis=-1))
        return StepOutput(answer.raw, Reduced(found, answer.reduced.exp_sum), rows=answer.rows)

    def allowed(
        self,
        logits: np.ndarray,
        tokens: np.ndarray,
        parents: np.ndarray,
        length: int,
        normaliser: np.ndarray | None = None,
    ) -> np.ndarray:
        """A copy of logits [B,K,V] with -inf for tokens that the rules forbid.

        `tokens` and `parents` [B,K] are what the step was given, `length` counts the token to be chosen. With a
        `normaliser` [B,K] (log-sum-exp of the logits) rules act on log-probabilities, as in beam search; without, on
        the logits themselves, as in greedy search.
        """
        if self.needs_history:
            self.extend_history(tokens, parents)
        for constraint in self.constraints:
            constraint.follow(tokens, parents, length)
        options, end = self.options, self.special.end
        forced = self.forced_at(length, len(logits))  # [B]
        if (forced >= 0).all():
            return self.force(np.empty_like(logits), forced, normaliser)
        result = logits.copy()
        if options.repetition_penalty != 1.0:
            self.penalise(result, normaliser)
        if options.no_repeat_ngram:
            self.forbid(result, *next_tokens(self.flat_history, self.flat_history, options.no_repeat_ngram))
        if options.source_no_repeat_ngram:
            self.forbid(result, *next_tokens(self.flat_history, self.source_rows(), options.source_no_repeat_ngram))
        for sequence in self.sequences:
            self.forbid_sequence(result, sequence)
        result[..., self.always] = -np.inf
        if options.allowed is not None:
            result[..., self.barred_of(result.shape[-1])] = -np.inf
        opening = self.start_lengths + 1 == length  # [B or 1] sources whose first free token this is
        if self.first.size and opening.any():
            rows = np.flatnonzero(np.broadcast_to(opening, len(result)))
            result[rows[:, None], :, self.first] = -np.inf
        if options.bars_eos and length < options.min_length:
            result[..., end] = -np.inf
        for constraint in self.constraints:
            result = constraint.limit(result, length)
        if options.alternatives and not options.ignore_eos:
            result[opening & (self.ranks >= 0), :, end] = -np.inf
        if (forced >= 0).any():
            self.force(result, forced, normaliser)
        self.check_that_some_are_allowed(result, (tokens == end) & (length > 1))
        return result

    def forced_at(self, length: int, batch: int) -> np.ndarray:
        """The token [B] that is forced now, -1 where none is."""
        options = self.options
        if length == options.max_length and options.forced_eos is not None:
            return np.full(batch, options.forced_eos)
        if length > self.starts.shape[1]:
            return np.full(batch, -1)
        return np.broadcast_to(self.starts[:, length - 1], batch)

    def force(self, logits: np.ndarray, forced: np.ndarray, normaliser: np.ndarray | None) -> np.ndarray:
        rows = np.flatnonzero(forced >= 0)
        logits[rows] = -np.inf
        logits[rows, :, forced[rows]] = 0.0 if normaliser is None else normaliser[rows]
        return logits

    def opened(self, allowed: StepOutput, normaliser: np.ndarray, length: int) -> StepOutput:
        """Forces the differing token of an alternative at its own log-probability; no token if there is none.

        `allowed` are the logits that the other rules leave, `normaliser` [B,K] makes log-probabilities of them. All
        beams of a source are the same until then.
        """
        if not self.options.alternatives:
            return allowed
        rows = np.flatnonzero((self.start_lengths + 1 == length) & (self.ranks >= 0))
        if not rows.size:
            return allowed
        logits = allowed.logits
        first = logits[rows, 0]  # [R, V]
        order = np.argsort(-first, axis=1, kind="stable")
        place = np.minimum(self.ranks[rows], first.shape[1] - 1)
        tokens = order[np.arange(len(rows)), place]
        price = first[np.arange(len(rows)), tokens] - normaliser[rows, 0]
        exists = self.ranks[rows] < first.shape[1]
        likely = exists & (np.exp(price) >= self.options.min_alternative_expansion_prob)
        result = logits.copy()
        result[rows] = -np.inf
        rows, tokens = rows[likely], tokens[likely]
        result[rows, :, tokens] = logits[rows, :, tokens]
        return StepOutput(result, own=False)

    def check_that_some_are_allowed(self, logits: np.ndarray, ended: np.ndarray) -> None:
        """Raises if a source has no allowed token left. Beams that have ended [B,K] need none.

        One beam with an allowed token is enough for a source, but every sample needs its own.
        """
        stuck = logits.max(axis=-1) == -np.inf  # [B, K]
        stuck = stuck & ~ended if self.options.sample else stuck.all(axis=1) & ~ended.all(axis=1)
        if stuck.any():
            raise RequestError("the search options forbid every token of the vocabulary; allow some")

    def barred_of(self, vocab: int) -> np.ndarray:
        if self.barred is None:
            assert self.options.allowed is not None
            self.barred = np.ones(vocab, dtype=bool)
            end = () if self.options.ignore_eos else (self.special.end,)
            self.barred[[*self.options.allowed, *end]] = False
        return self.barred

    def keep(self, rows: np.ndarray) -> None:
        """Keeps only these sources from now on."""
        if self.history is not None:
            self.history = self.history[rows]
        if self.sources:
            self.sources = [self.sources[row] for row in rows]
        if len(self.ranks) > 1:
            self.starts, self.start_lengths, self.ranks = self.starts[rows], self.start_lengths[rows], self.ranks[rows]
        for constraint in self.constraints:
            constraint.keep(rows)

    def extend_history(self, tokens: np.ndarray, parents: np.ndarray) -> None:
        if self.history is None:
            self.history = tokens[..., None]
            return
        before = np.take_along_axis(self.history, parents[..., None], axis=1)
        self.history = np.concatenate((before, tokens[..., None]), axis=-1)

    @property
    def flat_history(self) -> np.ndarray:
        """The history of every beam as one row each: [B*K, T]."""
        assert self.history is not None
        return self.history.reshape(-1, self.history.shape[-1])

    def source_rows(self) -> np.ndarray:
        """Every beam's source [B*K, longest], padded with -1."""
        assert self.history is not None
        rows = np.full((len(self.sources), max(map(len, self.sources))), -1, dtype=np.int64)
        for i, source in enumerate(self.sources):
            rows[i, : len(source)] = source
        return rows.repeat(self.history.shape[1], axis=0)

    def forbid(self, logits: np.ndarray, rows: np.ndarray, tokens: np.ndarray) -> None:
        kept = tokens >= 0
        logits.reshape(-1, logits.shape[-1])[rows[kept], tokens[kept]] = -np.inf

    def forbid_sequence(self, logits: np.ndarray, sequence: np.ndarray) -> None:
        before = len(sequence) - 1
        if before > self.flat_history.shape[1]:
            return
        begun = (self.flat_history[:, -before:] == sequence[:-1]).all(axis=1)
        logits.reshape(-1, logits.shape[-1])[begun, sequence[-1]] = -np.inf

    def penalise(self, logits: np.ndarray, normaliser: np.ndarray | None) -> None:
        flat = logits.reshape(-1, logits.shape[-1])
        shift = np.zeros((len(flat), 1), flat.dtype) if normaliser is None else normaliser.reshape(-1, 1)
        seen = np.take_along_axis(flat, self.flat_history, axis=1) - shift
        penalty = self.options.repetition_penalty
        changed = np.where(seen < 0, seen * penalty, seen / penalty) + shift
        np.put_along_axis(flat, self.flat_history, changed.astype(flat.dtype), axis=1)


def phrase_constraint(options: SearchOptions, end: int) -> PhraseConstraint:
    return PhraseConstraint(options.phrases, end, room_of(options), greedy=options.beam == 1)


def forced_table(starts: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Ragged starts -> [B, longest], padded with -1."""
    table = np.full((len(starts), max(map(len, starts))), -1, dtype=np.int64)
    for row, start in enumerate(starts):
        table[row, : len(start)] = start
    return table


def next_tokens(history: np.ndarray, text: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and tokens that would complete an n-gram of `text` [R,L] after `history` [R,T]."""
    if history.shape[1] < size - 1 or text.shape[1] < size:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(text, size, axis=1)  # [R, L-size+1, size]
    ending = history[:, history.shape[1] - (size - 1) :]
    rows, places = np.nonzero((windows[..., :-1] == ending[:, None]).all(axis=-1))
    return rows, windows[rows, places, -1]

"""Greedy search on a device: which options it serves, and its plan, which is sent before the decode.

The graph (export/device_graphs/next_greedy.py) chooses tokens without the host, so the effect of all rules is decided
here, once: at every position of every source a forced token, or the row of tokens that are banned there.

Shapes: B sources, T tokens at most, V vocab, R rows of bans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from ..option_fields import OptionFields
from ..options import SearchOptions
from ..rules import Rules
from ..step import Special, Start
from ..step_output import Candidates, NoLogits, Reduced, StepOutput

OPEN = -1  # in a target: any token but those of the first row of bans; -2 for the second row, and so on
FIRST, SHORT = 1, 2  # rows of bans: of the first free token, before the least length; their sum: of both
ROWS = 4


def unserved(options: OptionFields, candidates: int) -> str:
    """Why a device with this many candidates cannot search with these options; empty if it can."""
    if not options.greedy:
        return f"{options.beam_style} beam search with {options.beam} beams"
    if options.sample or options.alternatives:
        return "sampling" if options.sample else "alternatives"
    if options.needs_attention:
        return "alignments, or a coverage penalty"
    if options.shortlist is not None:
        return "a shortlist"
    if not options.candidates:
        return "rules that read the output so far, or list what is allowed"
    if options.allowed_log_probs and not options.unruled:
        return "log-probabilities among the tokens that rules leave"
    if options.candidates > candidates:
        return f"rules that ban {options.candidates - 2} tokens, more than {candidates - 2}"
    return ""


@dataclass(frozen=True)
class GreedyPlan:
    """The constant inputs of the graph, and its first target."""

    target: np.ndarray  # [B,T] forced tokens, and what is open
    limit: np.ndarray  # [B] most tokens
    banned: np.ndarray  # [R,V]
    end: np.ndarray  # [1]

    def of(self, rows: np.ndarray) -> GreedyPlan:
        """For these sources only."""
        return GreedyPlan(self.target[rows], self.limit[rows], self.banned, self.end)

    def put(self, rows: np.ndarray, newcomers: GreedyPlan) -> GreedyPlan:
        """With the sources of another plan, made with the same options, in these rows."""
        target, limit = self.target.copy(), self.limit.copy()
        target[rows], limit[rows] = newcomers.target, newcomers.limit
        return GreedyPlan(target, limit, self.banned, self.end)


def greedy_plan(
    options: SearchOptions, special: Special, starts: Sequence[Start], batch: int, vocab: int, length: int
) -> GreedyPlan:
    """The plan of a batch for a graph of targets of `length` tokens. The options must be served (`unserved`).

    `starts` are what each output begins with (none: what the options force; such plans are kept, as they repeat).
    """
    if not starts:
        return common_plan(options, special, batch, vocab, length)
    return made_plan(options, special, starts, batch, vocab, length)


@lru_cache(maxsize=16)
def common_plan(options: SearchOptions, special: Special, batch: int, vocab: int, length: int) -> GreedyPlan:
    return made_plan(options, special, (), batch, vocab, length)


def made_plan(
    options: SearchOptions, special: Special, starts: Sequence[Start], batch: int, vocab: int, length: int
) -> GreedyPlan:
    rules = Rules(options, special, (), starts)
    target = np.full((batch, length), OPEN, dtype=np.int64)
    ruled = max(int(rules.start_lengths.max(initial=0)) + 1, options.min_length if options.bars_eos else 0)
    for place in {*range(min(ruled, options.max_length)), options.max_length - 1}:
        row = np.where(rules.start_lengths == place, FIRST, 0)
        row = row + (SHORT if options.bars_eos and place + 1 < options.min_length else 0)
        forced = rules.forced_at(place + 1, batch)
        target[:, place] = np.where(forced >= 0, forced, OPEN - row)
    banned = np.zeros((ROWS, vocab), dtype=bool)
    banned[:, rules.always] = True
    banned[FIRST, rules.first] = banned[FIRST + SHORT, rules.first] = True
    if options.bars_eos:
        banned[SHORT:, special.end] = True
    return GreedyPlan(target, np.full(batch, options.max_length), banned, np.array([special.end]))


@dataclass(frozen=True)
class ChosenTokens:
    """What several steps of greedy search chose: tokens [B,N], their log-probabilities where they are scored, and the
    best logit of every step, which is not finite where the model's logits are not. A source that is done has end
    tokens, and zeros."""

    tokens: np.ndarray
    top_logits: np.ndarray
    chosen_logits: np.ndarray
    exp_sums: np.ndarray  # [B,N] of exp(logit - the best one's)

    @property
    def log_probs(self) -> np.ndarray:
        """[B,N] in fp64."""
        normaliser = np.log(self.exp_sums.astype(np.float64)) + self.top_logits.astype(np.float64)
        return self.chosen_logits.astype(np.float64) - normaliser


class ChoosingStep(Protocol):
    """Steps that choose tokens themselves, by a plan."""

    def choose(self, tokens: np.ndarray) -> ChosenTokens:
        """Some steps, from the tokens just chosen [B,1]: until all sources are done, or they are enough for one
        call."""

    def keep(self, rows: np.ndarray) -> None:
        """As a Step's."""


def hypothesis_lengths(target: np.ndarray, end: int, limit: np.ndarray) -> np.ndarray:
    """Tokens [B,T] of finished sources -> their lengths [B]: up to the first end token, or the limit."""
    ended = target == end
    return np.where(ended.any(axis=1), np.minimum(ended.argmax(axis=1) + 1, limit), limit)


def ahead_columns(position: np.ndarray, limit: np.ndarray, count: int) -> np.ndarray:
    """The columns [B, count] where each source [B] records its next tokens, at most its limit."""
    return np.minimum(position[:, None] + np.arange(count), limit[:, None] - 1)


def outputs_of(found: Sequence[np.ndarray], columns: np.ndarray, rows: int) -> list[StepOutput]:
    """The records at columns [B,N] of each source -> the outputs of N steps."""
    places = columns - columns.min()
    tokens, top, *scored = (np.take_along_axis(array[:rows], places, axis=1) for array in found)
    outputs = []
    for step in range(columns.shape[1]):
        token, best = tokens[:, step, None, None], top[:, step, None].astype(np.float64)
        logit, total = best, np.where(np.isfinite(best), 1.0, np.nan)
        if scored:
            logit = scored[0][:, step, None].astype(np.float64)
            # The sum is that of exp(logit - the best one's), and the candidate may be another.
            with np.errstate(invalid="ignore"):
                total = scored[1][:, step, None].astype(np.float64) * np.exp(best - logit)
            total[total == 0] = 1.0  # a source that was done: nothing was recorded
        outputs.append(StepOutput(NoLogits(rows), Reduced(Candidates(token, logit[..., None]), total)))
    return outputs

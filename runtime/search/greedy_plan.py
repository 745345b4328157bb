"""Greedy search on a device: which options it serves, and its plan, which is sent before the decode.

The graph (export/device_graphs/next_greedy.py) chooses tokens without the host, so the effect of all rules is decided
here, once: at every position of every source a forced token, or the row of tokens that are banned there.

Shapes: B sources, T tokens at most, V vocab, R rows of bans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .option_fields import OptionFields
from .options import SearchOptions
from .rules import Rules
from .step import Special, Start
from .step_output import Candidates, NoLogits, Reduced, StepOutput

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

    `starts` are what each output begins with (none: what the options force).
    """
    rules = Rules(options, special, (), starts)
    target = np.full((batch, length), OPEN, dtype=np.int64)
    for place in range(options.max_length):
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

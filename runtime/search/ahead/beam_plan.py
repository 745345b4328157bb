"""Beam search by a session that runs many steps in one call: what it is given, and what it gives back.

The session ranks, finishes and drops beams as beam.py does (kernels/beams.c), until all sources are done or its cache
is full.

Shapes: N steps, B sources, K beams, T tokens, V vocab, R rows of bans.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from ..beam_styles import ending_of
from ..option_fields import OptionFields
from ..options import SearchOptions
from ..step import Special
from .greedy_plan import common_plan

MOST_BEAMS = 32  # with more, ranking them one by one takes longer than a step of numpy
POSITION, WRITTEN, DONE, FINISHED, BEST_FINISHED = range(5)  # columns of a state; K beams' tokens and the ends follow
NUMBERS, KINDS, SCORES = 5, 4, 3


@dataclass(frozen=True)
class BeamRows:
    """What is known of each source between two calls, a row each.

    `state` [B,5+4K] has the columns named above, the beams' tokens, and of the K best hypotheses that have finished
    their lengths, the beams that they continue, and their last tokens. `scores` [B,3K] are those of the running beams,
    of the finished hypotheses (-inf: none yet), and the log-probabilities of their last tokens.
    """

    state: np.ndarray
    scores: np.ndarray

    def of(self, rows: np.ndarray) -> BeamRows:
        return BeamRows(self.state[rows], self.scores[rows])


def first_beams(batch: int, beam: int, start: int) -> BeamRows:
    """Beams that are still identical: only the first may be continued."""
    state = np.zeros((batch, NUMBERS + KINDS * beam), dtype=np.int64)
    state[:, NUMBERS : NUMBERS + beam] = start
    scores = np.full((batch, SCORES * beam), -np.inf)
    scores[:, 0] = 0.0
    return BeamRows(state, scores)


@dataclass(frozen=True)
class BeamPlan:
    """What of the options the session's steps follow: tokens that are banned, and when a source is done."""

    target: np.ndarray  # [B,T]: -1 - r where row r of `banned` applies
    limit: np.ndarray  # [B] most tokens
    banned: np.ndarray  # [R,V]
    end: np.ndarray  # [1]
    ending: tuple[int, int]  # of a style, and the hypotheses that are enough for it
    norms: np.ndarray  # [T+1] what the score of a hypothesis of each length is divided by
    width: int  # candidates of a beam

    def of(self, rows: np.ndarray) -> BeamPlan:
        """For these sources only."""
        most = (self.banned, self.end, self.ending, self.norms, self.width)
        return BeamPlan(self.target[rows], self.limit[rows], *most)


@lru_cache(maxsize=16)
def beam_plan(options: SearchOptions, special: Special, batch: int, vocab: int) -> BeamPlan:
    """The plan of a batch, for options that need no step of the search's own (`runs_ahead`)."""
    bans = common_plan(options, special, batch, vocab, options.max_length)
    norms = np.maximum(np.arange(options.max_length + 1), 1) ** float(options.length_penalty)
    width = min(options.best, vocab)
    return BeamPlan(bans.target, bans.limit, bans.banned, bans.end, ending_of(options), norms, width)


@dataclass(frozen=True)
class BeamsAhead:
    """Steps that ran: the tokens and parents of the beams that ran on [N,2,B,K], their log-probabilities [N,B,K], and
    what is known of the sources after the last one. `mask` [B,K,L] marks the slots that each beam sees. The logits of
    the source `not_finite` are no numbers, or some of them (None: of no source), and no step follows."""

    choices: np.ndarray
    log_probs: np.ndarray
    rows: BeamRows
    mask: np.ndarray
    not_finite: int | None


class BeamsStep(Protocol):
    """Steps of beam search that the session makes itself."""

    def run(self, rows: BeamRows) -> BeamsAhead:
        """Some steps: until all sources are done, or they are enough for one call."""

    def keep(self, rows: np.ndarray) -> None:
        """As a Step's."""


def runs_ahead(options: OptionFields, candidates: int) -> bool:
    """Whether a session can follow these options by itself, if rules may ban all but one of so many tokens."""
    forced = options.forced_start or options.forced_eos is not None or options.prompt
    other = options.sample or options.alternatives or options.needs_attention or options.shortlist is not None
    known = options.best > 0 and options.candidates <= candidates
    return known and not forced and not other and 1 < options.beam <= MOST_BEAMS

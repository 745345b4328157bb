"""Beam search by a session that runs several steps at once, as long as nothing ends (search/beam.py).

Shapes: N steps, B sources, K beams.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .option_fields import OptionFields
from .step import Step
from .step_output import StepOutput

MOST_BEAMS = 32  # with more, ranking them one by one takes longer than a step of numpy


@dataclass(frozen=True)
class BeamsAhead:
    """Steps of which nothing is left to do: tokens, parents and log-probabilities [N,B,K] of the beams that ran on, and
    their scores [B,K] after the last one. `ran` steps were computed: where one more than N, `output` is its output,
    which the search has to deal with. `mask` [B,K,L] is that of the last one computed."""

    tokens: np.ndarray
    parents: np.ndarray
    log_probs: np.ndarray
    scores: np.ndarray
    mask: np.ndarray
    ran: int
    output: StepOutput | None


class AheadStep(Step, Protocol):
    """Steps of beam search that may be made several at a time."""

    alike: bool  # the next step is made with one beam of each source

    def run_ahead(self, tokens: np.ndarray, parents: np.ndarray, scores: np.ndarray, end: int, most: int) -> BeamsAhead:
        """At most so many steps, from the beams just chosen [B,K] and their scores."""


class MadeStep:
    """A step that has been computed."""

    def __init__(self, output: StepOutput):
        self.output = output

    def __call__(self, tokens: np.ndarray, parents: np.ndarray) -> StepOutput:
        return self.output

    def keep(self, rows: np.ndarray) -> None:
        raise AssertionError("sources leave the step that computes")

    def attention(self) -> np.ndarray:
        raise AssertionError("a search that reads attention weights makes its steps one by one")


def runs_ahead(options: OptionFields) -> bool:
    """Whether all that these options make of a step without an end token is that the best continuations run on."""
    plain = options.unruled and not (options.sample or options.alternatives or options.phrases)
    return plain and 1 < options.beam <= MOST_BEAMS and not options.needs_attention and options.shortlist is None

"""Whose beam search: what sets those of Hugging Face, fairseq, CTranslate2 and Marian apart, in one table.

What they share is the loop in beam.py: every step ranks the best 2K continuations of a source, end tokens among the
first K end a hypothesis, the first K others run on, and a hypothesis is worth its log-probability divided by
length ** length_penalty, where the length counts the end token. All but fairseq cut at the maximum length, where the
first K candidates count as ended. Equal scores rank by lower beam, then lower token, which is Hugging Face's order; the
others leave it to their sort.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .options import SearchOptions


@dataclass(frozen=True)
class Standing:
    """How far sources have come: scores [B,K] of ended hypotheses and running beams, best first, -inf where none."""

    ended: np.ndarray
    running: np.ndarray
    count: np.ndarray  # [B] hypotheses that have ended, those that better ones have replaced too
    topped: np.ndarray  # [B] whether the best candidate of some step was one that ended
    length: int  # of the running beams
    skipped: np.ndarray | int = 0  # [B] tokens of it that do not count, those up to the one of an alternative


@dataclass(frozen=True)
class Semantics:
    """`settled` names the sources [B] that need no more steps; nobody asks before a hypothesis has ended.

    A source without a running beam never needs more, one of which none has ended always.
    """

    settled: Callable[[Standing, SearchOptions], np.ndarray]
    first_come: bool = False  # K hypotheses may end and none replaces another; else the best K of all are kept
    shrinks: bool = False  # an ended hypothesis takes its place along: K - ended candidates of a step are looked at
    forces_end: bool = False  # at the maximum length only the end token may be said, at its own price
    renormalises: bool = False  # what rules leave of the vocabulary is a distribution again


def settled_by_early_stopping(standing: Standing, options: SearchOptions) -> np.ndarray:
    """Hugging Face: with K hypotheses ended, `early_stopping` decides.

    True stops at once; False when the best running beam, normalised at its present length, is no better than the worst
    of them; "never" when it could not become better either.
    """
    worst, best = standing.ended[:, -1], standing.running[:, 0]
    full: np.ndarray = worst > -np.inf
    if not np.count_nonzero(full):
        return full
    if options.early_stopping != "never" and options.early_stopping:
        return full
    # Log-probabilities only fall, so with a reward for length the best a beam can hope for is never to fall again.
    hopeful = options.early_stopping == "never" and options.length_penalty > 0
    length = np.maximum((options.max_length if hopeful else standing.length) - standing.skipped, 1)
    reach = best / length**options.length_penalty
    return full & (reach <= worst)


def settled_when_full(standing: Standing, options: SearchOptions) -> np.ndarray:
    """fairseq: K hypotheses have ended. Marian: so they have, and no beam is left."""
    return standing.count >= options.beam


def settled_by_patience(standing: Standing, options: SearchOptions) -> np.ndarray:
    """CTranslate2: K * patience hypotheses have ended, of one beam the first.

    Without penalties no later hypothesis can beat one that was the best candidate of its step: then n-best is
    enough.
    """
    if options.length_penalty == 0 and options.coverage_penalty == 0:
        return standing.topped & (standing.count >= options.kept)
    needed = 1 if options.beam == 1 else math.floor(options.beam * options.patience + 0.5)
    return standing.count >= needed


PROFILES = {
    "huggingface": Semantics(settled_by_early_stopping),
    "fairseq": Semantics(settled_when_full, first_come=True, forces_end=True),
    "ctranslate2": Semantics(settled_by_patience, renormalises=True),
    "marian": Semantics(settled_when_full, shrinks=True),
}

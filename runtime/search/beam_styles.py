"""The differences between Hugging Face's and CTranslate2's beam search, in one table.

Both share the loop in beam.py: every step ranks the 2K best continuations of a source, an end token among the first K
finishes a hypothesis, the first K others run on, and the score of a hypothesis is its log-probability divided by
length ** length_penalty, where the length counts the end token. At the maximum length the first K candidates count as
finished. Candidates with equal scores rank by lower beam, then lower token, which is Hugging Face's order; CTranslate2
leaves it to its sort.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .options import SearchOptions


@dataclass(frozen=True)
class BeamProgress:
    """Scores [B,K] of finished hypotheses and of running beams, best first, -inf where there is none."""

    finished: np.ndarray
    running: np.ndarray
    count: np.ndarray  # [B] hypotheses that have finished, including replaced ones
    best_finished: np.ndarray  # [B] whether the best candidate of some step finished
    length: int  # of the running beams
    uncounted: np.ndarray | int = 0  # [B] leading tokens of an alternative that its length does not count


@dataclass(frozen=True)
class BeamStyle:
    """`is_done` returns which sources [B] need no more steps; it is called once a source has `least_finished`.

    A source without a running beam is always done, one without a finished hypothesis never is.
    """

    is_done: Callable[[BeamProgress, SearchOptions], np.ndarray]
    least_finished: Callable[[SearchOptions], int]
    renormalises: bool = False  # log-probabilities are renormalised over the allowed tokens


def done_by_early_stopping(progress: BeamProgress, options: SearchOptions) -> np.ndarray:
    """Hugging Face: with K hypotheses finished, `early_stopping` decides.

    True stops at once; False when the best running beam, normalised at its present length, is no better than the worst
    of them; "never" when it could not become better either.
    """
    worst, best = progress.finished[:, -1], progress.running[:, 0]
    full: np.ndarray = worst > -np.inf
    if not np.count_nonzero(full):
        return full
    if options.early_stopping != "never" and options.early_stopping:
        return full
    # Log-probabilities only decrease, so the best case is that a beam loses nothing more.
    hopeful = options.early_stopping == "never" and options.length_penalty > 0
    length = np.maximum((options.max_length if hopeful else progress.length) - progress.uncounted, 1)
    reachable = best / length**options.length_penalty
    return full & (reachable <= worst)


def done_by_patience(progress: BeamProgress, options: SearchOptions) -> np.ndarray:
    """CTranslate2: K * patience hypotheses have finished; with one beam, the first.

    Without penalties no later hypothesis can beat one that was the best candidate of its step: then `nbest` finished
    hypotheses are enough.
    """
    enough = progress.count >= patient_count(options)
    return progress.best_finished & enough if unpenalised(options) else enough


def unpenalised(options: SearchOptions) -> bool:
    return options.length_penalty == 0 and options.coverage_penalty == 0


def patient_count(options: SearchOptions) -> int:
    """Finished hypotheses that CTranslate2 waits for."""
    if unpenalised(options):
        return options.kept
    return 1 if options.beam == 1 else math.floor(options.beam * options.patience + 0.5)


NO_BETTER, NEVER_BETTER, ALL_FINISHED, ENOUGH, ENOUGH_AND_BEST = range(5)  # of a session that ends sources itself


def ending_of(options: SearchOptions) -> tuple[int, int]:
    """What `is_done` of the options' style asks, as one of these, and how many hypotheses are enough for it."""
    if options.beam_style == "ctranslate2":
        return ENOUGH_AND_BEST if unpenalised(options) else ENOUGH, patient_count(options)
    if options.early_stopping == "never":
        return NEVER_BETTER if options.length_penalty > 0 else NO_BETTER, options.beam
    return ALL_FINISHED if options.early_stopping else NO_BETTER, options.beam


STYLES = {
    "huggingface": BeamStyle(done_by_early_stopping, lambda options: options.beam),
    "ctranslate2": BeamStyle(done_by_patience, patient_count, renormalises=True),
}

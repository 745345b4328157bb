"""Two systems scored against the same references, and how sure the difference is.

Error rates: a paired bootstrap over the lines gives intervals of both rates and of their difference. BLEU and chrF:
sacrebleu's paired bootstrap gives intervals of both scores and the p-value of their difference.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from seq2engine.errors import RequestError, missing_package

from .metrics import (
    References,
    RightWords,
    Words,
    error_counts,
    has_stress,
    levenshtein,
    rate_names,
    unstressed,
    unstressed_references,
    words_of,
)

RESAMPLES = 1000
SURE = 95  # percent
METRICS = ("errors", "bleu", "chrf")  # what may be asked for
SCORES = {"bleu": ("BLEU", "BLEU"), "chrf": ("chrF", "CHRF")}  # what it is called here, and its class in sacrebleu


@dataclass(frozen=True)
class Interval:
    """A score and its 95 % confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """Candidate - reference, with its 95 % confidence interval (error rates) or its p-value (BLEU, chrF)."""

    value: float
    low: float | None = None
    high: float | None = None
    p_value: float | None = None


@dataclass(frozen=True)
class Rate:
    """One metric of one search, of both sides."""

    search: str
    metric: str  # WER; PER; lines wrong; PER, no stress; BLEU; chrF
    lines: int
    reference: Interval
    candidate: Interval
    difference: Difference

    @property
    def higher_is_better(self) -> bool:
        return self.metric in ("BLEU", "chrF")

    @property
    def unit(self) -> float:
        """Error rates are shares of 1, shown in percent; BLEU and chrF go to 100."""
        return 1.0 if self.higher_is_better else 100.0

    @property
    def worse_by(self) -> float:
        """How much worse the candidate is: points of a score, a share of 1 of an error rate. Below 0 it is better."""
        return -self.difference.value if self.higher_is_better else self.difference.value

    @property
    def significantly_worse(self) -> bool:
        """Whether the whole interval of the difference is on the worse side, or its p-value below 5 %."""
        if self.difference.p_value is not None:
            return self.worse_by > 0 and self.difference.p_value < 1 - SURE / 100
        bound = self.difference.high if self.higher_is_better else self.difference.low
        assert bound is not None
        return bound < 0 if self.higher_is_better else bound > 0


def interval_text(rate: Rate, part: Interval) -> str:
    """6.31% [6.02, 6.60]."""
    value, low, high = (f"{bound * rate.unit:.2f}" for bound in (part.value, part.low, part.high))
    return f"{value}{'%' if rate.unit > 1 else ''} [{low}, {high}]"


def difference_text(rate: Rate) -> str:
    """+0.12% [-0.03, +0.27], or -0.42 (p = 0.013)."""
    part = rate.difference
    value = f"{part.value * rate.unit:+.2f}{'%' if rate.unit > 1 else ''}"
    if part.low is not None and part.high is not None:
        return f"{value} [{part.low * rate.unit:+.2f}, {part.high * rate.unit:+.2f}]"
    return f"{value} (p = {part.p_value:.2g})" if part.value else value


def rates_from_outputs(
    search: str,
    reference: Mapping[str, str],
    candidate: Mapping[str, str],
    references: References,
    metrics: Sequence[str] = ("errors",),
) -> tuple[Rate, ...]:
    """The outputs of both sides for every source of the references -> their scores."""
    check_metrics(metrics)
    found: list[Rate] = []
    for metric in metrics:
        if metric == "errors":
            found += error_rates_of(search, (reference, candidate), references)
        else:
            found.append(sacrebleu_rate(search, metric, (reference, candidate), references))
    return tuple(found)


def check_metrics(metrics: Sequence[str]) -> None:
    """Raises if a metric is unknown or its package not installed, before anything is decoded."""
    if unknown := [metric for metric in metrics if metric not in METRICS]:
        raise RequestError(f"unknown metric {unknown[0]!r}, expected one of {', '.join(METRICS)}")
    levenshtein()  # the cost of a precision counts edits, whatever the metrics
    if set(metrics) - {"errors"}:
        sacrebleu_module("metrics")


def sacrebleu_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"sacrebleu.{name}")
    except ModuleNotFoundError as error:
        if missing := missing_package(error, "counting BLEU and chrF"):
            raise missing from error
        raise


def error_rates_of(search: str, sides: Sequence[Mapping[str, str]], references: References) -> list[Rate]:
    """Both error rates; once more without stress marks if the references have them."""
    right = words_of(references)
    names = rate_names(right)
    given = [{source: side[source].split() for source in references} for side in sides]
    found = error_pair(search, names, given, right)
    if has_stress(right):
        plain = [f"{name}, no stress" for name in names]
        found += error_pair(search, plain, [unstressed(side) for side in given], unstressed_references(right))
    return found


def error_pair(search: str, names: Sequence[str], sides: Sequence[Words], right: RightWords) -> list[Rate]:
    """The rates over tokens and over lines."""
    counts = np.array([error_counts(side, right) for side in sides], dtype=np.float64)  # [2, N, 3]
    errors, tokens, wrong = np.moveaxis(counts, -1, 0)  # [2, N] each
    return [
        bootstrapped_rate(search, names[0], errors, tokens),
        bootstrapped_rate(search, names[1], wrong, np.ones_like(wrong)),
    ]


def bootstrapped_rate(search: str, metric: str, errors: np.ndarray, totals: np.ndarray) -> Rate:
    """Errors and totals [2,N] of every line, of reference and candidate; both are resampled alike."""
    lines = errors.shape[1]
    rng = np.random.default_rng(0)
    drawn = np.empty((RESAMPLES, 2))
    for resample in range(RESAMPLES):
        weights = np.bincount(rng.integers(lines, size=lines), minlength=lines)
        drawn[resample] = (errors @ weights) / np.maximum(totals @ weights, 1.0)
    reference, candidate = errors.sum(axis=1) / np.maximum(totals.sum(axis=1), 1.0)
    return Rate(
        search,
        metric,
        lines,
        Interval(float(reference), *bounds(drawn[:, 0])),
        Interval(float(candidate), *bounds(drawn[:, 1])),
        Difference(float(candidate - reference), *bounds(drawn[:, 1] - drawn[:, 0])),
    )


def bounds(drawn: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(drawn, [(100 - SURE) / 2, (100 + SURE) / 2])
    return float(low), float(high)


def sacrebleu_rate(search: str, metric: str, sides: Sequence[Mapping[str, str]], references: References) -> Rate:
    """BLEU or chrF with sacrebleu's paired bootstrap test."""
    name, kind = SCORES[metric]
    most = max(len(targets) for targets in references.values())
    streams = [[targets[i] if i < len(targets) else None for targets in references.values()] for i in range(most)]
    test = sacrebleu_module("significance").PairedTest(
        [(which, [side[source] for source in references]) for which, side in zip(("a", "b"), sides, strict=True)],
        {name: getattr(sacrebleu_module("metrics"), kind)()},
        references=streams,
        test_type="bs",
        n_samples=RESAMPLES,
    )
    _, results = test()
    ((reference, candidate),) = (found for column, found in results.items() if column != "System")
    intervals = [Interval(r.score, float(r.mean - r.ci), float(r.mean + r.ci)) for r in (reference, candidate)]
    difference = Difference(candidate.score - reference.score, p_value=float(candidate.p_value))
    return Rate(search, name, len(references), intervals[0], intervals[1], difference)

"""How sure a corpus score is: paired bootstrap over the lines, for both sides and for what lies between them.

Every score here is a function of sums over lines (wrong tokens and tokens; n-grams that match), so that a resampled
corpus is a weighted sum, and both sides are resampled alike.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from seq2engine.errors import RequestError, missing_package

from .metrics import STRESSED, References, error_counts, unstressed

RESAMPLES = 1000
SURE = 95  # percent
METRICS = ("errors", "bleu", "chrf")  # what may be asked for

Score = Callable[[np.ndarray], np.ndarray]  # sums [R,M] -> scores [R]


@dataclass(frozen=True)
class Interval:
    """A score, and where 95 % of the resampled corpora put it."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Rate:
    """One score of one search on both sides; `difference` is candidate - reference, of the same resampled lines."""

    search: str
    metric: str
    lines: int
    reference: Interval
    candidate: Interval
    difference: Interval

    @property
    def unit(self) -> float:
        """Error rates are shares of 1; BLEU and chrF go to 100 by themselves."""
        return 1.0 if self.metric in ("BLEU", "chrF") else 100.0

    @property
    def worse_by(self) -> float:
        """How much worse the candidate is: points of a score, a share of 1 of an error rate. Below 0 it is better."""
        return -self.difference.value if self.metric in ("BLEU", "chrF") else self.difference.value

    @property
    def label(self) -> str:
        """The metric in words: a "word" error rate that counts lines is one only where a line is a word."""
        name, comma, rest = self.metric.partition(",")
        return {"PER": "wrong tokens", "WER": "wrong lines"}.get(name, name) + comma + rest

    @property
    def fell(self) -> bool:
        """Whether the candidate is worse beyond the interval: all of it lies on the worse side."""
        return self.difference.high < 0 if self.metric in ("BLEU", "chrF") else self.difference.low > 0


def interval_text(rate: Rate, part: Interval, sign: str = "") -> str:
    """6.31% [6.02, 6.60]."""
    value, low, high = (f"{bound * rate.unit:{sign}.2f}" for bound in (part.value, part.low, part.high))
    return f"{value}{'%' if rate.unit > 1 else ''} [{low}, {high}]"


def difference_text(rate: Rate) -> str:
    return interval_text(rate, rate.difference, "+")


def rates_from_outputs(
    search: str,
    reference: Mapping[str, str],
    candidate: Mapping[str, str],
    references: References,
    metrics: Sequence[str] = ("errors",),
) -> tuple[Rate, ...]:
    """What both sides said of every source of the references -> their scores."""
    check_metrics(metrics)
    found = []
    for metric in metrics:
        makers = error_tables if metric == "errors" else sacrebleu_tables
        for name, sides, score in makers(metric, (reference, candidate), references):
            found.append(rate_of(search, name, sides, score))
    return tuple(found)


def check_metrics(metrics: Sequence[str]) -> None:
    """Refuses what is unknown or not installed, before anything is decoded."""
    if unknown := [metric for metric in metrics if metric not in METRICS]:
        raise RequestError(f"unknown metric {unknown[0]!r}, expected one of {', '.join(METRICS)}")
    if set(metrics) - {"errors"}:
        sacrebleu_metrics()


def sacrebleu_metrics() -> dict[str, tuple[str, type]]:
    try:
        module = importlib.import_module("sacrebleu.metrics")
    except ModuleNotFoundError as error:
        if missing := missing_package(error, "counting BLEU and chrF"):
            raise missing from error
        raise
    return {"bleu": ("BLEU", module.BLEU), "chrf": ("chrF", module.CHRF)}


Table = tuple[str, tuple[np.ndarray, np.ndarray], Score]  # metric, both sides' sums by line [N,M], the score of sums


def error_tables(metric: str, sides: Sequence[Mapping[str, str]], references: References) -> list[Table]:
    """Token and line error rates; once more without stress marks where the references have them."""
    right = {source: [target.split() for target in targets] for source, targets in references.items()}
    said = [{source: side[source].split() for source in references} for side in sides]
    tables = error_pair("", said, right)
    if any(STRESSED.fullmatch(token) for targets in right.values() for target in targets for token in target):
        plain = {source: [unstressed(target) for target in targets] for source, targets in right.items()}
        bare = [{source: unstressed(tokens) for source, tokens in side.items()} for side in said]
        tables += error_pair(", no stress", bare, plain)
    return tables


def error_pair(
    suffix: str, said: Sequence[Mapping[str, Sequence[str]]], right: Mapping[str, Sequence[Sequence[str]]]
) -> list[Table]:
    first, second = (np.array(error_counts(side, right), dtype=np.float64) for side in said)  # [N, 3]
    return [
        (f"PER{suffix}", (first, second), lambda sums: sums[:, 0] / np.maximum(sums[:, 1], 1.0)),
        (f"WER{suffix}", (first, second), lambda sums: sums[:, 2] / len(first)),
    ]


def sacrebleu_tables(metric: str, sides: Sequence[Mapping[str, str]], references: References) -> list[Table]:
    """The statistics that sacrebleu keeps of every line for its own resampling."""
    name, kind = sacrebleu_metrics()[metric]
    scorer = kind()
    most = max(len(targets) for targets in references.values())
    streams = [[targets[i] if i < len(targets) else None for targets in references.values()] for i in range(most)]
    tables = [
        np.array(scorer._extract_corpus_statistics([side[source] for source in references], streams), dtype=np.float64)
        for side in sides
    ]

    def score(sums: np.ndarray) -> np.ndarray:
        return np.array([scorer._compute_score_from_stats(row.tolist()).score for row in sums])

    return [(name, (tables[0], tables[1]), score)]


def rate_of(search: str, metric: str, sides: tuple[np.ndarray, np.ndarray], score: Score) -> Rate:
    lines = len(sides[0])
    rng = np.random.default_rng(0)
    sums = [np.empty((RESAMPLES, side.shape[1])) for side in sides]
    for turn in range(RESAMPLES):
        weights = np.bincount(rng.integers(lines, size=lines), minlength=lines)
        for side, total in zip(sides, sums, strict=True):
            total[turn] = weights @ side
    drawn = [score(total) for total in sums]
    own = [float(score(side.sum(axis=0, keepdims=True))[0]) for side in sides]
    reference, candidate = (interval(value, draws) for value, draws in zip(own, drawn, strict=True))
    return Rate(search, metric, lines, reference, candidate, interval(own[1] - own[0], drawn[1] - drawn[0]))


def interval(value: float, drawn: np.ndarray) -> Interval:
    low, high = np.percentile(drawn, [(100 - SURE) / 2, (100 + SURE) / 2])
    return Interval(value, float(low), float(high))

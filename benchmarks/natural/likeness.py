"""How similar an arm's outputs are to the first arm's and to the references."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from seq2engine.runtime.quality.intervals import SCORES, sacrebleu_module

from .result import Likeness


def likeness_of(outputs: Sequence[str], first: Sequence[str], references: Sequence[Sequence[str]]) -> Likeness:
    """The outputs of all lines, those of the first arm, and the references of each line."""
    equal = sum(mine == other for mine, other in zip(outputs, first, strict=True))
    to_first = [[line] for line in first]
    return Likeness(
        len(outputs),
        equal,
        score("chrf", outputs, to_first),
        score("bleu", outputs, to_first),
        score("chrf", outputs, references),
        score("bleu", outputs, references),
    )


def score(metric: str, outputs: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    most = max(map(len, references))
    streams = [[line[i] if i < len(line) else None for line in references] for i in range(most)]
    return float(metric_of(metric).corpus_score(list(outputs), streams).score)


@cache
def metric_of(metric: str) -> Any:
    return getattr(sacrebleu_module("metrics"), SCORES[metric][1])()


def check_metrics() -> None:
    """Raises where the package is not installed, before anything is timed."""
    for metric in SCORES:
        metric_of(metric)

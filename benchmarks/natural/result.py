"""What was measured on real sentences, as data."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from seq2engine.errors import UsageError

from ..intervals import paired_interval, separate_interval
from ..timing import Ratio, Samples, ratio_with

FEWEST_CALLS, SINGLE_CALLS = 12, 64  # of batches, and of single sources: as many as a run has sentences for


@dataclass(frozen=True)
class Workload:
    """Sentences per call, decoded together, and beams."""

    batch: int
    beam: int

    def __str__(self) -> str:
        return f"batch {self.batch}, beam {self.beam}"

    def calls(self, sentences: int) -> int:
        return min(sentences // self.batch, max(FEWEST_CALLS, SINGLE_CALLS // self.batch))


@dataclass(frozen=True)
class Likeness:
    """Of an arm's outputs: lines equal to the first arm's, chrF and BLEU against those and against the references."""

    lines: int
    equal: int
    chrf: float
    bleu: float
    reference_chrf: float
    reference_bleu: float


@dataclass(frozen=True)
class NaturalArm:
    """One arm in one workload: a sample for every call, and the tokens of all its outputs."""

    samples: Samples
    tokens: int
    likeness: Likeness
    speedup: Ratio  # over the first arm
    setting: str = ""  # of a peer: its best one

    @property
    def tokens_per_second(self) -> float:
        return 1e9 * self.tokens / sum(self.samples.nanoseconds)


@dataclass(frozen=True)
class NaturalResult:
    workload: Workload
    arms: dict[str, NaturalArm]


def workloads_from_text(texts: Sequence[str]) -> tuple[Workload, ...]:
    """Workloads written as batch x beam, such as 8x4."""
    if problems := workload_problems(texts):
        raise UsageError("; ".join(problems))
    return tuple(Workload(*map(int, text.split("x"))) for text in texts)


def workload_problems(texts: Sequence[str]) -> list[str]:
    wrong = [text for text in texts if re.fullmatch(r"[1-9]\d*x[1-9]\d*", text, re.ASCII) is None]
    return [f"workload {', '.join(wrong)}: expected batch x beam, such as 8x4"] if wrong else []


def whole_ratio(a: Samples, b: Samples) -> Ratio:
    """The speedup of b over a in all calls together; the interval is that of the ratio per call.

    Sentences differ in length, so a median of calls would not describe the whole.
    """
    one, other = (np.array(samples.nanoseconds, dtype=np.float64) for samples in (a, b))
    interval = paired_interval(one / other) or separate_interval(one, other)
    return ratio_with(float(one.sum() / other.sum()), interval, len(one))


def natural_from_dict(values: dict[str, Any], first: str) -> NaturalResult:
    """A result from parsed JSON; speedups are computed again from the samples."""
    samples = {name: Samples(tuple(arm["samples"]["nanoseconds"])) for name, arm in values["arms"].items()}
    arms = {
        name: NaturalArm(
            samples[name],
            arm["tokens"],
            Likeness(**arm["likeness"]),
            whole_ratio(samples[first], samples[name]),
            arm["setting"],
        )
        for name, arm in values["arms"].items()
    }
    return NaturalResult(Workload(**values["workload"]), arms)


def natural_values(result: NaturalResult) -> dict[str, Any]:
    """All fields, and derived values besides the raw samples."""
    values = dataclasses.asdict(result)
    for name, arm in result.arms.items():
        times = arm.samples
        values["arms"][name]["summary"] = {
            "tokens_per_second": arm.tokens_per_second,
            **{f"p{percent}_ms": times.percentile(percent) for percent in (50, 90, 99)},
            "verdict": arm.speedup.verdict,
        }
    return values

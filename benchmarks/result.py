"""What a benchmark found, as data: raw samples, and with them everything a report says."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..runtime.cache import CacheCounts
from ..runtime.quality import Quality, quality_from_dict
from .cases import Case
from .machine import Environment
from .timing import Ratio, Samples, ratio_interval

FORMAT = 3
PARTS = ("encoder", "step", "end_to_end")


@dataclass(frozen=True)
class Measure:
    """One part of one case on one arm. `tokens` is what a call works off: source tokens (encoder) or output tokens."""

    samples: Samples
    tokens: int
    speedup: Ratio  # over the first arm

    @property
    def tokens_per_second(self) -> float:
        return 1000 * self.tokens / self.samples.median


@dataclass(frozen=True)
class ArmResult:
    """One arm in one case. Of its sources, `equal` have the first arm's tokens when decoded as a user would, and
    `equal_timed` in the decode of fixed length that is timed. `split` are the pieces of the end to end times."""

    equal: int
    equal_timed: int
    parts: dict[str, Measure]
    cache: CacheCounts
    split: dict[str, Samples]

    def share(self, piece: str) -> float:
        """What part of all time end to end a piece took."""
        return sum(self.split[piece].nanoseconds) / sum(sum(samples.nanoseconds) for samples in self.split.values())

    def decoding(self) -> Samples:
        """The times end to end without the encoder's, whose cost is no output token's."""
        pieces = [samples.nanoseconds for piece, samples in self.split.items() if piece != "encoder"]
        return Samples(tuple(map(sum, zip(*pieces, strict=True))))


@dataclass(frozen=True)
class CaseResult:
    case: Case
    arms: dict[str, ArmResult]

    def same(self, arm: str) -> bool:
        """Did this arm give the first arm's tokens for every source, both times?"""
        return self.arms[arm].equal == self.arms[arm].equal_timed == self.case.batch


@dataclass(frozen=True)
class Curve:
    """What one output position of a case costs on an arm, the encoder aside: milliseconds by output length."""

    batch: int
    beam: int
    source: int
    arm: str
    costs: dict[int, float]

    def __str__(self) -> str:
        return f"batch {self.batch}, beam {self.beam}, source {self.source}, {self.arm}"

    @property
    def growth(self) -> float:
        """How many times as much a token costs at the longest output as at the shortest."""
        return self.costs[max(self.costs)] / self.costs[min(self.costs)]


@dataclass(frozen=True)
class Arm:
    """A backend in a precision: what it loaded, and how long that took."""

    backend: str
    precision: str
    bytes: int
    load_ms: float


@dataclass(frozen=True)
class BenchResult:
    bundle: str
    checkpoint_sha256: str
    model: dict[str, Any]  # the fields of its config
    cache_form: str
    arms: dict[str, Arm]
    cases: tuple[CaseResult, ...]
    quality: dict[str, tuple[Quality, ...]]  # of every arm on the references, if there were any
    environment: Environment
    rounds: int
    warmup: int
    seed: int
    made_at: str
    format: int = FORMAT

    @property
    def first(self) -> str:
        """The arm that all others are compared with."""
        return next(iter(self.arms))

    def curves(self) -> tuple[Curve, ...]:
        """The cost of a token against the output length, wherever cases differ in nothing else."""
        lengths: dict[tuple[int, int, int], dict[int, CaseResult]] = {}
        for case in self.cases:
            sizes = case.case
            lengths.setdefault((sizes.batch, sizes.beam, sizes.source), {})[sizes.target] = case
        return tuple(
            Curve(*sizes, arm, {n: found[n].arms[arm].decoding().median / n for n in sorted(found)})
            for sizes, found in lengths.items()
            if len(found) > 1
            for arm in self.arms
        )

    def to_json(self) -> str:
        """All fields, and beside the raw samples what they come to, for readers that are not this package."""
        values = dataclasses.asdict(self)
        values["curves"] = [{**dataclasses.asdict(curve), "growth": curve.growth} for curve in self.curves()]
        for case, case_values in zip(self.cases, values["cases"], strict=True):
            for name, arm in case.arms.items():
                for part, measure in arm.parts.items():
                    case_values["arms"][name]["parts"][part]["summary"] = summary(measure)
                for piece in arm.split:
                    case_values["arms"][name]["split"][piece]["share"] = arm.share(piece)
                case_values["arms"][name]["slots_of_greedy"] = slots_of_greedy(case, name)
        return json.dumps(values, indent=1) + "\n"


def summary(measure: Measure) -> dict[str, Any]:
    samples = measure.samples
    return {
        "median_ms": samples.median,
        "p10_ms": samples.p10,
        "p90_ms": samples.p90,
        "p99_ms": samples.p99,
        "spread": samples.spread,
        "tokens_per_second": measure.tokens_per_second,
        "verdict": measure.speedup.verdict,
    }


def slots_of_greedy(case: CaseResult, arm: str) -> float:
    """The cache that a case had at most against greedy search's, which in the end has a slot for every token."""
    return case.arms[arm].cache.most_slots / case.case.target


def winner(case: CaseResult, part: str, seed: int) -> tuple[str, str, Ratio] | None:
    """The fastest arm, the next one, and how far it is ahead of that; None if there is only one arm."""
    ranked = sorted(case.arms, key=lambda name: case.arms[name].parts[part].samples.median)
    if len(ranked) < 2:
        return None
    best, second = ranked[:2]
    slower, faster = (case.arms[name].parts[part].samples for name in (second, best))
    return best, second, ratio_interval(slower, faster, seed)


def result_from_dict(values: dict[str, Any]) -> BenchResult:
    """A result from the parsed JSON of `to_json`."""
    if values.get("format") != FORMAT:
        raise ConfigError(
            f"benchmark result of format {values.get('format')!r}, this version reads {FORMAT}; "
            "measure again with: seq2engine bench BUNDLE"
        )
    machine = values["environment"]
    return BenchResult(
        **{
            **{name: value for name, value in values.items() if name != "curves"},
            "arms": {name: Arm(**arm) for name, arm in values["arms"].items()},
            "cases": tuple(case_from_dict(case) for case in values["cases"]),
            "quality": {name: tuple(map(quality_from_dict, found)) for name, found in values["quality"].items()},
            "environment": Environment(**{**machine, "features": tuple(machine["features"])}),
        }
    )


def case_from_dict(values: dict[str, Any]) -> CaseResult:
    arms = {
        name: ArmResult(
            equal=arm["equal"],
            equal_timed=arm["equal_timed"],
            parts={part: measure_from_dict(measure) for part, measure in arm["parts"].items()},
            cache=CacheCounts(**arm["cache"]),
            split={piece: Samples(tuple(found["nanoseconds"])) for piece, found in arm["split"].items()},
        )
        for name, arm in values["arms"].items()
    }
    return CaseResult(Case(**values["case"]), arms)


def measure_from_dict(values: dict[str, Any]) -> Measure:
    samples = Samples(tuple(values["samples"]["nanoseconds"]))
    return Measure(samples, values["tokens"], Ratio(**values["speedup"]))

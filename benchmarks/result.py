"""The result of a benchmark as data: raw samples, and everything that reports derive from them."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from seq2engine.common.json_files import shortened, typed_from_json
from seq2engine.errors import ConfigError
from seq2engine.runtime.quality.metrics import Quality, quality_from_dict

from .cases import SHOWN, Case
from .ceiling import Ceiling, least_ms
from .machine import Environment
from .natural.result import NaturalResult, natural_from_dict, natural_values
from .scenarios import Scenario
from .timed_decode import CacheCounts
from .timing import Ratio, Samples, ratio_interval

FORMAT = 4
PARTS = ("encoder", "step", "end_to_end")
AXES = ("batch", "beam", "source", "target")


@dataclass(frozen=True)
class Measure:
    """One part of one case on one arm. `tokens` are processed per call: source tokens (encoder) or output tokens."""

    samples: Samples
    tokens: int
    speedup: Ratio  # over the first arm

    @property
    def tokens_per_second(self) -> float:
        return 1000 * self.tokens / self.samples.median


@dataclass(frozen=True)
class ArmResult:
    """One arm in one case. Of its sources, `equal` have the first arm's tokens with the model's own stopping, and
    `equal_timed` in the decode of fixed length that is timed. `split` are the pieces of the end to end times.

    A peer is timed only end to end: it has no cache and no split. `setting` is its best one.
    """

    equal: int
    equal_timed: int
    parts: dict[str, Measure]
    cache: CacheCounts | None = None
    split: dict[str, Samples] = dataclasses.field(default_factory=dict)
    setting: str = ""

    def share(self, piece: str) -> float:
        """What part of all time end to end a piece took."""
        return sum(self.split[piece].nanoseconds) / sum(sum(samples.nanoseconds) for samples in self.split.values())


@dataclass(frozen=True)
class CaseResult:
    case: Case
    arms: dict[str, ArmResult]

    def same(self, arm: str) -> bool:
        """Whether this arm gave the first arm's tokens for every source, in both decodes."""
        return self.arms[arm].equal == self.arms[arm].equal_timed == self.case.batch


@dataclass(frozen=True)
class Curve:
    """Milliseconds per output token on an arm, end to end, by one size; the others are fixed."""

    axis: str  # batch, beam, source or target
    others: dict[str, int]
    arm: str
    costs: dict[int, float]

    @property
    def case(self) -> str:
        """The sizes that stay."""
        return ", ".join(f"{SHOWN.get(name, name)} {size}" for name, size in self.others.items())

    @property
    def growth(self) -> float:
        """Time per token at the largest size over that at the smallest."""
        return self.costs[max(self.costs)] / self.costs[min(self.costs)]


@dataclass(frozen=True)
class Arm:
    """A backend in a precision, or a peer: what it loaded, how long that took, and what else it costs.

    `peak_bytes` is the most memory a process has had that did nothing else. None is what was not measured.
    """

    backend: str
    precision: str
    bytes: int
    load_ms: float
    version: str = ""
    peer: bool = False
    peak_bytes: int | None = None
    export_seconds: float | None = None
    build_seconds: float | None = None
    draft: str | None = None  # precision of the draft in speculative decoding


@dataclass(frozen=True)
class BenchResult:
    bundle: str
    checkpoint_sha256: str
    model: dict[str, Any]  # the fields of its config
    cache_form: str
    arms: dict[str, Arm]
    failed: dict[str, str]  # failed peers and their errors
    cases: tuple[CaseResult, ...]
    quality: dict[str, tuple[Quality, ...]]  # of every arm on the references, if there were any
    ceiling: Ceiling | None
    scenarios: tuple[Scenario, ...]
    environment: Environment
    rounds: int
    warmup: int
    seed: int
    made_at: str
    format: int = FORMAT
    natural: tuple[NaturalResult, ...] = ()  # real sentences, each decoded to its own end
    interrupted: str = ""  # progress of an interrupted run

    @property
    def first(self) -> str:
        """The arm that all others are compared with."""
        return next(iter(self.arms))

    def curves(self) -> tuple[Curve, ...]:
        """The cost of a token against each size, wherever cases differ in nothing else."""
        found = []
        for axis in AXES:
            groups: dict[tuple[int, ...], dict[int, CaseResult]] = {}
            for case in self.cases:
                others = tuple(getattr(case.case, name) for name in AXES if name != axis)
                groups.setdefault(others, {})[getattr(case.case, axis)] = case
            for others, cases in groups.items():
                sizes = dict(zip([name for name in AXES if name != axis], others, strict=True))
                for arm in self.arms:
                    costs = {n: cost_of_token(cases[n].arms[arm]) for n in sorted(cases) if arm in cases[n].arms}
                    if len(costs) > 1:
                        found.append(Curve(axis, sizes, arm, costs))
        return tuple(found)

    def of_ceiling(self, case: CaseResult, arm: str, part: str) -> float | None:
        """The machine's lower bound over the measured time.

        None where no ceiling was measured, and for speculative decoding, which saves an unknown number of steps.
        """
        if self.ceiling is None or (self.arms[arm].draft is not None and part != "encoder"):
            return None
        least = least_ms(case.case, self.model, self.arms[arm].precision, part, self.ceiling)
        return least / case.arms[arm].parts[part].samples.median

    def to_json(self) -> str:
        """All fields, and beside the raw samples what they come to, for readers that are not this package."""
        values = dataclasses.asdict(self)
        values["curves"] = [{**dataclasses.asdict(curve), "growth": curve.growth} for curve in self.curves()]
        values["natural"] = list(map(natural_values, self.natural))
        for case, case_values in zip(self.cases, values["cases"], strict=True):
            for name, arm in case.arms.items():
                for part, measure in arm.parts.items():
                    of_ceiling = self.of_ceiling(case, name, part)
                    case_values["arms"][name]["parts"][part]["summary"] = {**summary(measure), "of_ceiling": of_ceiling}
                for piece in arm.split:
                    case_values["arms"][name]["split"][piece]["share"] = arm.share(piece)
                if arm.cache is not None:
                    case_values["arms"][name]["slots_of_greedy"] = slots_of_greedy(case.case, arm.cache)
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


def cost_of_token(arm: ArmResult) -> float:
    whole = arm.parts["end_to_end"]
    return whole.samples.median / whole.tokens


def slots_of_greedy(case: Case, cache: CacheCounts) -> float:
    """The most cache slots of a case over those of greedy search, which needs one slot per token."""
    return cache.most_slots / case.target


def winner(case: CaseResult, part: str) -> tuple[str, str, Ratio] | None:
    """The fastest arm, the next one, and how far it is ahead of that; None if there is only one arm."""
    having = [name for name, arm in case.arms.items() if part in arm.parts]
    ranked = sorted(having, key=lambda name: case.arms[name].parts[part].samples.median)
    if len(ranked) < 2:
        return None
    best, second = ranked[:2]
    slower, faster = (case.arms[name].parts[part].samples for name in (second, best))
    return best, second, ratio_interval(slower, faster)


def result_from_dict(values: dict[str, Any]) -> BenchResult:
    """A result from the parsed JSON of `to_json`."""
    if values.get("format") != FORMAT:
        raise ConfigError(
            f"benchmark result of format {values.get('format')!r}, this version reads {FORMAT}; "
            "measure again with: seq2engine bench BUNDLE"
        )
    if not values["arms"]:
        raise ValueError("it has no arms")
    machine, first = values["environment"], next(iter(values["arms"]))
    made = BenchResult(
        **{
            **{name: value for name, value in values.items() if name != "curves"},
            "arms": {name: Arm(**arm) for name, arm in values["arms"].items()},
            "cases": tuple(case_from_dict(case, first) for case in values["cases"]),
            "quality": {name: tuple(map(quality_from_dict, found)) for name, found in values["quality"].items()},
            "ceiling": ceiling_from_dict(values["ceiling"]) if values["ceiling"] else None,
            "natural": tuple(natural_from_dict(each, first) for each in values.get("natural", ())),
            "scenarios": tuple(map(scenario_from_dict, values["scenarios"])),
            "environment": Environment(**{**machine, "features": tuple(machine["features"])}),
        }
    )
    check_samples(made)
    return typed_from_json(BenchResult, dataclasses.asdict(made))


def check_samples(result: BenchResult) -> None:
    """Raises a ValueError unless every time is one, and all arms of a case have as many."""
    for case in result.cases:
        if unknown := case.arms.keys() - result.arms.keys():
            raise ValueError(f"a case has the arm {shortened(min(unknown))}, which is not among its arms")
        taken = [measure.samples.nanoseconds for arm in case.arms.values() for measure in arm.parts.values()]
        taken += [samples.nanoseconds for arm in case.arms.values() for samples in arm.split.values()]
        if any(not times or min(times) < 0 for times in taken):
            raise ValueError("a measurement without times, or with a negative one")
        parts = [measure.samples.nanoseconds for arm in case.arms.values() for measure in arm.parts.values()]
        if any(min(times) == 0 for times in parts) or len({len(times) for times in parts}) > 1:
            raise ValueError("arms of a case with other numbers of rounds, or a time of 0")


def ceiling_from_dict(values: dict[str, Any]) -> Ceiling:
    return Ceiling(**{**values, "cached": tuple((size, rate) for size, rate in values.get("cached", ()))})


def scenario_from_dict(values: dict[str, Any]) -> Scenario:
    samples = {name: Samples(tuple(taken["nanoseconds"])) for name, taken in values["samples"].items()}
    return Scenario(values["scenario"], values["arm"], values["figures"], samples)


def case_from_dict(values: dict[str, Any], first: str) -> CaseResult:
    """Speedups are computed again from the samples, so that results of older versions are judged by the same rule."""
    base = {part: samples_of(measure) for part, measure in values["arms"][first]["parts"].items()}
    arms = {
        name: ArmResult(
            equal=arm["equal"],
            equal_timed=arm["equal_timed"],
            parts={
                part: Measure(samples_of(measure), measure["tokens"], ratio_interval(base[part], samples_of(measure)))
                for part, measure in arm["parts"].items()
            },
            cache=CacheCounts(**arm["cache"]) if arm["cache"] else None,
            split={piece: Samples(tuple(found["nanoseconds"])) for piece, found in arm["split"].items()},
            setting=arm["setting"],
        )
        for name, arm in values["arms"].items()
    }
    return CaseResult(Case(**values["case"]), arms)


def samples_of(measure: dict[str, Any]) -> Samples:
    return Samples(tuple(measure["samples"]["nanoseconds"]))

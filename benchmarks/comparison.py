"""Compares two benchmark results: which differences are significant, by confidence intervals."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import numpy as np

from seq2engine.common.tables import text_table
from seq2engine.errors import UsageError

from .cases import Case
from .intervals import COVERAGE, TAIL, fewest_rounds, separate_interval
from .report.tables import LABELS, interval_text, number
from .result import PARTS, BenchResult
from .timing import Ratio, Samples, ratio_with

SLOWER = 1.05  # ratio of times beyond which a significant slowdown fails a comparison
Timed = tuple[Samples, Samples | None]  # an arm, and the arm that it is relative to
COMPARED_HEAD = ("case", "part", "arm", "before, ms", "after, ms", "times as long", "verdict")


@dataclass(frozen=True)
class Difference:
    """One part of one case on one arm that both results have. `ratio` is after over before: above 1 is slower."""

    case: str
    part: str
    arm: str
    before: Samples
    after: Samples
    ratio: Ratio

    def verdict(self, slower: float) -> str:
        """slower, if the whole interval is beyond the limit; faster; or no significant difference."""
        if self.ratio.above(slower):
            return "SLOWER"
        if self.ratio.below(1):
            return "faster"
        if self.ratio.above(1):
            return f"slower, {'within' if self.ratio.below(slower) else 'perhaps beyond'} the limit"
        return "no significant difference"


@dataclass(frozen=True)
class Comparison:
    """True if nothing is significantly slower. `warnings` are other reasons why times may differ."""

    differences: tuple[Difference, ...]
    warnings: tuple[str, ...]
    only: tuple[str, ...]  # present in one result only
    slower: float

    def __bool__(self) -> bool:
        return not self.regressions

    @property
    def regressions(self) -> tuple[Difference, ...]:
        return tuple(found for found in self.differences if found.verdict(self.slower) == "SLOWER")

    def to_json(self) -> str:
        rows = [
            {
                "case": found.case,
                "part": found.part,
                "arm": found.arm,
                "before_ms": found.before.median,
                "after_ms": found.after.median,
                "ratio": found.ratio.value,
                "low": found.ratio.low,
                "high": found.ratio.high,
                "verdict": found.verdict(self.slower),
            }
            for found in self.differences
        ]
        values = {"ok": bool(self), "slower": self.slower, "warnings": self.warnings, "only": self.only}
        return json.dumps({**values, "differences": rows}, indent=1) + "\n"


def compare_results(
    before: BenchResult, after: BenchResult, slower: float = SLOWER, relative: bool = False, anyway: bool = False
) -> Comparison:
    """Every part of every case and arm that both have; cases are the same if their sizes are.

    Results of other models or machines are refused unless they are to be compared `anyway`. With `relative`, an arm's
    time is relative to the first arm of the same run, so that a slower machine, which affects both, does not count.
    """
    if not 1 <= slower < math.inf:  # NaN is refused, too: nothing would ever be slower than that
        raise UsageError(f"--slower {slower:g}, expected at least 1")
    strange, warnings = other_models_or_machines(before, after), other_conditions(before, after)
    if strange and not anyway:
        raise UsageError(f"cannot compare: {'; '.join(strange)}; to compare anyway: --anyway")
    old, new = timed(before), timed(after)
    if not old.keys() & new.keys():
        raise UsageError("the two results have no case and arm in common; measure both with the same cases and arms")
    if relative and before.first != after.first:
        raise UsageError(f"--relative needs one first arm, found {before.first} and {after.first}; leave it out")
    differences = []
    for (case, arm, part), samples in old.items():
        if (case, arm, part) in new and not (relative and arm == before.first):
            first = (case, before.first, part) if relative else None
            now, then = new[case, arm, part], samples
            ratio = (
                ratio_of_runs((now, new[first]), (then, old[first]))
                if first
                else ratio_of_runs((now, None), (then, None))
            )
            differences.append(Difference(named(case), part, arm, samples, new[case, arm, part], ratio))
    only = tuple(
        f"only {which}: {named(case)}, {arm}, {LABELS[part]}"
        for which, these, those in (("before", old, new), ("after", new, old))
        for case, arm, part in these
        if (case, arm, part) not in those
    )
    return Comparison(tuple(differences), (*strange, *warnings), only, slower)


def timed(result: BenchResult) -> dict[tuple[tuple[int, ...], str, str], Samples]:
    """All samples by the sizes of the case, the arm and the part."""
    return {
        (sizes(case.case), arm, part): found.parts[part].samples
        for case in result.cases
        for part in PARTS
        for arm, found in case.arms.items()
        if part in found.parts
    }


def sizes(case: Case) -> tuple[int, ...]:
    return case.batch, case.beam, case.source, case.target


def named(case: tuple[int, ...]) -> str:
    return "x".join(map(str, case))


def ratio_of_runs(after: Timed, before: Timed) -> Ratio:
    """The ratio of medians, after over before, with its exact interval; an arm and the one beside it share rounds."""
    now, then = (times_of(timed) for timed in (after, before))
    interval = separate_interval(now, then)
    if interval is None:
        raise UsageError(
            f"{len(then)} rounds before and {len(now)} after are too few for any verdict at {COVERAGE:.0%}; "
            f"measure both again with at least --rounds {fewest_rounds()}, better 10"
        )
    return ratio_with(float(np.median(now) / np.median(then)), interval, min(len(now), len(then)))


def times_of(timed: Timed) -> np.ndarray:
    """[rounds], nanoseconds; or, of an arm beside another, how many times as long it took in each round."""
    samples, beside = (None if one is None else np.array(one.nanoseconds, dtype=np.float64) for one in timed)
    assert samples is not None
    return samples if beside is None else samples / beside


def other_models_or_machines(before: BenchResult, after: BenchResult) -> list[str]:
    here, there = before.environment, after.environment
    changed = sorted(name for name in before.model if before.model[name] != after.model.get(name))
    found = [f"the models differ in {', '.join(changed)}"] if changed else []
    return found + [
        f"{what} differs, {one} before and {other} after"
        for what, one, other in (
            ("the processor", here.cpu, there.cpu),
            ("the number of cores", here.cores, there.cores),
            ("the number of threads", here.threads, there.threads),
        )
        if one != other
    ]


def other_conditions(before: BenchResult, after: BenchResult) -> list[str]:
    """Other conditions that may change times."""
    here, there = before.environment, after.environment
    found = []
    if before.model == after.model and before.checkpoint_sha256 != after.checkpoint_sha256:
        found.append("the weights differ, though not their sizes")
    found += [
        f"the run {when} was {one.interrupted}"
        for when, one in (("before", before), ("after", after))
        if one.interrupted
    ]
    if here.governor != there.governor:
        found.append(f"the governor differs, {here.governor} before and {there.governor} after")
    return found + [
        f"the machine was busy {when} (load {machine.load_before} on {machine.cores} cores)"
        for when, machine in (("before", here), ("after", there))
        if machine.busy
    ]


def comparison_table(comparison: Comparison) -> str:
    rows = [
        (
            found.case,
            LABELS[found.part],
            found.arm,
            number(found.before.median),
            number(found.after.median),
            interval_text(found.ratio),
            found.verdict(comparison.slower),
        )
        for found in comparison.differences
    ]
    lost = len(comparison.regressions)
    summary = f"{lost} of {len(rows)} measurements are significantly slower than {comparison.slower:g}x"
    if lost:
        summary += f" (expected by chance: at most {TAIL * len(rows):.2g} on average)"
    lines = [text_table(COMPARED_HEAD, rows), "", *comparison.only]
    return "\n".join([*lines, *(f"warning: {text}" for text in comparison.warnings), summary])

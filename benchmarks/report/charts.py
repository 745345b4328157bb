"""The charts of a benchmark, computed for charts.html: heat map, bars, split decodes and curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..result import PARTS, BenchResult, CaseResult, Curve
from ..timed_decode import PIECES
from ..timing import ratio_interval
from .tables import LABELS, number, share_text

SHADES = {  # opacity and colour of each part of a bar
    "encoder": ("--soft", 0.55),
    "step": ("--accent", 0.85),
    "search": ("--bad", 0.8),
    "compaction": ("--warn", 0.8),
    "copies": ("--good", 0.8),
}
LINES = ("--accent", "--bad", "--good", "--warn", "--soft")
WIDTH, HEIGHT, LEFT, BOTTOM = 360, 180, 40, 24  # of the line chart; a phone shows it in its own size
MARKS = 4  # above zero on the axis of a line chart, at most
HOT = 4.0  # multiple of the fastest arm that gets the strongest colour


@dataclass(frozen=True)
class HeatCell:
    """The time of an arm in a case; without `milliseconds` it did not run."""

    case: str
    milliseconds: str = ""
    times: str = ""
    colour: str = ""  # none where the arm may be as fast as the fastest, by its interval
    fastest: bool = False
    unsure: bool = False
    differs: bool = False


@dataclass(frozen=True)
class HeatMap:
    cases: list[str]
    rows: list[tuple[str, list[HeatCell]]]  # arm, a cell for every case


@dataclass(frozen=True)
class Bar:
    """An arm: its median, 10th and 90th percentile, as CSS lengths."""

    name: str
    text: str
    low: str
    middle: str
    high: str
    first: bool


@dataclass(frozen=True)
class BarChart:
    title: str
    described: str
    bars: list[Bar]


@dataclass(frozen=True)
class Piece:
    start: str
    width: str
    colour: str
    strength: float


@dataclass(frozen=True)
class SplitBar:
    name: str
    pieces: list[Piece]


@dataclass(frozen=True)
class SplitChart:
    described: str
    bars: list[SplitBar]
    keys: list[tuple[str, str, float]]  # piece, colour, strength


@dataclass(frozen=True)
class Line:
    name: str
    colour: str
    dashes: str  # CSS
    points: list[tuple[float, float]]


@dataclass(frozen=True)
class CurveChart:
    axis: str
    case: str
    described: str
    rows: list[tuple[float, str]]
    columns: list[tuple[float, str]]
    lines: list[Line]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    ground: int = HEIGHT - BOTTOM


def heat_map(result: BenchResult) -> HeatMap:
    """The end-to-end time of every arm and case, and its multiple of the fastest arm, which determines the colour.

    The fastest arm of a case, and it alone, is bold. One that may be as fast, by its interval, has a
    sign and no colour. An arm whose outputs differ has a sign as well.
    """
    best = {case.case.name: fastest(case) for case in result.cases}
    rows = [(arm, [heat_cell(case, arm, best[case.case.name]) for case in result.cases]) for arm in result.arms]
    return HeatMap([case.case.name for case in result.cases], rows)


def heat_cell(case: CaseResult, arm: str, best: str) -> HeatCell:
    if arm not in case.arms:
        return HeatCell(case.case.name)
    mine, theirs = (case.arms[name].parts["end_to_end"].samples for name in (arm, best))
    times = mine.median / theirs.median
    unsure = arm != best and ratio_interval(mine, theirs).verdict == "unsure"
    return HeatCell(
        case.case.name,
        number(mine.median),
        f"{times:.2f}x",
        "" if unsure else heat(times),
        arm == best,
        unsure,
        not case.same(arm),
    )


def heat(times: float) -> str:
    """The colour of an arm by its time over the fastest's."""
    warmth = 100 * min(1.0, math.log(times) / math.log(HOT))
    return f"color-mix(in srgb, color-mix(in srgb, var(--bad) {warmth:.0f}%, var(--good)) 28%, var(--paper))"


def fastest(case: CaseResult) -> str:
    return min(case.arms, key=lambda name: case.arms[name].parts["end_to_end"].samples.median)


def bar_charts(case: CaseResult, first: str) -> list[BarChart]:
    """One for every part of a decode, with one bar per arm."""
    return [bar_chart(case, part, first) for part in PARTS]


def bar_chart(case: CaseResult, part: str, first: str) -> BarChart:
    samples = {name: arm.parts[part].samples for name, arm in case.arms.items() if part in arm.parts}
    full = max(max(times.p90, times.median) for times in samples.values()) * 1.02
    bars = []
    for name, times in samples.items():
        low, middle, high = (f"{100 * value / full:.2f}%" for value in (times.p10, times.median, times.p90))
        bars.append(Bar(name, number(times.median), low, middle, high, name == first))
    described = ", ".join(f"{name} {number(times.median)} ms" for name, times in samples.items())
    return BarChart(f"{LABELS[part]}, ms", f"{LABELS[part]}: {described}", bars)


def split_chart(case: CaseResult) -> SplitChart:
    """One bar per arm in pieces that add up to the time end to end, all on the scale of the slowest."""
    totals = {
        name: sum(sum(times.nanoseconds) for times in arm.split.values())
        for name, arm in case.arms.items()
        if arm.split
    }
    full = max(totals.values())
    bars, described = [], []
    for name, total in totals.items():
        shares = {piece: case.arms[name].share(piece) for piece in PIECES}
        described.append(f"{name} " + ", ".join(f"{piece} {share_text(share)}" for piece, share in shares.items()))
        pieces, start = [], 0.0
        for piece, share in shares.items():
            width = 100 * share * total / full
            pieces.append(Piece(f"{start:.2f}%", f"{width:.2f}%", *SHADES[piece]))
            start += width
        bars.append(SplitBar(f"{name}, search {share_text(shares['search'])}", pieces))
    keys = [(piece, colour, strength) for piece, (colour, strength) in SHADES.items()]
    return SplitChart("; ".join(described), bars, keys)


def curve_chart(axis: str, case: str, curves: Sequence[Curve]) -> CurveChart:
    """Milliseconds per output token against a size, both from zero up, one line per arm."""
    longest = max(max(curve.costs) for curve in curves)
    marks = marks_up_to(max(max(curve.costs.values()) for curve in curves))
    across, up = (WIDTH - LEFT - 8) / longest, (HEIGHT - BOTTOM - 8) / marks[-1]
    ground = HEIGHT - BOTTOM
    lines = [
        Line(
            curve.arm,
            LINES[place % len(LINES)],
            f"stroke-dasharray:{3 * (place // len(LINES))} 3;" if place >= len(LINES) else "",
            [(LEFT + length * across, ground - cost * up) for length, cost in curve.costs.items()],
        )
        for place, curve in enumerate(curves)
    ]
    sizes = (0, *sorted({length for curve in curves for length in curve.costs}))
    return CurveChart(
        axis,
        case,
        "; ".join(f"{curve.arm}: {costs_text(curve.costs)}" for curve in curves),
        [(ground - height * up, f"{height:g}") for height in marks],
        [(LEFT + length * across, str(length)) for length in sizes],
        lines,
    )


def marks_up_to(highest: float) -> list[float]:
    """Round numbers from 0 to the first that is not below the highest value: 0, 0.2, 0.4, 0.6."""
    power = 10 ** math.floor(math.log10(highest))
    step = next(each * power for each in (0.2, 0.5, 1, 2, 5) if highest <= MARKS * each * power)
    return [float(f"{step * n:.6g}") for n in range(math.ceil(highest / step) + 1)]


def costs_text(costs: Mapping[int, float]) -> str:
    return ", ".join(f"{cost:.3g} ms at {length}" for length, cost in costs.items())

"""The plots of a parity report, computed for plots.html: errors by step, their ratios by layer and step, margins of
divergent decodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from seq2engine.common.heat_map import LEVELS as COLOURS

from ...numerics.budgets import DIVERGENCE_FACTOR, Divergence, times
from ..levels.error_growth import LOGITS, ErrorGrowth

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 360, 190, 40, 30, 8  # a width that a phone can show unscaled
RIGHT, GROUND = WIDTH - 8, HEIGHT - BOTTOM
HEAD = 12  # above the bars of the histogram, for the names of the bounds
CELL = 12  # pixels of the heat map, as in parity.css
LEAST, MOST = -2, 4  # powers of two of a ratio at the ends of the colours: 1/4 to 16
MARGINS = range(-9, 7)  # powers of two of margin / budget
VERDICTS = {"tie": "--soft", "drift": "--warn", "bug": "--bad"}  # the page's colour of each

Place = tuple[float, str]  # where on an axis, and the text there


@dataclass(frozen=True)
class Line:
    name: str
    colour: str
    dashes: str  # of its stroke; empty: none
    points: list[tuple[float, float]]

    @property
    def key(self) -> tuple[str, str]:
        """Its name and its CSS background."""
        striped = f"repeating-linear-gradient(90deg,var({self.colour}) 0 4px,transparent 4px 7px)"
        return self.name, striped if self.dashes else f"var({self.colour})"


@dataclass(frozen=True)
class Plot:
    """What all plots have: the frame, and texts under it."""

    columns: list[Place]
    keys: list[tuple[str, str]]  # name, CSS background
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = RIGHT
    top: int = TOP
    ground: int = GROUND
    middle: float = (LEFT + WIDTH) / 2


@dataclass(frozen=True)
class LinePlot(Plot):
    rows: tuple[Place, ...] = ()
    lines: tuple[Line, ...] = ()


@dataclass(frozen=True)
class Bar:
    x: float
    y: float
    width: float
    height: float
    verdict: str
    count: int

    @property
    def colour(self) -> str:
        return VERDICTS[self.verdict]


@dataclass(frozen=True)
class Histogram(Plot):
    most: int = 0  # decodes in the highest column
    bars: tuple[Bar, ...] = ()
    bounds: tuple[Place, ...] = ()


@dataclass(frozen=True)
class RatioMap:
    steps: int
    rows: list[tuple[str, list[tuple[int, str]]]]  # name; for every step the level of its colour and its ratio
    cell: int = CELL


def error_growth_plot(growth: ErrorGrowth, candidate: str) -> LinePlot | None:
    """Relative errors by step of the logits and of the last layer's KV cache, of both sides; None without errors."""
    last = [row for row in growth.rows if row != LOGITS][-2:]
    found = [
        (f"logits, {candidate}", errors_of(growth, growth.candidate, [LOGITS]), "--accent", ""),
        ("logits, PyTorch", errors_of(growth, growth.reference, [LOGITS]), "--accent", "4 3"),
        (f"cache of the last layer, {candidate}", errors_of(growth, growth.candidate, last), "--good", ""),
        ("cache of the last layer, PyTorch", errors_of(growth, growth.reference, last), "--good", "4 3"),
    ]
    values = np.concatenate([errors for _, errors, _, _ in found])
    shown = values[np.isfinite(values) & (values > 0)]
    if not shown.size:
        return None
    low, high = math.floor(math.log10(shown.min())), math.ceil(math.log10(shown.max()) + 1e-9)
    high = max(high, low + 1)

    def x(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / max(growth.steps - 1, 1)

    def y(power: float) -> float:
        return TOP + (GROUND - TOP) * (high - power) / (high - low)

    def points(errors: np.ndarray) -> list[tuple[float, float]]:
        drawn = ((step, value) for step, value in enumerate(errors) if math.isfinite(value) and value > 0)
        return [(x(step), y(math.log10(value))) for step, value in drawn]

    lines = tuple(Line(name, colour, dashes, points(errors)) for name, errors, colour, dashes in found)
    return LinePlot(
        [(x(step), str(step)) for step in sorted({round(part * (growth.steps - 1) / 4) for part in range(5)})],
        [line.key for line in lines],
        rows=tuple((y(power), f"1e{power}") for power in range(low, high + 1, max(1, (high - low) // 5))),
        lines=lines,
    )


def errors_of(growth: ErrorGrowth, side: Sequence[Sequence[float]], rows: Sequence[str]) -> np.ndarray:
    """Root mean square over these rows, by step."""
    chosen = [side[growth.rows.index(row)] for row in rows]
    return np.sqrt(np.mean(np.square(np.array(chosen)), axis=0))


def ratio_map(growth: ErrorGrowth) -> RatioMap:
    """The candidate's error over PyTorch's."""
    with np.errstate(divide="ignore"):
        places = (np.log2(np.maximum(growth.ratios, 1e-30)) - LEAST) / (MOST - LEAST)
    levels = (np.nan_to_num(places, nan=1.0, posinf=1.0).clip(0, 1) * (COLOURS - 1)).round().astype(int)
    return RatioMap(
        growth.steps,
        [
            (row_name(name), [(int(level), times(value)) for level, value in zip(row, values, strict=True)])
            for name, row, values in zip(growth.rows, levels, growth.ratios, strict=True)
        ],
    )


def row_name(row: str) -> str:
    """self_k.3 -> layer 3 keys."""
    part, _, layer = row.partition(".")
    return {"self_k": f"layer {layer} keys", "self_v": f"layer {layer} values"}.get(part, row)


def margin_histogram(divergences: Sequence[Divergence]) -> Histogram:
    """Margins of divergent decodes, in budgets, by verdict."""
    counts = {verdict: [0] * len(MARGINS) for verdict in VERDICTS}
    for divergence in divergences:
        size = divergence.budgets(divergence.margin)
        power = math.floor(math.log2(size)) if 0 < size < math.inf else MARGINS[0] if size == 0 else MARGINS[-1]
        counts[divergence.verdict][min(max(power, MARGINS[0]), MARGINS[-1]) - MARGINS[0]] += 1
    most = max(sum(column) for column in zip(*counts.values(), strict=True))
    wide = (RIGHT - LEFT) / len(MARGINS)

    def x(power: int) -> float:
        return LEFT + (power - MARGINS[0]) * wide

    bars = []
    for i in range(len(MARGINS)):
        base = float(GROUND)
        for verdict in VERDICTS:
            if count := counts[verdict][i]:
                height = (GROUND - TOP - HEAD) * count / most
                base -= height
                bars.append(Bar(LEFT + i * wide + 1, base, wide - 2, height, verdict, count))
    return Histogram(
        [(x(power), f"{2.0**power:.2g}") for power in MARGINS[::3]],
        [(f"{verdict} {sum(found)}", f"var({VERDICTS[verdict]})") for verdict, found in counts.items()],
        most=most,
        bars=tuple(bars),
        bounds=((x(-int(math.log2(DIVERGENCE_FACTOR))), "tie"), (x(0), "budget")),
    )

"""A benchmark in pictures: who wins where as a heat map, and bars, split decodes and curves as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from ..result import PARTS, BenchResult, CaseResult, Curve
from ..timed_decode import PIECES
from ..timing import ratio_interval
from .tables import LABELS, number, share_text

SHADES = {  # how strongly each piece of a bar is painted, and in which of the page's colours
    "encoder": ("--soft", 0.55),
    "step": ("--accent", 0.85),
    "search": ("--bad", 0.8),
    "compaction": ("--warn", 0.8),
    "copies": ("--good", 0.8),
}
LINES = ("--accent", "--bad", "--good", "--warn", "--soft")
WIDTH, HEIGHT, LEFT, BOTTOM = 360, 180, 40, 24  # of the line chart; a phone shows it in its own size
MARKS = 4  # above zero on the axis of a line chart, at most
HOT = 4.0  # times the fastest, and more: painted as hot as can be
TIGHT = "padding:.35rem .4rem"  # so that a phone shows some cases beside the arms
STICKY = (
    "position:sticky;left:0;background:var(--paper);white-space:normal"  # arms stay in sight when cases are scrolled
)


def heat_html(result: BenchResult) -> str:
    """Arms down, cases across: the time end to end and how many times the fastest arm's that is, painted by it.

    The fastest arm of a case, and it alone, is bold. One that may be as fast, by its interval, has a
    sign and no paint. An arm whose outputs differ has a sign as well.
    """
    best = {case.case.name: fastest(case) for case in result.cases}
    head = "".join(f'<th class="number" style="{TIGHT}">{escape(case.case.name)}</th>' for case in result.cases)
    lines = []
    for arm in result.arms:
        cells = "".join(heat_cell(case, arm, best[case.case.name]) for case in result.cases)
        lines.append(f'<tr><th style="{STICKY}">{escape(arm)}</th>{cells}</tr>')
    corner = f'<th style="{STICKY}">end to end, ms</th>'
    table = f"<thead><tr>{corner}{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="scroll"><table class="grid">{table}</table></div>'


def heat_cell(case: CaseResult, arm: str, best: str) -> str:
    if arm not in case.arms:
        return f'<td class="number" data-name="{escape(case.case.name)}">did not run</td>'
    mine, theirs = (case.arms[name].parts["end_to_end"].samples for name in (arm, best))
    times = mine.median / theirs.median
    unsure = arm != best and ratio_interval(mine, theirs).verdict == "unsure"
    style = [TIGHT] if unsure else [TIGHT, f"background:{heat(times)}"]
    if arm == best:
        style.append("font-weight:700")
    sign = "" if case.same(arm) else '<span title="outputs differ"> \u2260</span>'
    about = '<span title="may be as fast as the fastest">\u2248 </span>' if unsure else ""
    text = f"{number(mine.median)}{sign}<br><small>{about}{times:.2f}x</small>"
    name = escape(case.case.name)
    return f'<td class="number" data-name="{name}" style="{";".join(style)}">{text}</td>'


def heat(times: float) -> str:
    """The colour of an arm by its time over the fastest's."""
    warmth = 100 * min(1.0, math.log(times) / math.log(HOT))
    return f"color-mix(in srgb, color-mix(in srgb, var(--bad) {warmth:.0f}%, var(--good)) 28%, var(--paper))"


def fastest(case: CaseResult) -> str:
    return min(case.arms, key=lambda name: case.arms[name].parts["end_to_end"].samples.median)


def bars_html(case: CaseResult, first: str) -> str:
    """The three parts side by side, or below each other where there is no room; each has a scale of its own."""
    charts = "".join(bars_svg(case, part, first) for part in PARTS)
    style = "display:grid;grid-template-columns:repeat(auto-fit,minmax(15rem,1fr));gap:.4rem 2rem;margin:.8rem 0"
    return f'<div style="{style}">{charts}</div>'


def bars_svg(case: CaseResult, part: str, first: str) -> str:
    """One bar per arm. Lengths are percentages, so that text keeps its size when the page is narrow."""
    samples = {name: arm.parts[part].samples for name, arm in case.arms.items() if part in arm.parts}
    full = max(max(times.p90, times.median) for times in samples.values()) * 1.02
    shapes = [f'<text x="0" y="14" style="font-weight:600">{LABELS[part]}, ms</text>']
    y = 24
    for name, times in samples.items():
        low, middle, high = (f"{100 * value / full:.2f}%" for value in (times.p10, times.median, times.p90))
        colour = "var(--soft)" if name == first else "var(--accent)"
        whisker = 'style="stroke:var(--ink);stroke-width:1.5"'
        shapes += [
            f'<text x="0" y="{y + 12}">{escape(name)}</text>',
            f'<text x="100%" y="{y + 12}" text-anchor="end">{number(times.median)}</text>',
            f'<rect x="0" y="{y + 18}" width="{middle}" height="12" rx="2" style="fill:{colour};opacity:.8"/>',
            f'<line x1="{low}" x2="{high}" y1="{y + 24}" y2="{y + 24}" {whisker}/>',
            *(f'<line x1="{end}" x2="{end}" y1="{y + 20}" y2="{y + 28}" {whisker}/>' for end in (low, high)),
        ]
        y += 40
    described = ", ".join(f"{name} {number(times.median)} ms" for name, times in samples.items())
    title = f"{LABELS[part]}: {described}"
    return f'<svg role="img" aria-label="{escape(title)}" style="width:100%;height:{y}px">{"".join(shapes)}</svg>'


def split_html(case: CaseResult) -> str:
    """One bar per arm, all as long as the slowest lets them be, in pieces that add up to the time end to end."""
    totals = {
        name: sum(sum(times.nanoseconds) for times in arm.split.values())
        for name, arm in case.arms.items()
        if arm.split
    }
    full = max(totals.values())
    shapes, y, described = [], 4, []
    for name in totals:
        arm = case.arms[name]
        shares = {piece: arm.share(piece) for piece in PIECES}
        described.append(f"{name} " + ", ".join(f"{piece} {share_text(share)}" for piece, share in shares.items()))
        shapes.append(f'<text x="0" y="{y + 12}">{escape(name)}, search {share_text(shares["search"])}</text>')
        start = 0.0
        for piece, share in shares.items():
            width = 100 * share * totals[name] / full
            shapes.append(f'<rect x="{start:.2f}%" y="{y + 18}" width="{width:.2f}%" height="14" {painted(piece)}/>')
            start += width
        y += 42
    label = escape("; ".join(described))
    chart = f'<svg role="img" aria-label="{label}" style="width:100%;height:{y}px">{"".join(shapes)}</svg>'
    return chart + pieces_html()


def pieces_html() -> str:
    """Which colour is which piece. Text of the page and not of the picture: it goes on in a second line on a phone."""
    square = "display:inline-block;width:.65rem;height:.65rem"
    names = "".join(
        f'<span><i style="{square};background:var({colour});opacity:{strength}"></i> {piece}</span>'
        for piece, (colour, strength) in SHADES.items()
    )
    return f'<p class="note" style="display:flex;flex-wrap:wrap;gap:.1rem 1rem;margin:.2rem 0 .8rem">{names}</p>'


def painted(piece: str) -> str:
    colour, strength = SHADES[piece]
    return f'style="fill:var({colour});opacity:{strength}"'


def curves_svg(curves: Sequence[Curve]) -> str:
    """Milliseconds per output token against a size, both from zero up, one line per arm; names stand below."""
    longest = max(max(curve.costs) for curve in curves)
    marks = marks_up_to(max(max(curve.costs.values()) for curve in curves))
    across, up = (WIDTH - LEFT - 8) / longest, (HEIGHT - BOTTOM - 8) / marks[-1]
    ground = HEIGHT - BOTTOM
    axis = 'style="stroke:var(--line);stroke-width:1"'
    shapes = [f'<line x1="{LEFT}" x2="{LEFT}" y1="8" y2="{ground}" {axis}/>']
    for height in marks:
        y = ground - height * up
        shapes += [
            f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" {axis}/>',
            f'<text x="{LEFT - 4}" y="{y + 4:.1f}" text-anchor="end">{height:g}</text>',
        ]
    for length in (0, *sorted({length for curve in curves for length in curve.costs})):
        shapes.append(f'<text x="{LEFT + length * across:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{length}</text>')
    for place, curve in enumerate(curves):
        colour = f"var({LINES[place % len(LINES)]})"
        dashes = f"stroke-dasharray:{3 * (place // len(LINES))} 3;" if place >= len(LINES) else ""
        points = [(LEFT + length * across, ground - cost * up) for length, cost in curve.costs.items()]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        shapes.append(f'<polyline points="{path}" style="fill:none;stroke:{colour};{dashes}stroke-width:2"/>')
        shapes += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" style="fill:{colour}"/>' for x, y in points]
        y = HEIGHT + 12 + 15 * place
        stroke = f'style="stroke:{colour};{dashes}stroke-width:2"'
        shapes += [
            f'<line x1="{LEFT}" x2="{LEFT + 20}" y1="{y - 4}" y2="{y - 4}" {stroke}/>',
            f'<text x="{LEFT + 26}" y="{y}">{escape(curve.arm)}</text>',
        ]
    label = escape("; ".join(f"{curve.arm}: {costs_text(curve.costs)}" for curve in curves))
    size = f'viewBox="0 0 {WIDTH} {HEIGHT + 8 + 15 * len(curves)}" style="width:100%;max-width:{WIDTH + 120}px"'
    return f'<svg role="img" aria-label="{label}" {size}>{"".join(shapes)}</svg>'


def marks_up_to(highest: float) -> list[float]:
    """Round numbers from 0 to the first that is not below the highest value: 0, 0.2, 0.4, 0.6."""
    power = 10 ** math.floor(math.log10(highest))
    step = next(each * power for each in (0.2, 0.5, 1, 2, 5) if highest <= MARKS * each * power)
    return [float(f"{step * n:.6g}") for n in range(math.ceil(highest / step) + 1)]


def costs_text(costs: Mapping[int, float]) -> str:
    return ", ".join(f"{cost:.3g} ms at {length}" for length, cost in costs.items())

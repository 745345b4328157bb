"""Two pictures as inline SVG: decodes as split bars, and the cost of a token as a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from .result import CaseResult, Curve
from .split import PIECES

SHADES = {  # how strongly each piece of a bar is painted, and in which of the page's colours
    "encoder": ("--soft", 0.55),
    "step": ("--accent", 0.85),
    "search": ("--bad", 0.8),
    "compaction": ("--warn", 0.8),
    "copies": ("--good", 0.8),
}
LINES = ("--accent", "--bad", "--good", "--warn", "--soft")
WIDTH, HEIGHT, LEFT, BOTTOM = 360, 180, 34, 24  # of the line chart; a phone shows it in its own size


def split_svg(case: CaseResult) -> str:
    """One bar per arm, all as long as the slowest lets them be, in pieces that add up to the time end to end."""
    totals = {name: sum(sum(times.nanoseconds) for times in arm.split.values()) for name, arm in case.arms.items()}
    full = max(totals.values())
    shapes, y, said = [], 4, []
    for name, arm in case.arms.items():
        shares = {piece: arm.share(piece) for piece in PIECES}
        said.append(f"{name} " + ", ".join(f"{piece} {share_text(share)}" for piece, share in shares.items()))
        shapes.append(f'<text x="0" y="{y + 12}">{escape(name)}, search {share_text(shares["search"])}</text>')
        start = 0.0
        for piece, share in shares.items():
            width = 100 * share * totals[name] / full
            shapes.append(f'<rect x="{start:.2f}%" y="{y + 18}" width="{width:.2f}%" height="14" {painted(piece)}/>')
            start += width
        y += 42
    shapes.append(legend_svg(y))
    label = escape("; ".join(said))
    return f'<svg role="img" aria-label="{label}" style="width:100%;height:{y + 20}px">{"".join(shapes)}</svg>'


def legend_svg(y: int) -> str:
    places = range(0, 100, 100 // len(PIECES))
    return "".join(
        f'<rect x="{x}%" y="{y}" width="10" height="10" {painted(piece)}/><text x="{x + 4}%" y="{y + 10}">{piece}</text>'
        for x, piece in zip(places, PIECES, strict=True)
    )


def painted(piece: str) -> str:
    colour, strength = SHADES[piece]
    return f'style="fill:var({colour});opacity:{strength}"'


def share_text(share: float) -> str:
    return f"{100 * share:.1f}%"


def curves_svg(curves: Sequence[Curve]) -> str:
    """Milliseconds per output token against the output length, from zero up, one line per arm."""
    longest = max(max(curve.costs) for curve in curves)
    highest = max(max(curve.costs.values()) for curve in curves) * 1.08
    across, up = (WIDTH - LEFT - 8) / longest, (HEIGHT - BOTTOM - 8) / highest
    ground = HEIGHT - BOTTOM
    axis = 'style="stroke:var(--line);stroke-width:1"'
    shapes = [f'<line x1="{LEFT}" x2="{WIDTH}" y1="{ground}" y2="{ground}" {axis}/>']
    for height in (highest / 2, highest):
        y = ground - height * up
        shapes += [
            f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" {axis}/>',
            f'<text x="{LEFT - 4}" y="{y + 4:.1f}" text-anchor="end">{height:.3g}</text>',
        ]
    for length in sorted({length for curve in curves for length in curve.costs}):
        shapes.append(f'<text x="{LEFT + length * across:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{length}</text>')
    for number, curve in enumerate(curves):
        colour = f"var({LINES[number % len(LINES)]})"
        points = [(LEFT + length * across, ground - cost * up) for length, cost in curve.costs.items()]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        shapes.append(f'<polyline points="{path}" style="fill:none;stroke:{colour};stroke-width:2"/>')
        shapes += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" style="fill:{colour}"/>' for x, y in points]
        shapes.append(
            f'<text x="{LEFT + 6}" y="{ground - 8 - 15 * number}" style="fill:{colour}">{escape(curve.arm)}</text>'
        )
    label = escape("; ".join(f"{curve.arm}: {costs_text(curve.costs)}" for curve in curves))
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" style="width:100%;max-width:{WIDTH + 120}px"'
    return f'<svg role="img" aria-label="{label}" {size}>{"".join(shapes)}</svg>'


def costs_text(costs: Mapping[int, float]) -> str:
    return ", ".join(f"{cost:.3g} ms at {length}" for length, cost in costs.items())

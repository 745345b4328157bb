"""The plots of a parity report: errors by step, their ratios by layer and step, margins of divergent decodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import numpy as np

from seq2engine.common.heat_map import LEVELS as COLOURS
from seq2engine.common.heat_map import heat_style

from ...numerics.budgets import DIVERGENCE_FACTOR, Divergence, times
from ..levels.error_growth import LOGITS, ErrorGrowth

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 360, 190, 40, 30, 8  # a phone shows it in its own size
CELL = 12  # pixels of the heat map
LEAST, MOST = -2, 4  # powers of two of a ratio at the ends of the colours: 1/4 to 16
MARGINS = range(-9, 7)  # powers of two of margin / budget

STYLE = f"""<style>
.plot {{ width: 100%; max-width: 36rem; display: block }} .plot text {{ font-size: 9.5px; fill: var(--soft) }}
.plot .axis {{ stroke: var(--line); stroke-width: 1 }} .plot path {{ fill: none; stroke-width: 1.6 }}
.plot .bound {{ stroke: var(--soft); stroke-dasharray: 3 3 }}
.keys {{ display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; font-size: .88rem; color: var(--soft);
  margin: .3rem 0 1rem }}
.keys i {{ display: inline-block; width: 1.3rem; height: .55rem; margin-right: .4rem; border-radius: .15rem }}
.ratios th {{ white-space: nowrap }} .ratios thead th {{ min-width: {CELL}px; max-width: {CELL}px; overflow: visible }}
.legend .scale {{ display: flex; justify-content: space-between; height: auto }}
.legend .scale span {{ position: static; transform: none }}
</style>"""


def styles() -> str:
    return heat_style() + STYLE


def error_growth_svg(growth: ErrorGrowth, candidate: str) -> str:
    """Relative errors by step of the logits and of the last layer's KV cache, of both sides."""
    last = [row for row in growth.rows if row != LOGITS][-2:]
    lines = [
        (f"logits, {candidate}", errors_of(growth, growth.candidate, [LOGITS]), "--accent", ""),
        ("logits, PyTorch", errors_of(growth, growth.reference, [LOGITS]), "--accent", "4 3"),
        (f"cache of the last layer, {candidate}", errors_of(growth, growth.candidate, last), "--good", ""),
        ("cache of the last layer, PyTorch", errors_of(growth, growth.reference, last), "--good", "4 3"),
    ]
    values = np.concatenate([line[1] for line in lines])
    shown = values[np.isfinite(values) & (values > 0)]
    if not shown.size:
        return "<p>Neither side has any error.</p>"
    low, high = math.floor(math.log10(shown.min())), math.ceil(math.log10(shown.max()) + 1e-9)
    high = max(high, low + 1)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - 8) * step / max(growth.steps - 1, 1)

    def y(power: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - power) / (high - low)

    shapes = [
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - 8}" y1="{y(power):.1f}" y2="{y(power):.1f}"/>'
        f'<text x="{LEFT - 5}" y="{y(power) + 3:.1f}" text-anchor="end">1e{power}</text>'
        for power in range(low, high + 1, max(1, (high - low) // 5))
    ]
    shapes += [
        f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 13}" text-anchor="middle">{step}</text>'
        for step in sorted({round(part * (growth.steps - 1) / 4) for part in range(5)})
    ]
    shapes.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 3}" text-anchor="middle">step</text>')
    for _, errors, colour, dashes in lines:
        points = [
            f"{x(step):.1f},{y(math.log10(value)):.1f}"
            for step, value in enumerate(errors)
            if math.isfinite(value) and value > 0
        ]
        shapes.append(
            f'<path d="M{" L".join(points)}" style="stroke:var({colour});stroke-dasharray:{dashes or "none"}"/>'
            if points
            else ""
        )
    keys = "".join(
        f'<span><i style="background:{stripes(colour, dashes)}"></i>{escape(name)}</span>'
        for name, _, colour, dashes in lines
    )
    svg = plot_html("relative error of logits and cache against the step", shapes)
    return f'{svg}<div class="keys">{keys}</div>'


def errors_of(growth: ErrorGrowth, side: Sequence[Sequence[float]], rows: Sequence[str]) -> np.ndarray:
    """Root mean square over these rows, by step."""
    chosen = [side[growth.rows.index(row)] for row in rows]
    return np.sqrt(np.mean(np.square(np.array(chosen)), axis=0))


def stripes(colour: str, dashes: str) -> str:
    if not dashes:
        return f"var({colour})"
    return f"repeating-linear-gradient(90deg,var({colour}) 0 4px,transparent 4px 7px)"


def plot_html(about: str, shapes: Sequence[str]) -> str:
    label = escape(about)
    return f'<svg class="plot" role="img" aria-label="{label}" viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(shapes)}</svg>'


def ratios_html(growth: ErrorGrowth) -> str:
    """A heat map of the candidate's error over PyTorch's: a row for keys, values and logits, a column for a step."""
    with np.errstate(divide="ignore"):
        places = (np.log2(np.maximum(growth.ratios, 1e-30)) - LEAST) / (MOST - LEAST)
    levels = (np.nan_to_num(places, nan=1.0, posinf=1.0).clip(0, 1) * (COLOURS - 1)).round().astype(int)
    head = "".join(f"<th>{step if step % 4 == 0 else ''}" for step in range(growth.steps))
    body = "\n".join(
        f"<tr><th>{escape(row_name(name))}"
        + "".join(
            f"<td class=k{level} title='{escape(row_name(name))}, step {step}: {times(value)}'>"
            for step, (level, value) in enumerate(zip(row, values, strict=True))
        )
        for name, row, values in zip(growth.rows, levels, growth.ratios, strict=True)
    )
    ticks = "".join(f"<span>{text}</span>" for text in ("1/4", "1/2", "1", "2", "4", "8", "16"))
    return (
        f'<div class="scroll"><table class="heat ratios" style="--cell:{CELL}px;--gap:1px"><thead><tr><th>{head}'
        f'</thead><tbody>{body}</table></div><div class="legend"><i></i><div class="scale">{ticks}</div></div>'
    )


def row_name(row: str) -> str:
    """self_k.3 -> layer 3 keys."""
    part, _, layer = row.partition(".")
    return {"self_k": f"layer {layer} keys", "self_v": f"layer {layer} values"}.get(part, row)


def margins_svg(divergences: Sequence[Divergence]) -> str:
    """A histogram of the margins of divergent decodes, in budgets, coloured by verdict."""
    counts = {verdict: [0] * len(MARGINS) for verdict in ("tie", "drift", "bug")}
    for divergence in divergences:
        size = divergence.budgets(divergence.margin)
        power = math.floor(math.log2(size)) if 0 < size < math.inf else MARGINS[0] if size == 0 else MARGINS[-1]
        counts[divergence.verdict][min(max(power, MARGINS[0]), MARGINS[-1]) - MARGINS[0]] += 1
    most = max(sum(column) for column in zip(*counts.values(), strict=True))
    wide = (WIDTH - LEFT - 8) / len(MARGINS)
    head = 12  # above the bars, for the names of the bounds
    tall = HEIGHT - TOP - BOTTOM - head
    shapes = [
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - 8}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>',
        f'<text x="{LEFT - 5}" y="{TOP + head + 7}" text-anchor="end">{most}</text>',
        f'<text x="{LEFT - 5}" y="{HEIGHT - BOTTOM}" text-anchor="end">0</text>',
    ]
    for i in range(len(MARGINS)):
        base = float(HEIGHT - BOTTOM)
        for verdict, colour in (("tie", "--soft"), ("drift", "--warn"), ("bug", "--bad")):
            height = tall * counts[verdict][i] / most
            base -= height
            if height:
                shapes.append(
                    f'<rect x="{LEFT + i * wide + 1:.1f}" y="{base:.1f}" width="{wide - 2:.1f}" height="{height:.1f}" '
                    f'style="fill:var({colour})"><title>{counts[verdict][i]} {verdict}</title></rect>'
                )
    for power, name in ((-int(math.log2(DIVERGENCE_FACTOR)), "tie"), (0, "budget")):
        place = LEFT + (power - MARGINS[0]) * wide
        shapes.append(f'<line class="bound" x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        shapes.append(f'<text x="{place - 3:.1f}" y="{TOP + 7}" text-anchor="end">{name}</text>')
    for power in MARGINS[::3]:
        text = f"{2.0**power:.2g}"
        place = LEFT + (power - MARGINS[0]) * wide
        shapes.append(f'<text x="{place:.1f}" y="{HEIGHT - BOTTOM + 13}" text-anchor="middle">{text}</text>')
    shapes.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 3}" text-anchor="middle">margin / budget</text>')
    colours = {"tie": "--soft", "drift": "--warn", "bug": "--bad"}
    keys = "".join(
        f'<span><i style="background:var({colours[verdict]})"></i>{verdict} {sum(found)}</span>'
        for verdict, found in counts.items()
    )
    return plot_html("margins of divergent decodes, in budgets", shapes) + f'<div class="keys">{keys}</div>'

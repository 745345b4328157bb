"""A training on one self-contained page: loss, exact match, learning rate, and decodes of what it delivers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from seq2engine.common.page import LONG, Html, about_html, badge_html, heading_html, note_html, page_html, table_html
from seq2engine.common.progress import duration

from ..config import ModelConfig
from .delivered import Delivered
from .loop import TrainOptions

History = Sequence[dict[str, float]]
Curve = tuple[str, str, list[tuple[float, float]]]  # label, colour, points
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 320, 52, 16, 14, 40


def training_html(
    history: History,
    name: str,
    config: ModelConfig,
    options: TrainOptions,
    delivered: Delivered,
    about: Sequence[tuple[str, str]] = (),
) -> str:
    """History as `train_model` returns it, what came of it, and rows of `about_rows` -> the page."""
    steps = [entry for entry in history if "loss" in entry]
    epochs = [entry for entry in history if "dev_loss" in entry]
    last, best = epochs[-1], max(epochs, key=lambda entry: entry["exact_match"])
    minutes = {id(entry): entry["seconds"] / 60 for entry in history}
    losses: list[Curve] = [
        ("training loss (smoothed labels)", "var(--soft)", smoothed([(minutes[id(e)], e["loss"]) for e in steps])),
        ("dev loss", "var(--accent)", [(minutes[id(e)], e["dev_loss"]) for e in epochs]),
    ]
    exact: list[Curve] = [
        ("exact match", "var(--good)", [(minutes[id(e)], 100 * e["exact_match"]) for e in epochs]),
        ("the checkpoint, averaged", "var(--accent)", [(minutes[id(last)], 100 * delivered.exact_match)]),
    ]
    rows = [
        (
            f"{int(e['epoch']) + 1}",
            f"{int(e['step']):,}",
            duration(e["seconds"]),
            f"{e['dev_loss']:.4f}",
            f"{e['exact_match']:.2%}",
        )
        for e in epochs
    ]
    averaged = min(options.average, len(epochs))
    subtitle = (
        f"{int(last['epoch']) + 1} epochs, {int(last['step']):,} steps, {duration(last['seconds'])}. The checkpoint "
        f"(mean of the last {averaged} epochs): dev loss {delivered.dev_loss:.3f}, exact match "
        f"{delivered.exact_match:.1%}. Last epoch alone: dev loss {last['dev_loss']:.3f}, exact match "
        f"{last['exact_match']:.1%}; best epoch {int(best['epoch']) + 1} with {best['exact_match']:.1%}."
    )
    return page_html(
        f"Training of {name}",
        subtitle,
        [
            about_html(about),
            *samples_blocks(delivered),
            heading_html("Loss"),
            note_html("Nats per target token. The dev loss is without label smoothing, so it may lie far below."),
            chart_svg([curve for curve in losses if curve[2]], "minutes", "loss"),
            heading_html("Exact match on the dev set"),
            note_html(
                "Share of dev pairs whose greedy decode is the target, token by token, with each epoch's own weights; "
                f"the checkpoint holds the average of the last {averaged} epochs, {delivered.exact_match:.1%}."
            ),
            chart_svg(exact, "minutes", "%"),
            *rate_blocks(steps),
            heading_html("Epochs"),
            table_html(("epoch", "steps", "after", "dev loss", "exact match"), rows),
            heading_html("Model and options"),
            table_html(
                ("what", "value"), [(key, Html(f"<span>{value}</span>")) for key, value in settings(config, options)]
            ),
        ],
    )


def samples_blocks(delivered: Delivered) -> list[str]:
    """Decodes of dev pairs by the weights of the checkpoint; Html, so that no text is set as a number."""
    if not delivered.samples:
        return []

    def text(value: str) -> Html:
        return Html(f"<span{' class=words' if len(value) > LONG else ''}>{escape(value)}</span>")

    rows = (
        (
            text(sample.source),
            text(sample.reference),
            text(sample.output),
            badge_html("right", "good") if sample.right else badge_html("wrong", "bad"),
        )
        for sample in delivered.samples
    )
    return [
        heading_html("Sample decodes"),
        note_html("Greedy decodes of dev pairs, taken evenly from all over the set, by the weights of the checkpoint."),
        table_html(("source", "reference", "output", ""), rows),
    ]


def rate_blocks(steps: History) -> list[str]:
    """The learning rate against the step; nothing for a training too short to have noted it."""
    points = [(entry["step"], entry["rate"]) for entry in steps if "rate" in entry]
    if not points:
        return []
    curve: Curve = ("learning rate", "var(--warn)", points)
    return [heading_html("Learning rate"), chart_svg([curve], "steps", "learning rate")]


def settings(config: ModelConfig, options: TrainOptions) -> list[tuple[str, object]]:
    layers = f"{config.encoder_layers} + {config.decoder_layers}"
    return [
        ("layers", layers),
        ("width, heads, inner", f"{config.d_model}, {config.heads}, {config.d_ff}"),
        ("variants", f"{config.norm}, {config.positions}, {config.activation}"),
        ("vocabularies", f"{config.source_vocab}, {config.target_vocab}"),
        ("dropout, smoothing", f"{config.dropout:g}, {options.label_smoothing:g}"),
        ("batch tokens, warm-up", f"{options.batch_tokens}, {options.warmup}"),
        ("gradient clip, rate", f"{options.clip:g}, {options.rate:g}"),
        ("averaged, cooldown", f"{options.average}, {options.cooldown}"),
        ("seed", options.seed),
    ]


def smoothed(points: list[tuple[float, float]], share: float = 0.2) -> list[tuple[float, float]]:
    """A running mean, because the loss of one batch says more about the batch than about the model."""
    result: list[tuple[float, float]] = []
    for x, y in points:
        result.append((x, y if not result else result[-1][1] + share * (y - result[-1][1])))
    return result


def chart_svg(curves: Sequence[Curve], across: str, up: str) -> str:
    """Lines over a grid, their names above. On a narrow screen it scrolls, because nobody could read it any smaller."""
    values = [point for _, _, points in curves for point in points]
    widest = max(max(x for x, _ in values), 1e-9)
    low, high = min(0.0, min(y for _, y in values)), max(y for _, y in values)
    marks = ticks(low, high)
    high = max(high, marks[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + x / widest * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - (y - low) / max(high - low, 1e-9) * (HEIGHT - TOP - BOTTOM),
        )

    label = f"{escape(up)} against {escape(across)}"
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" style="min-width:38rem" role="img" aria-label="{label}">']
    for mark in marks:
        _, y = place(0, mark)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="var(--line)"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{mark:g}</text>')
    for mark in ticks(0, widest):
        x, _ = place(mark, 0)
        if x <= WIDTH - RIGHT:
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{mark:g}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{escape(across)}</text>')
    for _, colour, points in curves:
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(points) <= 60:
            for point in points:
                x, y = place(*point)
                parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
    legend = " &nbsp; ".join(
        f'<span style="color:{colour}">&#9644;</span> {escape(label)}' for label, colour, _ in curves
    )
    return f'<p class="note">{legend}</p><div class="scroll">' + "".join(parts) + "</svg></div>"


def ticks(low: float, high: float) -> list[float]:
    """Some four to eight round numbers from `low` to about `high`."""
    span = max(high - low, 1e-9)
    unit = 10.0 ** math.floor(math.log10(span))
    step = next(unit * factor for factor in (0.1, 0.2, 0.25, 0.5, 1, 2, 2.5, 5, 10) if span / (unit * factor) <= 6)
    first = int(low // step)
    return [round((first + i) * step, 10) for i in range(1 + int(-(-(high - first * step) // step)))]

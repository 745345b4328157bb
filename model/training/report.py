"""A training as one self-contained page: loss, exact match, learning rate, and sample decodes of the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from seq2engine.common.page import LONG, Html, badge_html, page_from_template, words_html
from seq2engine.common.progress import duration

from ..config import ModelConfig
from .delivered import Delivered
from .loop import TrainOptions

History = Sequence[dict[str, float]]
Points = list[tuple[float, float]]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 320, 52, 16, 14, 40


@dataclass(frozen=True)
class Line:
    """One line of a chart; its points are values, or, in a `Chart`, places on the page."""

    label: str
    colour: str
    points: Points


@dataclass(frozen=True)
class Chart:
    """Lines over a grid as `chart.html` draws them; places are in units of the picture."""

    across: str  # what the axes measure
    up: str
    lines: list[Line]
    rows: list[tuple[float, str]]  # grid lines: y, number
    columns: list[tuple[float, str]]  # numbers under the picture: x, number
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    bottom: int = HEIGHT - BOTTOM


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
    averaged = min(options.average, len(epochs))
    values = {
        "title": f"Training of {name}",
        "subtitle": summary_text(epochs, averaged, delivered),
        "about_rows": about,
        "samples": sample_rows(delivered),
        "losses": loss_chart(steps, epochs),
        "averaged": averaged,
        "exact_match": f"{delivered.exact_match:.1%}",
        "exact": exact_match_chart(epochs, delivered),
        "rates": rate_chart(steps),
        "epochs": [epoch_row(entry) for entry in epochs],
        "settings": [(key, words_html(value, long=False)) for key, value in settings(config, options)],
    }
    return page_from_template("seq2engine.model.training", "training.html", values)


def summary_text(epochs: History, averaged: int, delivered: Delivered) -> str:
    last, best = epochs[-1], max(epochs, key=lambda entry: entry["exact_match"])
    return (
        f"{int(last['epoch']) + 1} epochs, {int(last['step']):,} steps, {duration(last['seconds'])}. The checkpoint "
        f"(mean of the last {averaged} epochs): dev loss {delivered.dev_loss:.3f}, exact match "
        f"{delivered.exact_match:.1%}. Last epoch alone: dev loss {last['dev_loss']:.3f}, exact match "
        f"{last['exact_match']:.1%}; best epoch {int(best['epoch']) + 1} with {best['exact_match']:.1%}."
    )


def epoch_row(entry: dict[str, float]) -> tuple[str, ...]:
    number, step = f"{int(entry['epoch']) + 1}", f"{int(entry['step']):,}"
    return number, step, duration(entry["seconds"]), f"{entry['dev_loss']:.4f}", f"{entry['exact_match']:.2%}"


def sample_rows(delivered: Delivered) -> list[tuple[Html, ...]]:
    """Decodes of dev pairs by the weights of the checkpoint."""
    return [
        (
            *(words_html(text, len(text) > LONG) for text in (sample.source, sample.reference, sample.output)),
            badge_html("right", "good") if sample.right else badge_html("wrong", "bad"),
        )
        for sample in delivered.samples
    ]


def loss_chart(steps: History, epochs: History) -> Chart:
    trained = smoothed([(entry["seconds"] / 60, entry["loss"]) for entry in steps])
    lines = [
        Line("training loss (smoothed labels)", "var(--soft)", trained),
        Line("dev loss", "var(--accent)", [(entry["seconds"] / 60, entry["dev_loss"]) for entry in epochs]),
    ]
    return chart_of([line for line in lines if line.points], "minutes", "loss")


def exact_match_chart(epochs: History, delivered: Delivered) -> Chart:
    points = [(entry["seconds"] / 60, 100 * entry["exact_match"]) for entry in epochs]
    averaged = (points[-1][0], 100 * delivered.exact_match)
    lines = [
        Line("exact match", "var(--good)", points),
        Line("the checkpoint, averaged", "var(--accent)", [averaged]),
    ]
    return chart_of(lines, "minutes", "%")


def rate_chart(steps: History) -> Chart | None:
    """The learning rate against the step; None for a training too short to have noted it."""
    points = [(entry["step"], entry["rate"]) for entry in steps if "rate" in entry]
    return chart_of([Line("learning rate", "var(--warn)", points)], "steps", "learning rate") if points else None


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


def smoothed(points: Points, share: float = 0.2) -> Points:
    """A running mean, because the loss of one batch depends more on the batch than on the model."""
    result: Points = []
    for x, y in points:
        result.append((x, y if not result else result[-1][1] + share * (y - result[-1][1])))
    return result


def chart_of(lines: Sequence[Line], across: str, up: str) -> Chart:
    """Lines through values -> a chart of them, from zero, or from below it where a value is."""
    values = [point for line in lines for point in line.points]
    widest = max(max(x for x, _ in values), 1e-9)
    low, high = min(0.0, min(y for _, y in values)), max(y for _, y in values)
    marks = ticks(low, high)
    high = max(high, marks[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + x / widest * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - (y - low) / max(high - low, 1e-9) * (HEIGHT - TOP - BOTTOM),
        )

    columns = [(place(mark, low)[0], f"{mark:g}") for mark in ticks(0, widest)]
    return Chart(
        across,
        up,
        [Line(line.label, line.colour, [place(*point) for point in line.points]) for line in lines],
        [(place(0, mark)[1], f"{mark:g}") for mark in marks],
        [(x, text) for x, text in columns if x <= WIDTH - RIGHT],
    )


def ticks(low: float, high: float) -> list[float]:
    """Some four to eight round numbers from `low` to about `high`."""
    span = max(high - low, 1e-9)
    unit = 10.0 ** math.floor(math.log10(span))
    step = next(unit * factor for factor in (0.1, 0.2, 0.25, 0.5, 1, 2, 2.5, 5, 10) if span / (unit * factor) <= 6)
    first = int(low // step)
    return [round((first + i) * step, 10) for i in range(1 + int(-(-(high - first * step) // step)))]

"""The report of an attention view: text for a terminal, a self-contained HTML page of heat maps."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from seq2engine.common.heat_map import cells_html, heat_style, legend_html, picture_html, visible
from seq2engine.common.page import Html, about_html, badge_html, heading_html, note_html, page_html, table_html
from seq2engine.common.tables import text_table
from seq2engine.model.tokenizers.base import unknown_text

from ..numerics.budgets import WORST_FACTOR
from .view import AttentionView

CHECK_HEAD = ("layer", "largest difference", "ONNX Runtime's error", "PyTorch's error", "verdict")
TITLE_LENGTH = 60  # characters of the text and of the output; the maps have all of both
CELL_BYTES = 1_500_000  # of cells with tooltips on a page; maps beyond are pictures, which are ten times smaller
LABELLED = 12  # pixels of a cell from which on there is room for a label beside it
MOST = 3  # source tokens listed for an output token

STYLE = """<style>
h1 { overflow-wrap: anywhere } .maps + .maps { margin-top: 1.1rem } .verdict .badge { margin-right: .4rem }
.place { color: var(--soft); font-size: .8em } .share { color: var(--soft); margin-left: .5rem }
</style>"""

Lines = Sequence[Sequence[tuple[str, np.ndarray]]]  # lines of named maps


def attention_text(view: AttentionView) -> str:
    """The result as plain text."""
    return (
        f"attention {'passed' if view else 'FAILED'}: {view.reason}\n"
        f"{view.text} -> {view.output}\n\n"
        f"{text_table(CHECK_HEAD, check_rows(view))}"
    )


def attention_html(view: AttentionView, about: Sequence[tuple[str, str]] = ()) -> str:
    """The result as one page: the average first, then layers, heads, numbers and the check; rows of `about_rows`."""
    layers, heads, outputs, given = view.weights.shape
    search = "greedy" if view.beam == 1 else f"beam {view.beam}"
    of_layers = view.weights.mean(axis=1)
    draw = MapWriter(view)
    average = draw([[("all layers and heads", of_layers.mean(axis=0))]], fitted(720, given, 13, 44), labelled=True)
    size = fitted(400, given, 5, 22)
    by_layer = draw([[(f"layer {layer + 1}", of_layers[layer]) for layer in range(layers)]], size, size >= LABELLED)
    by_head = draw(
        [
            [(f"layer {layer + 1} head {head + 1}", view.weights[layer, head]) for head in range(heads)]
            for layer in range(layers)
        ],
        fitted(162, given, 3, 16),
        labelled=False,
    )
    blocks = [
        heat_style(),
        STYLE,
        about_html(about),
        f'<p class="verdict">{verdict_badge(bool(view))} {escape(view.reason)}</p>',
        *([note_html(f"The text has {unknown_text(view.unknown)}.")] if view.unknown else []),
        heading_html("Cross-attention, all layers"),
        note_html(
            "A row is an output token, from top to bottom: its attention weights over the source tokens, in the step "
            "that chose it. A row adds up to 1. Colours follow the square root of the weight."
        ),
        legend_html(),
        average,
        heading_html("Layers"),
        note_html("The mean over the heads of each layer."),
        by_layer,
        heading_html("Heads"),
        by_head,
        *([note_html("Maps without a tooltip on every cell are pictures, to keep this page small.")] * draw.pictures),
        heading_html("Source tokens with the most weight"),
        note_html(f"The mean over the heads of layer {layers}, the last one. Small numbers count source tokens."),
        most_html(view, of_layers[-1]),
        heading_html("ONNX Runtime against PyTorch"),
        note_html(
            f"Both computed in {view.precision}; errors are the largest against PyTorch in fp64. ONNX Runtime's may be "
            f"{WORST_FACTOR:g} times PyTorch's."
        ),
        table_html(CHECK_HEAD, ((*row, verdict_badge(word == "pass")) for *row, word in check_rows(view))),
    ]
    title = f"{shortened(view.text)} → {shortened(view.output)}"
    subtitle = (
        f"Cross-attention of one {search} decode on ONNX Runtime {view.precision}, {view.cache_form} cache: "
        f"{counted(layers, 'layer')} of {counted(heads, 'head')}, {counted(given, 'source token')}, "
        f"{counted(outputs, 'output token')}."
    )
    return page_html(title, subtitle, blocks)


class MapWriter:
    """Draws lines of maps, the most important first, and counts the bytes of their cells."""

    def __init__(self, view: AttentionView):
        self.view = view
        self.spent = 0
        self.pictures = False

    def __call__(self, lines: Lines, cell: int, labelled: bool) -> str:
        """Maps [T,S] in lines, each with a tooltip on every cell, or all of them as pictures."""
        view = self.view
        drawn: list[str] = []
        spent = self.spent
        for values in (values for maps in lines for _, values in maps):
            drawn.append(cells_html(values, view.target, view.source, "attends to", cell, labelled))
            spent += len(drawn[-1].encode())
            if spent > CELL_BYTES:
                self.pictures = True
                return lines_html(lines, [picture_html(values, name, cell) for maps in lines for name, values in maps])
        self.spent = spent
        return lines_html(lines, drawn)


def lines_html(lines: Lines, drawn: Sequence[str]) -> str:
    maps = iter(drawn)
    figures = (
        "".join(f"<figure><figcaption>{escape(name)}</figcaption>{next(maps)}</figure>" for name, _ in line)
        for line in lines
    )
    return "".join(f'<div class="maps">{figure}</div>' for figure in figures)


def fitted(width: int, columns: int, least: int, most: int) -> int:
    """Pixels of a cell, so that a map is about `width` wide."""
    return min(max(width // columns, least), most)


def most_html(view: AttentionView, weights: np.ndarray) -> str:
    """For every output token the source tokens with the most weight; weights [T,S]."""
    count = min(MOST, len(view.source))
    order = np.argsort(-weights, axis=1, kind="stable")[:, :count]

    def cell(row: int, place: int) -> Html:
        return Html(
            f'{escape(visible(view.source[place]))} <span class="place">{place + 1}</span>'
            f'<span class="share">{weights[row, place]:.2f}</span>'
        )

    rows = (
        (Html(escape(visible(token))), *(cell(row, place) for place in order[row]))
        for row, token in enumerate(view.target)
    )
    return table_html(("output token", "most", "second", "third")[: count + 1], rows)


def check_rows(view: AttentionView) -> list[tuple[str, ...]]:
    return [
        (
            str(check.layer),
            *(f"{value:.2g}" for value in (check.difference, check.candidate, check.reference)),
            "pass" if check else "FAIL",
        )
        for check in view.checks
    ]


def verdict_badge(passed: bool) -> Html:
    return badge_html("passed" if passed else "failed", "good" if passed else "bad")


def counted(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"


def shortened(text: str) -> str:
    return text if len(text) <= TITLE_LENGTH else text[: TITLE_LENGTH - 1] + "…"

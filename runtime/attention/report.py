"""The report of an attention view: text for a terminal, a self-contained HTML page of heat maps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from seq2engine.common.heat_map import cells_html, heat_style, legend_html, picture_html, visible
from seq2engine.common.page import Html, block_html, macro_html, page_from_template
from seq2engine.common.tables import text_table
from seq2engine.model.tokenizers.base import unknown_text

from ..numerics.budgets import WORST_FACTOR
from .view import AttentionView

CHECK_HEAD = ("layer", "largest difference", "ONNX Runtime's error", "PyTorch's error", "verdict")
TITLE_LENGTH = 60  # characters of the text and of the output in the title
CELL_BYTES = 1_500_000  # bytes of cells with tooltips on a page; further maps are pictures, which are ten times smaller
LABELLED = 12  # pixels of a cell from which on there is room for a label beside it
MOST = 3  # source tokens listed for an output token

PACKAGE = "seq2engine.runtime.attention"

Lines = Sequence[Sequence[tuple[str, np.ndarray]]]  # lines of named maps


def attention_text(view: AttentionView) -> str:
    """The result as plain text."""
    return (
        f"attention {'passed' if view else 'FAILED'}: {view.reason}\n"
        f"{view.text} -> {view.output}\n\n"
        f"{text_table(CHECK_HEAD, check_rows(view))}"
    )


def attention_html(view: AttentionView, about: Sequence[tuple[str, str]] = ()) -> str:
    """The result as one page: the mean over all layers, then layers, heads, numbers and the check."""
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
    values = {
        "title": f"{shortened(view.text)} → {shortened(view.output)}",
        "subtitle": (
            f"Cross-attention of one {search} decode on ONNX Runtime {view.precision}, {view.cache_form} cache: "
            f"{counted(layers, 'layer')} of {counted(heads, 'head')}, {counted(given, 'source token')}, "
            f"{counted(outputs, 'output token')}."
        ),
        "heat_style": heat_style(),
        "legend": legend_html(),
        "about_rows": about,
        "view": view,
        "passed": bool(view),
        "unknown": unknown_text(view.unknown) if view.unknown else "",
        "average": average,
        "by_layer": by_layer,
        "by_head": by_head,
        "pictures": draw.pictures,
        "layers": layers,
        "most_head": ("output token", "most", "second", "third")[: min(MOST, given) + 1],
        "most": most_rows(view, of_layers[-1]),
        "factor": WORST_FACTOR,
        "check_head": CHECK_HEAD,
        "checks": [(*row, cell("verdict", word == "pass")) for *row, word in check_rows(view)],
    }
    return page_from_template(PACKAGE, "attention.html", values)


class MapWriter:
    """Draws rows of maps, the most important first, and counts the bytes of their cells."""

    def __init__(self, view: AttentionView):
        self.view = view
        self.spent = 0
        self.pictures = False

    def __call__(self, lines: Lines, cell: int, labelled: bool) -> Html:
        """Maps [T,S] in lines, each with a tooltip on every cell, or all of them as pictures."""
        view = self.view
        drawn: list[Html] = []
        spent = self.spent
        for values in (values for maps in lines for _, values in maps):
            drawn.append(cells_html(values, view.target, view.source, "attends to", cell, labelled))
            spent += len(drawn[-1].encode())
            if spent > CELL_BYTES:
                self.pictures = True
                return lines_html(lines, [picture_html(values, name, cell) for maps in lines for name, values in maps])
        self.spent = spent
        return lines_html(lines, drawn)


def lines_html(lines: Lines, drawn: Sequence[Html]) -> Html:
    """The maps under their names, line by line."""
    maps = iter(drawn)
    return cell("lines", [[(name, next(maps)) for name, _ in line] for line in lines])


def fitted(width: int, columns: int, least: int, most: int) -> int:
    """Pixels of a cell, so that a map is about `width` wide."""
    return min(max(width // columns, least), most)


def most_rows(view: AttentionView, weights: np.ndarray) -> list[tuple[Html, ...]]:
    """For every output token the source tokens with the most weight; weights [T,S]."""
    order = np.argsort(-weights, axis=1, kind="stable")[:, :MOST]
    return [
        (
            block_html("words", visible(token), False),
            *(cell("share", visible(view.source[place]), place + 1, weights[row, place]) for place in order[row]),
        )
        for row, token in enumerate(view.target)
    ]


def check_rows(view: AttentionView) -> list[tuple[str, ...]]:
    return [
        (
            str(check.layer),
            *(f"{value:.2g}" for value in (check.difference, check.candidate, check.reference)),
            "pass" if check else "FAIL",
        )
        for check in view.checks
    ]


def cell(macro: str, *arguments: object) -> Html:
    """A macro of pieces.html."""
    return macro_html(PACKAGE, "pieces.html", macro, *arguments)


def counted(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"


def shortened(text: str) -> str:
    return text if len(text) <= TITLE_LENGTH else text[: TITLE_LENGTH - 1] + "…"

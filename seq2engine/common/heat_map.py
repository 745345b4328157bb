"""Numbers from 0 to 1 as colours on a page: a table with a tooltip on every cell, or a small picture of the same.

The colours run from dark violet over green to yellow, evenly in brightness, so that they differ in print, on
light and on dark paper and by the colour-blind. They follow the square root of a number: most weights are small.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from .page import HERE, Html, macro_html

LEVELS = 64
ANCHORS = ("440154", "472d7b", "3b528b", "2c728e", "21918c", "28ae80", "5ec962", "addc30", "fde725")
TICKS = (0.0, 0.02, 0.1, 0.25, 0.5, 1.0)
LETTER = 7  # pixels that a letter of a label is wide
SMALLEST = 14  # pixels of a cell that a phone may still tell from the next
OUTSIDE = 8  # rems of a screen that are not cells: margins, labels of the rows, gaps
LONGEST_LABEL = 14  # characters; longer ones are cut, the tooltip has them whole


def palette() -> np.ndarray:
    """The colours, uint8 [LEVELS, 3]."""
    anchors = np.array([list(bytes.fromhex(anchor)) for anchor in ANCHORS])
    places = np.linspace(0, len(anchors) - 1, LEVELS)
    colours = [np.interp(places, np.arange(len(anchors)), anchors[:, part]) for part in range(3)]
    return np.stack(colours, axis=1).round().astype(np.uint8)


def levels_of(values: np.ndarray) -> np.ndarray:
    """Numbers from 0 to 1 -> the places of their colours. NaN is drawn as 0."""
    roots = np.sqrt(np.nan_to_num(values, nan=0.0).clip(0, 1))
    return (roots * (LEVELS - 1)).round().astype(np.uint8)


def heat_style() -> Html:
    """The style sheet of all maps of a page."""
    return macro_html(HERE, "heat_map.html", "style", [bytes(colour).hex() for colour in palette()])


def legend_html() -> Html:
    """The colours from 0 to 1, with numbers where they belong."""
    return macro_html(HERE, "heat_map.html", "legend", [(tick, 100 * tick**0.5) for tick in TICKS])


@dataclass(frozen=True)
class CellMap:
    """A table of cells as `heat_map.html` draws it."""

    sizes: str  # CSS
    labelled: bool
    columns: list[tuple[str, str]]  # label, CSS class
    rows: list[tuple[str, list[tuple[int, Html]]]]  # label; for every cell the level of its colour and its tooltip


def cells_html(
    values: np.ndarray, rows: Sequence[str], columns: Sequence[str], verb: str, cell: int, labelled: bool
) -> Html:
    """values [rows, columns] as a table of cells of `cell` pixels, with a tooltip: "row" verb "column": 0.83."""
    backs = [tooltip_text(f'"{visible(column)}"') for column in columns]
    lines = []
    for row, places, numbers in zip(rows, levels_of(values), values, strict=True):
        front = tooltip_text(f'"{visible(row)}" {verb} ')
        tooltips = (Html(f"{front}{back}: {number:.2f}") for back, number in zip(backs, numbers, strict=True))
        lines.append((cut(row), list(zip(places.tolist(), tooltips, strict=True))))
    sizes = f"--cell:{cell_size(cell, len(columns))};--gap:{int(labelled)}px"
    heads = [(cut(column), label_class(column, cell)) for column in columns]
    return macro_html(HERE, "heat_map.html", "cells", CellMap(sizes, labelled, heads, lines))


def cell_size(cell: int, columns: int) -> str:
    """The size of a cell in pixels; smaller where a narrow screen has no room for all columns, down to SMALLEST."""
    return f"max({min(cell, SMALLEST)}px,min({cell}px,(100vw - {OUTSIDE}rem)/{columns}))"


def label_class(label: str, cell: int) -> str:
    """A label above its column is rotated where it is wider than that; on a narrow screen every long one is."""
    return "rotated" if len(cut(label)) * LETTER > cell else "long" if len(cut(label)) > 2 else ""


def picture_html(values: np.ndarray, about: str, cell: int) -> Html:
    """The same as a picture, for maps whose cells would make a page too large."""
    height, width = values.shape
    data = base64.b64encode(png_of(levels_of(values))).decode()
    return macro_html(HERE, "heat_map.html", "picture", about, width * cell, height * cell, data)


def png_of(places: np.ndarray) -> bytes:
    """Places in the palette, uint8 [height, width] -> a PNG file of one pixel each."""
    height, width = places.shape
    rows = b"".join(b"\0" + row.tobytes() for row in places)  # 0: a row as it is, unfiltered

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)  # 8 bits a pixel, which are places in a palette
    parts = ((b"IHDR", header), (b"PLTE", palette().tobytes()), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, data) for kind, data in parts)


def tooltip_text(text: str) -> str:
    """Text for an attribute in single quotes: double ones, of which every tooltip has four, stay one byte each."""
    return escape(text, quote=False).replace("'", "&#39;")


def visible(label: str) -> str:
    """A label that can be seen: spaces and line ends become signs."""
    return label.translate({ord(" "): "␣", ord("\n"): "⏎", ord("\t"): "⇥"}) or "∅"


def cut(label: str) -> str:
    shown = visible(label)
    return shown if len(shown) <= LONGEST_LABEL else shown[: LONGEST_LABEL - 1] + "…"

"""Plain text tables that fit the terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO, TypeVar

from seq2engine.common.terminal import columns_of, width_of

T = TypeVar("T")
GAP = "  "  # between columns
GAPS = (GAP, " ")  # what is tried where columns must be narrow


def text_table(
    head: Sequence[str], rows: Iterable[Sequence[object]], width: int | None = None, stream: TextIO | None = None
) -> str:
    """Columns padded to their widest cell; columns of numbers are right-aligned, columns without any value left out.

    At most `width` columns wide (None: the width of the terminal that `stream` writes to; no limit where it is not a
    terminal): cells are wrapped between words, and where that is not enough every row becomes a record of one line for
    each cell.
    """
    head, cells = without_empty_columns(head, [[str(value) for value in row] for row in rows])
    limit = columns_of(stream or sys.stdout) if width is None else width
    natural = [max(width_of(line[i]) for line in [list(head), *cells]) for i in range(len(head))]
    if limit is None:
        return aligned(head, cells, natural)
    for gap in GAPS:
        if sum(natural) + len(gap) * (len(head) - 1) <= limit:
            return aligned(head, cells, natural, gap)
    narrowest = [
        max(width_of(part) for part in (*head[i].split(), *(part for line in cells for part in parts_of(line[i]))))
        for i in range(len(head))
    ]
    for gap in GAPS:
        room = limit - len(gap) * (len(head) - 1) - sum(narrowest)
        if room >= 0:
            return aligned(head, cells, shared(narrowest, natural, room), gap)
    return records(head, cells, limit)


def without_empty_columns(head: Sequence[str], rows: Sequence[Sequence[T]]) -> tuple[list[str], list[list[T]]]:
    """The table without columns whose cells are all empty; a table without rows keeps its columns."""
    kept = [i for i in range(len(head)) if not rows or any(str(row[i]) for row in rows)]
    return [head[i] for i in kept], [[row[i] for i in kept] for row in rows]


def aligned(head: Sequence[str], cells: Sequence[Sequence[str]], widths: Sequence[int], gap: str = GAP) -> str:
    """Rows with columns of these widths; a wider cell takes several lines."""
    right = [all(line[i][:1].isdigit() for line in cells if line[i]) for i in range(len(head))]
    lines = []
    for number, row in enumerate([list(head), *cells]):
        split = head_parts if number == 0 else parts_of
        columns = [
            [cell] if width_of(cell) <= width else wrapped(split(cell), width)
            for cell, width in zip(row, widths, strict=True)
        ]
        for i in range(max(map(len, columns), default=1)):
            padded = (
                pad(column[i] if i < len(column) else "", width, at_right)
                for column, width, at_right in zip(columns, widths, right, strict=True)
            )
            lines.append(gap.join(padded).rstrip())
    return "\n".join(lines)


def records(head: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> str:
    """Every row as lines of a name and a value, with an empty line between rows; empty values are left out."""
    label = max(map(width_of, head))
    blocks = []
    for row in cells:
        lines = []
        for name, cell in zip(head, row, strict=True):
            if cell:
                first, *more = wrapped(parts_of(cell), max(width - label - len(GAP), 1))
                lines += [pad(name, label) + GAP + first, *(" " * label + GAP + part for part in more)]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def shared(least: Sequence[int], most: Sequence[int], room: int) -> list[int]:
    """Widths from `least` to `most`: the room is distributed one column at a time to those that lack most."""
    widths = list(least)
    for _ in range(room):
        lacking = max(range(len(widths)), key=lambda i: most[i] - widths[i])
        widths[lacking] += 1
    return widths


def filled(text: str, width: int | None = None, stream: TextIO | None = None, indent: str = "  ") -> str:
    """A long line wrapped to at most `width` columns (None: as in `text_table`), all but the first line indented."""
    limit = columns_of(stream or sys.stdout) if width is None else width
    if limit is None or width_of(text) <= limit:
        return text
    return f"\n{indent}".join(wrapped(parts_of(text), limit - len(indent)))


def parts_of(cell: str) -> list[str]:
    """Where a cell may be wrapped: after commas, and at spaces that are not next to a number (12 ms, 3 of 4).

    Never inside brackets: an interval such as [0.1, 0.5] stays together.
    """
    return re.split(r"(?:(?<=,) +|(?<![\d\s,]) +(?![\d\s]))(?![^\[\]()]*[\])])", cell)


def head_parts(name: str) -> list[str]:
    return name.split() or [""]


def wrapped(parts: Sequence[str], width: int) -> list[str]:
    """Parts in as few lines as possible. A part that is wider than a line is not split, so that it can be copied."""
    lines = [""]
    for part in parts:
        joined = f"{lines[-1]} {part}" if lines[-1] else part
        if lines[-1] and width_of(joined) > width:
            lines.append(part)
        else:
            lines[-1] = joined
    return lines


def pad(text: str, width: int, right: bool = False) -> str:
    space = " " * max(width - width_of(text), 0)
    return space + text if right else text + space

"""Plain text tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def text_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns padded to their widest cell; columns of numbers are set right."""
    cells = [[str(value) for value in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(head), *cells]) for i in range(len(head))]
    right = [all(line[i][:1].isdigit() for line in cells if line[i]) for i in range(len(head))]

    def line_of(line: Sequence[str]) -> str:
        padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True))
        return "  ".join(padded).rstrip()

    return "\n".join(line_of(line) for line in [list(head), *cells])

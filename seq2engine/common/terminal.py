"""How wide a terminal is, and how many of its columns a text takes."""

from __future__ import annotations

import os
import shutil
from typing import TextIO

CUT = "…"


def columns_of(stream: TextIO) -> int | None:
    """Columns of the terminal a stream writes to, as it is now; None where the stream is not a terminal."""
    if not stream.isatty():
        return None
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except OSError:  # a stream may claim to be a terminal and have neither size nor descriptor
        columns = 0
    return columns or shutil.get_terminal_size().columns


def fresh_line(stream: TextIO | None) -> str:
    """Control characters that erase a progress bar on a terminal before a line is written."""
    return "\r\x1b[K" if stream is not None and stream.isatty() else ""


def width_of(text: str) -> int:
    """Columns that a text takes: two for a wide character, none for an accent on another one."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # imported late: most texts are ASCII

    return cell_len(text)


def cut_to(text: str, columns: int) -> str:
    """The text, cut to that many columns with an ellipsis at the end."""
    if width_of(text) <= columns:
        return text
    from rich.cells import set_cell_size

    return set_cell_size(text, columns - width_of(CUT)).rstrip() + CUT if columns > 0 else ""

"""Lines of text from bytes, as they arrive. A line that cannot be read has an error; the others are not affected."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

BOM = b"\xef\xbb\xbf"
LONGEST = 1 << 20  # bytes of a line at most, to limit memory
QUIET = 0.002  # seconds without a new line after which a window ends
PATIENCE = 0.05  # seconds after which a window ends in any case


@dataclass(frozen=True)
class Line:
    """A line of the input by its number, from 1. One that could not be read has an error and no text."""

    number: int
    text: str = ""
    error: str | None = None
    end: int = 0  # bytes of the input up to here, this line with them


def lines_from_chunks(chunks: Iterable[bytes], first: int = 1) -> Iterator[Line]:
    """Bytes in pieces of any size -> lines, of which each ends at a newline byte and nowhere else.

    Other line separators of Unicode (U+2028, U+0085, form feed) are text. A byte order mark at the start of a file and
    a carriage return at the end of a line are not. `first` is the number of the first line, where bytes begin later.
    """
    held = bytearray()  # the line so far; of one that is too long only as much as shows it
    number, end = first, 0
    for chunk in chunks:
        *ended, last = chunk.split(b"\n")
        for part in ended:
            held += part[: LONGEST + 1 - len(held)]
            end += len(part) + 1
            yield line_from_bytes(number, bytes(held), end)
            held.clear()
            number += 1
        held += last[: LONGEST + 1 - len(held)]
        end += len(last)
    if held:
        yield line_from_bytes(number, bytes(held), end)


def line_from_bytes(number: int, raw: bytes, end: int = 0) -> Line:
    if len(raw) > LONGEST:
        return Line(number, error=f"more than {LONGEST:,} bytes; shorten it", end=end)
    raw = (raw.removeprefix(BOM) if number == 1 else raw).removesuffix(b"\r")
    try:
        return Line(number, raw.decode("utf-8"), end=end)
    except UnicodeDecodeError as wrong:
        place = f"byte {wrong.start + 1} (0x{raw[wrong.start]:02x})"
        return Line(number, error=f"{place} is not UTF-8; save the input as UTF-8", end=end)


def windows_of(lines: Iterable[Line], most: int) -> Iterator[list[Line]]:
    """Lines -> lists of up to `most`: full ones if the input is fast; if it is slow, the lines that have arrived.

    So lines can be sorted by length without waiting for more. They are read in a thread, at most `most` ahead. It ends
    with the lines, or at the next line if the iteration stops before.
    """
    arrivals = _Arrivals(most)
    threading.Thread(target=arrivals.read, args=(lines,), name="lines", daemon=True).start()
    try:
        while window := arrivals.take():
            yield window
    finally:
        arrivals.give_up()


class _Arrivals:
    """The lines that were read and not yet taken, shared by two threads."""

    def __init__(self, most: int):
        self.most = most
        self.waiting: deque[Line] = deque()
        self.ended = False  # nothing more will be read
        self.failure: Exception | None = None
        self.changed = threading.Condition()

    def read(self, lines: Iterable[Line]) -> None:
        try:
            for line in lines:
                with self.changed:
                    self.changed.wait_for(lambda: self.ended or len(self.waiting) < self.most)
                    if self.ended:
                        return
                    self.waiting.append(line)
                    if len(self.waiting) in (1, self.most):  # `take` waits for these counts only
                        self.changed.notify_all()
        except Exception as failure:  # raised by `take`, after the lines before it
            self.failure = failure
        finally:
            self.give_up()

    def take(self) -> list[Line]:
        """The lines that are there, at least one; none after the last."""
        with self.changed:
            self.changed.wait_for(lambda: self.ended or self.waiting)
            deadline = time.monotonic() + PATIENCE
            before = 0
            while before < len(self.waiting) and time.monotonic() < deadline:
                before = len(self.waiting)
                self.changed.wait_for(lambda: self.ended or len(self.waiting) == self.most, QUIET)
            window = list(self.waiting)
            self.waiting.clear()
            self.changed.notify_all()
            if not window and self.failure is not None:
                raise self.failure
            return window

    def give_up(self) -> None:
        with self.changed:
            self.ended = True
            self.changed.notify_all()

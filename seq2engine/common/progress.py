"""Progress of long work: the worker reports a stage and how much of it is done; a terminal shows a bar, a log lines.

`rich` draws the bar, in the colours and characters that the terminal has. Its live display is not used: it hides the
cursor and draws from a thread of its own, which a killed process would leave behind.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, TextIO

from seq2engine.common.terminal import columns_of, cut_to, width_of

if TYPE_CHECKING:
    from rich.console import Console

BAR, SHORTEST_BAR = 24, 8  # columns
NARROW = 40  # columns of a terminal below which words are worth more than a bar


class Progress(Protocol):
    """Called with the stage, the fraction of it that is done, and a few words of detail."""

    def __call__(self, stage: str, fraction: float, detail: str = "") -> None: ...


def silent(stage: str, fraction: float, detail: str = "") -> None:
    """Reports nothing."""


class ProgressPrinter:
    """Prints to stderr: one redrawn line per stage with percent and time left, or plain lines when not a terminal."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty()
        self.clock = clock
        self.stage = ""
        self.started = 0.0
        self.first = 0.0  # the fraction that was done when the stage began: not 0 for work that is resumed
        self.shown = 0.0

    def __call__(self, stage: str, fraction: float, detail: str = "") -> None:
        now = self.clock()
        if stage != self.stage:
            self.stage, self.started, self.first, self.shown = stage, now, fraction, 0.0
            if not self.live and fraction < 1:
                self.stream.write(f"{stage} ...\n")
        done = fraction >= 1
        if not done and now - self.shown < (0.1 if self.live else 10.0):
            return
        if not self.live and not done and not self.shown:
            self.shown = now  # the opening line has just been written
            return
        self.shown = now
        self.stream.write(self.line(stage, min(fraction, 1.0), now - self.started, detail))
        self.stream.flush()
        if done:
            self.stage = ""

    def line(self, stage: str, fraction: float, elapsed: float, detail: str = "") -> str:
        if fraction >= 1:
            text = f"{stage}: done in {duration(elapsed)}"
        elif fraction > self.first:
            left = elapsed * (1 - fraction) / (fraction - self.first)
            text = f"{stage}: {fraction:4.0%}, {duration(left)} left"
        else:
            text = f"{stage} ..."
        text += f", {detail}" if detail else ""
        if not self.live:
            return text + "\n"
        return f"\r\x1b[K{self.fitted(fraction, text)}" + ("\n" if fraction >= 1 else "")

    def fitted(self, fraction: float, text: str) -> str:
        """Bar and text in one line of the terminal: a line that wraps could not be redrawn.

        The width is read each time, because windows are resized. The last column stays free: some terminals wrap
        as soon as it is filled.
        """
        columns = (columns_of(self.stream) or 80) - 1
        text = "".join(character if character.isprintable() else " " for character in text)
        if columns + 1 < NARROW:
            return cut_to(text, columns)
        length = min(BAR, max(SHORTEST_BAR, columns - 1 - width_of(text)))
        return f"{self.bar(fraction, length)} {cut_to(text, columns - length - 1)}"

    @cached_property
    def console(self) -> Console:
        from rich.console import Console  # imported late: most commands show no bar

        return Console(file=self.stream)

    def bar(self, fraction: float, length: int) -> str:
        from rich.progress_bar import ProgressBar

        with self.console.capture() as drawn:
            self.console.print(ProgressBar(total=1.0, completed=fraction, width=length), end="")
        bar = drawn.get().rstrip("\n")
        return bar if "\x1b" in bar else f"{bar:<{length}}"  # without colours the rest of a bar is not drawn


def duration(seconds: float) -> str:
    """4.2 s, 3 min 05 s."""
    if seconds < 59.95:  # what would round to 60.0 s is a minute
        return f"{seconds:.1f} s"
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60:02d} s"

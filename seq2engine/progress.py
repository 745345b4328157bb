"""Progress of long work: the worker reports a stage and how much of it is done; a terminal shows a bar, a log lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

Progress = Callable[[str, float], None]  # (stage, fraction of it that is done)


def silent(stage: str, fraction: float) -> None:
    """Reports nothing."""


class ProgressPrinter:
    """Prints to stderr: one redrawn line per stage with percent and time left, or plain lines when not a terminal."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty()
        self.clock = clock
        self.stage = ""
        self.started = 0.0
        self.shown = 0.0

    def __call__(self, stage: str, fraction: float) -> None:
        now = self.clock()
        if stage != self.stage:
            self.stage, self.started, self.shown = stage, now, 0.0
            if not self.live and fraction < 1:
                self.stream.write(f"{stage} ...\n")
        done = fraction >= 1
        if not done and now - self.shown < (0.1 if self.live else 10.0):
            return
        if not self.live and not done and not self.shown:
            self.shown = now  # the opening line has just been written
            return
        self.shown = now
        self.stream.write(self.line(stage, min(fraction, 1.0), now - self.started))
        self.stream.flush()
        if done:
            self.stage = ""

    def line(self, stage: str, fraction: float, elapsed: float) -> str:
        if fraction >= 1:
            text = f"{stage}: done in {duration(elapsed)}"
        elif fraction > 0:
            text = f"{stage}: {fraction:4.0%}, {duration(elapsed / fraction - elapsed)} left"
        else:
            text = f"{stage} ..."
        if not self.live:
            return text + "\n"
        bar = "█" * round(fraction * 24)
        return f"\r\x1b[K{bar:░<24} {text}" + ("\n" if fraction >= 1 else "")


def duration(seconds: float) -> str:
    """4.2 s, 3 min 05 s."""
    if seconds < 59.95:  # what would round to 60.0 s is a minute
        return f"{seconds:.1f} s"
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60:02d} s"

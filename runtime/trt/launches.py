"""Copies and engine runs that are queued together repeatedly, as a CUDA graph where it pays."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from seq2engine.errors import SessionError

from .device import Device
from .engine import Binding, Engine

log = logging.getLogger("seq2engine")


@dataclass(frozen=True)
class Run:
    """One run of an engine with what it is bound to."""

    engine: Engine
    binding: Binding


Work = Run | Callable[[], None]  # an engine's run, or copies to queue


class Launches:
    """Called once per step. An engine in it keeps its binding until another `Launches` binds something else."""

    def __init__(self, device: Device, work: Sequence[Work]):
        self.device, self.work = device, tuple(work)
        self.runs = [one for one in self.work if isinstance(one, Run)]
        self.key = tuple((run.engine.path, run.binding.key) for run in self.runs)
        self.captures = all(run.engine.captures for run in self.runs)
        self.graph: Callable[[], None] | None = None
        self.captured: list[int] = []  # the engines' changes at the time

    def __call__(self) -> None:
        """Queues everything: a replay of its CUDA graph where there is one."""
        for run in self.runs:
            run.engine.take(run.binding)
        changes = [run.engine.changes for run in self.runs]
        if changes != self.captured:
            self.graph = None  # it is valid only for the contexts' state at its capture
        if self.graph is None and self.captures and all(run.engine.settled for run in self.runs):
            self.graph, self.captured = self.capture(), changes
        if self.graph is not None:
            self.graph()
        else:
            self.launch()

    def launch(self) -> None:
        for one in self.work:
            if isinstance(one, Run):
                one.engine.launch()
            else:
                one()

    def capture(self) -> Callable[[], None] | None:
        """The work as a CUDA graph. If the capture fails, it runs without: slower, but correct."""
        try:
            return self.device.capture(self.launch)
        except SessionError as error:
            path = self.runs[0].engine.path
            log.warning("%s runs without a CUDA graph, which could not be captured: %s", path, error)
            for run in self.runs:
                run.engine.captures = False
            self.captures = False
            return None

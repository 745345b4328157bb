"""The GPU of the TensorRT stand-in: host memory and a stream that behave like a device's, and hold callers to rules.

What is queued runs when it is waited for, and new memory holds NaN, so a missing wait or a buffer reused too early
shows in the results. What a GPU would leave undefined raises `RuleBroken`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 256


class RuleBroken(AssertionError):
    """Something a caller of TensorRT or CUDA must not do, though neither would say so."""


class HostDevice:
    """One stream and its memory, and counts of how often it was waited for, captured and replayed."""

    streams: ClassVar[weakref.WeakValueDictionary[int, HostDevice]] = weakref.WeakValueDictionary()

    def __init__(self, capability: str = "sm89", name: str = "stand-in GPU"):
        self.capability, self.name = capability, name
        self.stream = id(self)
        HostDevice.streams[self.stream] = self
        self.live: dict[int, tuple[int, int]] = {}  # address -> size of device memory, and the number of its allocation
        self.allocations = 0
        self.queue: list[Callable[[], object]] = []
        self.recording: list[Callable[[], object]] | None = None
        self.waits = 0
        self.captures = 0
        self.replays = 0

    def allocate(self, size: int) -> Tensor:
        self.check_not_recording("allocated device memory")
        size = max(size, 1)
        room = np.full(size + ALIGNMENT, 0xFF, dtype=np.uint8)
        memory = room[-room.ctypes.data % ALIGNMENT :][:size]
        address = memory.ctypes.data
        self.allocations += 1
        self.live[address] = (size, self.allocations)
        weakref.finalize(memory, self.live.pop, address).atexit = False
        return torch.from_numpy(memory)

    def staging(self, size: int) -> Tensor:
        self.check_not_recording("allocated staging memory")
        return torch.full((max(size, 1),), 0xFF, dtype=torch.uint8)

    def run(self, work: Callable[[], object]) -> None:
        (self.queue if self.recording is None else self.recording).append(work)

    def synchronize(self) -> None:
        self.check_not_recording("waited for a stream")
        self.waits += 1
        queue, self.queue = self.queue, []
        for work in queue:
            work()

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        self.check_not_recording("began a capture on a stream")
        self.captures += 1
        self.recording = recorded = []
        try:
            launch()
        finally:
            self.recording = None
        return partial(self.replay, recorded)

    def replay(self, recorded: list[Callable[[], object]]) -> None:
        self.replays += 1
        for work in recorded:
            check = getattr(work, "check_replay", None)
            if check is not None:
                check()
            self.run(work)

    def check_not_recording(self, what: str) -> None:
        if self.recording is not None:
            raise RuleBroken(f"{what} that is being captured" if "stream" in what else f"{what} during a capture")

    def check_place(self, name: str, address: int, size: int) -> int:
        """The number of the allocation that these bytes lie in."""
        base = max((start for start in self.live if start <= address), default=0)
        length, number = self.live.get(base, (0, 0))
        if address >= base + length:
            raise RuleBroken(f"{name} is bound to {address:#x}, which is not allocated device memory")
        if address + size > base + length:
            raise RuleBroken(f"{name} needs {size} bytes, its memory has {base + length - address}")
        return number


def host_device(stream: int) -> HostDevice:
    if stream == 0:
        raise RuleBroken("the default stream was used")
    if stream not in HostDevice.streams:
        raise RuleBroken(f"{stream} is not a stream")
    return HostDevice.streams[stream]

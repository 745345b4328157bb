"""The GPU of the TensorRT stand-in: host memory and a stream that behave like a device's, and hold callers to rules.

What is queued runs when it is waited for, and new memory holds NaN, so a missing wait or a buffer reused too early
shows in the results. What a GPU would leave undefined raises `RuleBroken`.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import numpy as np

from seq2engine.runtime.trt.device import Allocation, Memory

ALIGNMENT = 256


class RuleBroken(AssertionError):
    """Something a caller of TensorRT or CUDA must not do, though neither reports it."""


class HostDevice:
    """One stream and its memory, and counts of how often it was waited for, captured and replayed, and of what crossed
    the bus: `sent` and `received` are bytes, counted when a copy runs."""

    streams: ClassVar[weakref.WeakValueDictionary[int, HostDevice]] = weakref.WeakValueDictionary()

    def __init__(self, capability: str = "sm89", name: str = "stand-in GPU"):
        self.capability, self.name = capability, name
        self.stream = id(self)
        HostDevice.streams[self.stream] = self
        self.live: dict[int, tuple[int, int]] = {}  # address -> size of device memory, and the number of its allocation
        self.pinned: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()
        self.allocations = 0
        self.queue: list[Callable[[], object]] = []
        self.recording: list[Callable[[], object]] | None = None
        self.waits = self.captures = self.replays = 0
        self.sent = self.received = 0

    def allocate(self, size: int) -> Memory:
        self.check_not_recording("allocated device memory")
        size = max(size, 1)
        room = np.full(size + ALIGNMENT, 0xFF, dtype=np.uint8)
        address = room.ctypes.data + -room.ctypes.data % ALIGNMENT
        self.allocations += 1
        self.live[address] = (size, self.allocations)
        owner = Allocation()
        owner.room = room  # type: ignore[attr-defined]
        weakref.finalize(owner, self.live.pop, address).atexit = False
        return Memory(owner, address, size)

    def staging(self, size: int) -> np.ndarray:
        self.check_not_recording("allocated staging memory")
        self.allocations += 1
        memory = np.full((max(size, 1),), 0xFF, dtype=np.uint8)
        self.pinned[memory.ctypes.data] = memory
        return memory

    def upload(self, target: Memory, source: np.ndarray) -> None:
        self.check_pinned(source)
        self.transfer(target.address, source.nbytes, source.ctypes.data, source.nbytes, source.nbytes, 1, "sent")

    def download(self, target: np.ndarray, source: Memory, pitch: int = 0) -> None:
        self.check_pinned(target)
        width, height = (target.nbytes, 1) if pitch == 0 else (target.nbytes // len(target), len(target))
        self.transfer(target.ctypes.data, width, source.address, max(pitch, width), width, height, "received")

    def copy(
        self, target: Memory, source: Memory, width: int, height: int = 1, pitches: tuple[int, int] = (0, 0)
    ) -> None:
        to, of = (max(pitch, width) for pitch in pitches)
        if height > 1 and (0 < pitches[0] < width or 0 < pitches[1] < width):
            raise RuleBroken(f"rows of {width} bytes that are {min(pitches)} apart overlap")
        for row in range(height):
            if abs(target.address + row * to - source.address - row * of) < width:
                raise RuleBroken("a copy on the device onto itself")
        self.transfer(target.address, to, source.address, of, width, height, "")

    def transfer(self, target: int, to: int, source: int, of: int, width: int, height: int, counted: str) -> None:
        """A copy of rows `to` and `of` bytes apart. What is device memory must be there now and when it runs."""
        places = [(target, to)] * (counted != "received") + [(source, of)] * (counted != "sent")
        numbers = [self.check_place("a copy", place, pitch * (height - 1) + width) for place, pitch in places]

        def work() -> None:
            now = [self.check_place("a copy", place, pitch * (height - 1) + width) for place, pitch in places]
            if now != numbers:
                raise RuleBroken("memory was freed while a copy of it was queued")
            for row in range(height):
                ctypes.memmove(target + row * to, source + row * of, width)
            if counted:
                setattr(self, counted, getattr(self, counted) + width * height)

        self.run(work)

    def clear(self, target: Memory, width: int, height: int = 1, pitch: int = 0) -> None:
        self.check_place("a memset", target.address, pitch * (height - 1) + width)

        def work() -> None:
            for row in range(height):
                ctypes.memset(target.address + row * pitch, 0, width)

        self.run(work)

    def check_pinned(self, array: np.ndarray) -> None:
        """A copy from or to other memory of the host would make the host wait; it must be in one piece, too."""
        address = array.ctypes.data
        held = [(start, memory.nbytes) for start, memory in self.pinned.items() if start <= address]
        if not any(address + array.nbytes <= start + size for start, size in held) or not array.flags.c_contiguous:
            raise RuleBroken("a copy from or to memory of the host that is not staging memory")

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

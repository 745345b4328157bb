"""The GPU as a TensorRT session needs it.

A session sees a `Device`: its memory, pinned memory of the host, one stream on which copies and launches happen in
order, and a way to record what is queued on it. Nothing here knows what is computed.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from seq2engine.common.cuda_memory import (
    NO_LIBRARY,
    ON_DEVICE,
    OUT_OF_MEMORY,
    TO_DEVICE,
    TO_HOST,
    Cuda,
    CudaError,
    has_driver,
)
from seq2engine.common.tensorrt_module import collector_held
from seq2engine.errors import GraphError, SessionError
from seq2engine.export.artifact.transfers import ALIGNMENT

NO_GPU = (
    "no NVIDIA GPU on this machine, which running a TensorRT engine needs; "
    "use --backend onnxruntime, or copy the bundle to a GPU machine"
)


class Allocation:
    """The owner of a block of device memory, which is freed with the last `Memory` in it."""


@dataclass(frozen=True)
class Memory:
    """Some bytes of device memory. They live as long as any `Memory` of the same allocation."""

    owner: Allocation
    address: int
    size: int

    def part(self, first: int, size: int) -> Memory:
        assert 0 <= first <= first + size <= self.size
        return Memory(self.owner, self.address + first, size)


class Device(Protocol):
    """Work is queued and runs in order: at once, or at the latest when `synchronize` returns.

    So neither the memory that queued work reads nor what it writes may be touched by the host before that.
    """

    stream: int  # the handle TensorRT launches on; never the default stream
    capability: str  # sm89, ...
    name: str

    def allocate(self, size: int) -> Memory:
        """Device memory with arbitrary content, its address a multiple of ALIGNMENT."""

    def staging(self, size: int) -> np.ndarray:
        """uint8 [size] in host memory that the device copies from and to without making the host wait."""

    def upload(self, target: Memory, source: np.ndarray) -> None:
        """Queues a copy of staging memory to the device."""

    def download(self, target: np.ndarray, source: Memory, pitch: int = 0) -> None:
        """Queues a copy to staging memory; with a `pitch`, rows [N, ...] begin that many bytes apart there."""

    def copy(
        self, target: Memory, source: Memory, width: int, height: int = 1, pitches: tuple[int, int] = (0, 0)
    ) -> None:
        """Queues a copy on the device of `height` rows of `width` bytes; `pitches` are the distances of their
        beginnings in target and source. The two sides must not overlap."""

    def clear(self, target: Memory, width: int, height: int = 1, pitch: int = 0) -> None:
        """Queues zeros for `height` rows of `width` bytes that begin `pitch` bytes apart."""

    def synchronize(self) -> None:
        """Waits until everything queued is done."""

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Records what `launch` puts on the stream without running it; the result queues it each time it is called."""


class CudaDevice:
    """The current CUDA device, with a stream of its own. `library` is the CUDA runtime library (None: find it)."""

    def __init__(self, library: Any = None) -> None:
        try:
            self.cuda = Cuda(library)
        except CudaError as error:
            missing = error.status > 0 or (error.status == NO_LIBRARY and has_driver())
            raise SessionError(str(error) if missing else NO_GPU) from error
        self.capability, self.name, self.stream = self.cuda.capability, self.cuda.name, self.cuda.stream

    def allocate(self, size: int) -> Memory:
        with self.one_line():
            address = self.cuda.allocate(size)
        assert address % ALIGNMENT == 0, "cudaMalloc aligns to at least 256 bytes"
        owner = Allocation()
        weakref.finalize(owner, released, self.cuda.free, address).atexit = False
        return Memory(owner, address, max(size, 1))

    def staging(self, size: int) -> np.ndarray:
        size = max(size, 1)
        with self.one_line():
            address = self.cuda.pin(size)
        memory = np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(address)), dtype=np.uint8)
        weakref.finalize(memory, released, self.cuda.unpin, address).atexit = False  # views of it keep it alive
        return memory

    def upload(self, target: Memory, source: np.ndarray) -> None:
        assert source.flags.c_contiguous
        assert source.nbytes <= target.size
        with self.one_line():
            self.cuda.queue_copy(target.address, source.ctypes.data, source.nbytes, TO_DEVICE)

    def download(self, target: np.ndarray, source: Memory, pitch: int = 0) -> None:
        assert target.flags.c_contiguous
        assert target.nbytes <= source.size
        with self.one_line():
            if pitch == 0:
                self.cuda.queue_copy(target.ctypes.data, source.address, target.nbytes, TO_HOST)
            else:
                width = target.nbytes // len(target)
                places = (target.ctypes.data, width, source.address, pitch)
                self.cuda.queue_copy_of_rows(*places, width, len(target), TO_HOST)

    def copy(
        self, target: Memory, source: Memory, width: int, height: int = 1, pitches: tuple[int, int] = (0, 0)
    ) -> None:
        to, of = (max(pitch, width) for pitch in pitches)  # CUDA refuses a pitch below the width, even of one row
        with self.one_line():
            self.cuda.queue_copy_of_rows(target.address, to, source.address, of, width, height, ON_DEVICE)

    def clear(self, target: Memory, width: int, height: int = 1, pitch: int = 0) -> None:
        with self.one_line():
            self.cuda.clear_rows(target.address, pitch, width, height)

    def synchronize(self) -> None:
        with self.one_line():
            self.cuda.wait()

    @collector_held()  # freeing memory would wait for the stream, which ends a capture
    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        with self.one_line():
            self.cuda.begin_capture()
        try:
            launch()
        except BaseException:
            with suppress(CudaError):  # the stream must not stay in capture; the other error names the failure
                self.cuda.destroy_graph(self.cuda.end_capture())
            raise
        with self.one_line():
            graph = self.cuda.end_capture()
        replay = partial(self.replay, graph)
        weakref.finalize(replay, released, self.cuda.destroy_graph, graph).atexit = False
        return replay

    def replay(self, graph: int) -> None:
        with self.one_line():
            self.cuda.launch_graph(graph)

    @contextmanager
    def one_line(self) -> Iterator[None]:
        """What CUDA refuses, as an error of ours."""
        try:
            yield
        except CudaError as error:
            if error.status == OUT_OF_MEMORY:
                raise SessionError(
                    f"{self.name} has no room for what a session needs; free some of its memory, "
                    "or build the engine for smaller ranges with: seq2engine build --batch --beam --source-length"
                ) from error
            raise GraphError(f"{self.name} failed ({error}); open the session again in a new process") from error


def released(release: Callable[[int], None], handle: int) -> None:
    """Releases a CUDA resource. After a failure of the GPU nothing can be released, and nothing needs to be."""
    with suppress(CudaError):
        release(handle)

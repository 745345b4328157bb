"""The CUDA runtime library as ctypes sees it, over the stand-in's device: addresses, status codes, queued copies."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from seq2engine.runtime.trt.device import Allocation, Memory
from support.host_device import HostDevice, RuleBroken

INVALID_VALUE, OUT_OF_MEMORY, INVALID_PITCH = 1, 2, 12
TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3
THREAD_LOCAL = 1


class Cudart:
    """`gpus` and `room` (bytes) play a machine's part. Every function takes and returns what the real one does."""

    def __init__(self, gpus: int = 1, room: int = 1 << 30):
        self.device, self.gpus, self.room = HostDevice(), gpus, room
        self.memory: dict[int, Memory] = {}
        self.pinned: dict[int, np.ndarray] = {}
        self.graphs: dict[int, Callable[[], None]] = {}
        self.streams = 0
        # A plain function: ctypes lets its result type be set, which a method does not.
        self.cudaGetErrorString: Callable[[Any], bytes] = lambda status: b"out of memory" if status.value == 2 else b"?"

    def cudaGetDeviceCount(self, count: Any) -> int:
        count._obj.value = self.gpus
        return 0

    def cudaGetDevice(self, device: Any) -> int:
        device._obj.value = 0
        return 0

    def cudaDeviceGetAttribute(self, value: Any, attribute: ctypes.c_int, device: ctypes.c_int) -> int:
        value._obj.value = {75: 8, 76: 9}[attribute.value]
        return 0

    def cudaDeviceGetPCIBusId(self, text: Any, length: ctypes.c_int, device: ctypes.c_int) -> int:
        text.value = b"0000:01:00.0"
        return 0

    def cudaGetDeviceProperties(self, properties: Any, device: ctypes.c_int) -> int:
        properties.value = b"stand-in GPU"
        return 0

    def cudaRuntimeGetVersion(self, version: Any) -> int:
        version._obj.value = 13000
        return 0

    def cudaDriverGetVersion(self, version: Any) -> int:
        version._obj.value = 13010
        return 0

    def cudaStreamCreateWithFlags(self, stream: Any, flags: ctypes.c_uint) -> int:
        if flags.value != 1:
            raise RuleBroken("a stream that waits for the default stream")
        stream._obj.value = self.device.stream
        self.streams += 1
        return 0

    def cudaStreamDestroy(self, stream: ctypes.c_void_p) -> int:
        if self.device.queue:
            raise RuleBroken("a stream was destroyed with work on it")
        self.streams -= 1
        return 0

    def cudaMalloc(self, address: Any, size: ctypes.c_size_t) -> int:
        if size.value == 0 or sum(memory.size for memory in self.memory.values()) + size.value > self.room:
            return OUT_OF_MEMORY
        memory = self.device.allocate(size.value)
        address._obj.value = memory.address
        self.memory[memory.address] = memory
        return 0

    def cudaFree(self, address: ctypes.c_void_p) -> int:
        return INVALID_VALUE if self.memory.pop(address.value or 0, None) is None else 0

    def cudaHostAlloc(self, address: Any, size: ctypes.c_size_t, flags: ctypes.c_uint) -> int:
        memory = self.device.staging(size.value)
        address._obj.value = memory.ctypes.data
        self.pinned[memory.ctypes.data] = memory
        return 0

    def cudaFreeHost(self, address: ctypes.c_void_p) -> int:
        return INVALID_VALUE if self.pinned.pop(address.value or 0, None) is None else 0

    def cudaMemsetAsync(self, address: Any, value: Any, size: Any, stream: ctypes.c_void_p) -> int:
        return self.cudaMemset2DAsync(address, size, value, size, ctypes.c_size_t(1), stream)

    def cudaMemset2DAsync(self, address: Any, pitch: Any, value: Any, width: Any, height: Any, stream: Any) -> int:
        self.check_stream(stream)
        assert value.value == 0
        self.device.clear(Memory(Allocation(), address.value, 0), width.value, height.value, pitch.value)
        return 0

    def cudaMemcpyAsync(self, target: Any, source: Any, size: Any, kind: ctypes.c_int, stream: Any) -> int:
        return self.cudaMemcpy2DAsync(target, size, source, size, size, ctypes.c_size_t(1), kind, stream)

    def cudaMemcpy2DAsync(
        self, target: Any, to: Any, source: Any, of: Any, width: Any, height: Any, kind: ctypes.c_int, stream: Any
    ) -> int:
        self.check_stream(stream)
        if min(to.value, of.value) < width.value:
            return INVALID_PITCH
        counted = {TO_DEVICE: "sent", TO_HOST: "received", ON_DEVICE: ""}[kind.value]
        places = target.value, to.value, source.value, of.value
        self.device.transfer(*places, width.value, height.value, counted)
        return 0

    def check_stream(self, stream: ctypes.c_void_p) -> None:
        if stream.value != self.device.stream:
            raise RuleBroken("work on a stream that was not created")

    def cudaStreamBeginCapture(self, stream: ctypes.c_void_p, mode: ctypes.c_int) -> int:
        self.check_stream(stream)
        self.device.check_not_recording("began a capture on a stream")
        if mode.value != THREAD_LOCAL:
            raise RuleBroken("a capture that other threads' allocations would end")
        self.device.recording = []
        return 0

    def cudaStreamEndCapture(self, stream: ctypes.c_void_p, graph: Any) -> int:
        self.check_stream(stream)
        assert self.device.recording is not None
        recorded, self.device.recording = self.device.recording, None
        self.device.captures += 1
        graph._obj.value = len(self.graphs) + 1
        self.graphs[graph._obj.value] = partial(self.device.replay, recorded)
        return 0

    def cudaGraphInstantiateWithFlags(self, ready: Any, graph: ctypes.c_void_p, flags: ctypes.c_ulonglong) -> int:
        ready._obj.value = 1000 + (graph.value or 0)
        self.graphs[ready._obj.value] = self.graphs[graph.value or 0]
        return 0

    def cudaGraphDestroy(self, graph: ctypes.c_void_p) -> int:
        self.graphs[graph.value or 0] = gone
        return 0

    def cudaGraphExecDestroy(self, graph: ctypes.c_void_p) -> int:
        self.graphs[graph.value or 0] = gone
        return 0

    def cudaGraphLaunch(self, graph: ctypes.c_void_p, stream: ctypes.c_void_p) -> int:
        self.check_stream(stream)
        self.graphs[graph.value or 0]()
        return 0

    def cudaStreamSynchronize(self, stream: ctypes.c_void_p) -> int:
        self.device.synchronize()
        return 0


def gone() -> None:
    raise RuleBroken("a graph was launched after it had been destroyed")

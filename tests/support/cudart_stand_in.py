"""The CUDA runtime library as ctypes sees it, over the stand-in's device: addresses, status codes, queued copies."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from torch import Tensor

from support.host_device import HostDevice, RuleBroken

INVALID_VALUE, OUT_OF_MEMORY = 1, 2
TO_DEVICE, TO_HOST = 1, 2


class Cudart:
    """`gpus` and `room` (bytes) play a machine's part. Every function takes and returns what the real one does."""

    def __init__(self, gpus: int = 1, room: int = 1 << 30):
        self.device, self.gpus, self.room = HostDevice(), gpus, room
        self.memory: dict[int, Tensor] = {}
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
        if size.value == 0 or sum(t.numel() for t in self.memory.values()) + size.value > self.room:
            return OUT_OF_MEMORY
        memory = self.device.allocate(size.value)
        address._obj.value = memory.data_ptr()
        self.memory[memory.data_ptr()] = memory
        return 0

    def cudaFree(self, address: ctypes.c_void_p) -> int:
        return INVALID_VALUE if self.memory.pop(address.value or 0, None) is None else 0

    def cudaMemsetAsync(self, address: Any, value: Any, size: Any, stream: ctypes.c_void_p) -> int:
        self.queued(stream, lambda: ctypes.memset(address.value, value.value, size.value))
        self.device.check_place("a memset", address.value, size.value)
        return 0

    def cudaMemcpyAsync(self, target: Any, source: Any, size: Any, kind: ctypes.c_int, stream: Any) -> int:
        self.device.check_place("a copy", (target if kind.value == TO_DEVICE else source).value, size.value)
        self.queued(stream, lambda: ctypes.memmove(target.value, source.value, size.value))
        return 0

    def queued(self, stream: ctypes.c_void_p, work: Callable[[], object]) -> None:
        if stream.value != self.device.stream:
            raise RuleBroken("work on a stream that was not created")
        self.device.run(work)

    def cudaStreamSynchronize(self, stream: ctypes.c_void_p) -> int:
        self.device.synchronize()
        return 0

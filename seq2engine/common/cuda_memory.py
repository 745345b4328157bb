"""Device memory, copies, a stream and CUDA graphs by the CUDA runtime library itself: needs numpy and nothing else.

The library comes with TensorRT's own wheels (nvidia-cuda-runtime) or with a CUDA installation. Only functions are used
that CUDA 12 and 13 both have, with the same arguments. This file also goes into the GPU package as it is.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3  # cudaMemcpyKind
NON_BLOCKING = 1  # a stream that does not wait for the default stream
THREAD_LOCAL = 1  # cudaStreamCaptureMode: other threads may go on allocating during a capture
OUT_OF_MEMORY = 2  # cudaError
NO_LIBRARY = -1  # beside CUDA's own numbers
PROPERTIES = 1 << 16  # bytes, more than cudaDeviceProp has in any version; it begins with the device's name
MAJOR, MINOR = 75, 76  # cudaDeviceAttr: the compute capability
BUS_ID = 32  # characters of a PCI bus id, and more


class CudaError(Exception):
    """What CUDA refused, in one line; `status` is its own number for it."""

    def __init__(self, message: str, status: int = 0):
        super().__init__(message)
        self.status = status


def library_names() -> Iterator[str]:
    """Where the CUDA runtime library may be, the likeliest first."""
    for folder in map(Path, sys.path):
        for pattern in ("lib/libcudart.so.*", "bin/cudart64_*.dll", "bin/*/cudart64_*.dll"):
            yield from sorted((str(path) for path in folder.glob(f"nvidia/*/{pattern}")), reverse=True)
    if (found := ctypes.util.find_library("cudart")) is not None:
        yield found
    for version in (13, 12):
        yield f"libcudart.so.{version}"
        yield f"cudart64_{version}.dll"
    yield "/usr/local/cuda/lib64/libcudart.so"


def load_cudart() -> Any:
    for name in library_names():
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue  # not there: the next place is tried, and when none is left, that is reported below
    raise CudaError("no CUDA runtime library found; install it with: pip install nvidia-cuda-runtime", NO_LIBRARY)


def has_driver() -> bool:
    """Whether an NVIDIA driver is installed."""
    return any(ctypes.util.find_library(name) is not None for name in ("cuda", "nvcuda"))


class Cuda:
    """One device, one stream, and the memory that was taken from it. Leaving the block gives all of it back."""

    def __init__(self, library: Any = None):
        self.library = load_cudart() if library is None else library
        self.library.cudaGetErrorString.restype = ctypes.c_char_p
        self.taken: set[int] = set()
        count = ctypes.c_int()
        if self.library.cudaGetDeviceCount(ctypes.byref(count)) != 0 or count.value == 0:
            raise CudaError("no NVIDIA GPU on this machine; run this on the one the engines are for")
        device = ctypes.c_int()
        self.call("cudaGetDevice", ctypes.byref(device))
        parts = [ctypes.c_int(), ctypes.c_int()]
        for part, attribute in zip(parts, (MAJOR, MINOR), strict=True):
            self.call("cudaDeviceGetAttribute", ctypes.byref(part), ctypes.c_int(attribute), device)
        self.capability = "sm{}{}".format(*(part.value for part in parts))
        properties = ctypes.create_string_buffer(PROPERTIES)
        self.call("cudaGetDeviceProperties", properties, device)
        self.name = properties.value.decode()
        bus = ctypes.create_string_buffer(BUS_ID)
        self.call("cudaDeviceGetPCIBusId", bus, ctypes.c_int(BUS_ID), device)
        self.bus_id = bus.value.decode()  # by which nvidia-smi knows it, whatever CUDA numbers it
        stream = ctypes.c_void_p()
        self.call("cudaStreamCreateWithFlags", ctypes.byref(stream), ctypes.c_uint(NON_BLOCKING))
        self.stream = int(stream.value or 0)

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(*arguments)
        if status != 0:
            reason = self.library.cudaGetErrorString(ctypes.c_int(status))
            text = reason.decode() if isinstance(reason, bytes) else str(reason)
            raise CudaError(f"{name} failed: {text} (CUDA error {status})", status)

    def allocate(self, size: int) -> int:
        """The address of new device memory, a multiple of 256; also nothing has an address."""
        address = ctypes.c_void_p()
        self.call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(max(size, 1)))
        self.taken.add(int(address.value or 0))
        return int(address.value or 0)

    def free(self, address: int) -> None:
        self.wait()
        self.taken.remove(address)
        self.call("cudaFree", ctypes.c_void_p(address))

    def pin(self, size: int) -> int:
        """The address of new host memory that the device copies from and to without making the host wait."""
        address = ctypes.c_void_p()
        self.call("cudaHostAlloc", ctypes.byref(address), ctypes.c_size_t(max(size, 1)), ctypes.c_uint(0))
        return int(address.value or 0)

    def unpin(self, address: int) -> None:
        self.wait()
        self.call("cudaFreeHost", ctypes.c_void_p(address))

    def versions(self) -> dict[str, str]:
        """Of the CUDA runtime library, and of the newest CUDA that the driver knows."""
        found = {}
        for name, what in (("CUDA runtime", "Runtime"), ("CUDA of the driver", "Driver")):
            number = ctypes.c_int()
            self.call(f"cuda{what}GetVersion", ctypes.byref(number))
            found[name] = f"{number.value // 1000}.{number.value % 1000 // 10}"
        return found

    def clear(self, address: int, size: int) -> None:
        self.clear_rows(address, 0, size, 1)

    def clear_rows(self, address: int, pitch: int, width: int, height: int) -> None:
        """Queues zeros: `height` rows of `width` bytes that begin `pitch` bytes apart."""
        stream = ctypes.c_void_p(self.stream)
        if height == 1:
            self.call("cudaMemsetAsync", ctypes.c_void_p(address), ctypes.c_int(0), ctypes.c_size_t(width), stream)
        else:
            extent = ctypes.c_size_t(width), ctypes.c_size_t(height)
            place = ctypes.c_void_p(address), ctypes.c_size_t(pitch)
            self.call("cudaMemset2DAsync", *place, ctypes.c_int(0), *extent, stream)

    def queue_copy(self, target: int, source: int, size: int, kind: int) -> None:
        """The memory on both sides must stay until the stream was waited for; that of the host must be pinned."""
        places = ctypes.c_void_p(target), ctypes.c_void_p(source)
        stream = ctypes.c_void_p(self.stream)
        self.call("cudaMemcpyAsync", *places, ctypes.c_size_t(size), ctypes.c_int(kind), stream)

    def queue_copy_of_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int, kind: int
    ) -> None:
        """The same of `height` rows of `width` bytes, which begin a pitch apart on either side."""
        to = ctypes.c_void_p(target), ctypes.c_size_t(target_pitch)
        of = ctypes.c_void_p(source), ctypes.c_size_t(source_pitch)
        extent = ctypes.c_size_t(width), ctypes.c_size_t(height)
        self.call("cudaMemcpy2DAsync", *to, *of, *extent, ctypes.c_int(kind), ctypes.c_void_p(self.stream))

    def begin_capture(self) -> None:
        self.call("cudaStreamBeginCapture", ctypes.c_void_p(self.stream), ctypes.c_int(THREAD_LOCAL))

    def end_capture(self) -> int:
        """The CUDA graph of what was queued since the capture began, ready to be launched."""
        graph, ready = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cudaStreamEndCapture", ctypes.c_void_p(self.stream), ctypes.byref(graph))
        try:
            flags = ctypes.c_ulonglong(0)
            self.call("cudaGraphInstantiateWithFlags", ctypes.byref(ready), graph, flags)
        finally:
            self.call("cudaGraphDestroy", graph)
        return int(ready.value or 0)

    def launch_graph(self, graph: int) -> None:
        self.call("cudaGraphLaunch", ctypes.c_void_p(graph), ctypes.c_void_p(self.stream))

    def destroy_graph(self, graph: int) -> None:
        self.call("cudaGraphExecDestroy", ctypes.c_void_p(graph))

    def upload(self, array: np.ndarray, address: int) -> None:
        self.copy(address, array.ctypes.data, array.nbytes, TO_DEVICE)

    def download(self, address: int, array: np.ndarray) -> None:
        self.copy(array.ctypes.data, address, array.nbytes, TO_HOST)

    def copy(self, target: int, source: int, size: int, kind: int) -> None:
        """Done when this returns: numpy's memory is not pinned, and may be gone afterwards."""
        self.queue_copy(target, source, size, kind)
        self.wait()

    def wait(self) -> None:
        self.call("cudaStreamSynchronize", ctypes.c_void_p(self.stream))

    def release(self) -> None:
        """Gives back all memory that was taken so far."""
        self.wait()
        while self.taken:
            self.call("cudaFree", ctypes.c_void_p(self.taken.pop()))

    def __enter__(self) -> Cuda:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.stream:
            self.release()
            self.call("cudaStreamDestroy", ctypes.c_void_p(self.stream))
            self.stream = 0

"""The GPU as a TensorRT session needs it.

A session sees a `Device`: memory as torch tensors, one stream on which everything happens in order, and a way to
record what is launched on it. Nothing here knows what is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from seq2engine.errors import SessionError

ALIGNMENT = 256  # bytes: TensorRT's rule for the address of every input and output
NO_GPU = (
    "no NVIDIA GPU on this machine, which running a TensorRT engine needs; "
    "use --backend onnxruntime, or copy the bundle to a GPU machine"
)


class Device(Protocol):
    """Work is queued and runs in order: at once, or at the latest when `synchronize` returns.

    So neither the memory that queued work reads nor what it writes may be touched by the host before that.
    """

    stream: int  # the handle TensorRT launches on; never the default stream
    capability: str  # sm89, ...
    name: str

    def allocate(self, size: int) -> Tensor:
        """uint8 [size] in device memory with arbitrary content, its address a multiple of ALIGNMENT."""

    def staging(self, size: int) -> Tensor:
        """uint8 [size] in host memory that the device copies from and to without making the host wait."""

    def run(self, work: Callable[[], object]) -> None:
        """Queues torch work on device and staging memory."""

    def synchronize(self) -> None:
        """Waits until everything queued is done."""

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Records what `launch` puts on the stream without running it; the result queues it each time it is called."""


class CudaDevice:
    """The current CUDA device, with a stream of its own."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise SessionError(NO_GPU)
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.capability = "sm{}{}".format(*torch.cuda.get_device_capability(self.device))
        self.name = torch.cuda.get_device_name(self.device)
        self.torch_stream = torch.cuda.Stream(self.device)
        self.stream = int(self.torch_stream.cuda_stream)

    def allocate(self, size: int) -> Tensor:
        # On our stream, so that the allocator hands the memory to nobody else while our work is still queued.
        with self.on_our_stream():
            memory = torch.empty(max(size, 1), dtype=torch.uint8, device=self.device)
        assert memory.data_ptr() % ALIGNMENT == 0, "the CUDA allocator of torch aligns to 512 bytes"
        return memory

    def staging(self, size: int) -> Tensor:
        return torch.empty(max(size, 1), dtype=torch.uint8, pin_memory=True)

    def run(self, work: Callable[[], object]) -> None:
        with self.on_our_stream():
            work()

    @contextmanager
    def on_our_stream(self) -> Iterator[None]:
        try:
            with torch.cuda.stream(self.torch_stream):
                yield
        except torch.OutOfMemoryError as error:
            raise SessionError(
                f"{self.name} has no room for what a session needs; free some of its memory, "
                "or build the engine for smaller ranges with: seq2engine build --batch --beam --source-length"
            ) from error

    def synchronize(self) -> None:
        try:
            self.torch_stream.synchronize()
        except RuntimeError as error:  # how torch reports that queued work failed
            reason = str(error).splitlines()[0]
            raise SessionError(f"{self.name} failed ({reason}); open the session again in a new process") from error

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.torch_stream):
            # Other threads may go on allocating meanwhile: only this one is held to the rules of a capture.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
        return lambda: self.run(graph.replay)

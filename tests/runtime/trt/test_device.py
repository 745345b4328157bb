"""The CUDA device as a session sees it, over just enough of torch.cuda."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from seq2engine.errors import SessionError
from seq2engine.runtime.trt import device as trt_device
from seq2engine.runtime.trt.device import CudaDevice


class FakeCuda:
    """Just enough of torch.cuda to see what a CudaDevice asks of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.calls: list[str] = []
        self.current: object = None
        self.stream = SimpleNamespace(cuda_stream=4711, synchronize=lambda: self.calls.append("synchronize"))
        for name, value in {
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "get_device_capability": lambda device: (12, 0),
            "get_device_name": lambda device: "a GPU",
            "Stream": lambda device: self.stream,
            "stream": self.on,
            "CUDAGraph": lambda: self,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(trt_device, "ALIGNMENT", 1)

    @contextlib.contextmanager
    def on(self, stream: object) -> Any:
        self.current = stream
        yield
        self.current = None

    def note(self, call: str) -> None:
        assert self.current is self.stream, f"{call} on the default stream"
        self.calls.append(call)

    def capture_begin(self, capture_error_mode: str) -> None:
        self.note(f"begin {capture_error_mode}")

    def capture_end(self) -> None:
        self.note("end")

    def replay(self) -> None:
        self.note("replay")


def test_the_cuda_device_works_on_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    device = CudaDevice()
    assert (device.capability, device.name, device.stream) == ("sm120", "a GPU", 4711)
    device.run(lambda: cuda.note("work"))
    replay = device.capture(lambda: cuda.note("launch"))
    replay()
    replay()
    device.synchronize()
    assert cuda.calls == ["work", "begin thread_local", "launch", "end", "replay", "replay", "synchronize"]

    def fail() -> None:
        raise SessionError("no launch")

    with pytest.raises(SessionError, match="no launch"):
        device.capture(fail)
    assert cuda.calls[-2:] == ["begin thread_local", "end"]  # the stream does not stay in capture


def test_the_cuda_device_reports_failures_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    device = CudaDevice()
    device.device = torch.device("cpu")
    assert device.allocate(0).numel() == 1
    assert device.allocate(300).dtype == torch.uint8

    def no_room(*sizes: int, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    def failed() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be")

    monkeypatch.setattr(torch, "empty", no_room)
    with pytest.raises(SessionError, match=r"^a GPU has no room for what a session needs; free some of its"):
        device.allocate(5_000_000)
    with pytest.raises(SessionError, match=r"^a GPU has no room"):
        device.run(no_room)
    cuda.stream.synchronize = failed
    with pytest.raises(SessionError, match=r"^a GPU failed \(CUDA error: an illegal memory access was encountered\)"):
        device.synchronize()

"""The CUDA device as a session sees it, over a stand-in of the CUDA runtime library."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import numpy as np
import pytest
from support.cudart_stand_in import Cudart
from support.host_device import RuleBroken
from support.stand_in_engines import MODEL, SOURCES, copied, put_engines, reference_greedy, session_over
from support.trt_steps import LENGTH

from seq2engine.common import cuda_memory
from seq2engine.errors import SessionError
from seq2engine.runtime.generate import generate
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.trt import device as trt_device
from seq2engine.runtime.trt.device import NO_GPU, CudaDevice


def test_copies_rows_and_graphs() -> None:
    cudart = Cudart()
    device = CudaDevice(cudart)
    assert (device.capability, device.name, device.stream) == ("sm89", "stand-in GPU", cudart.device.stream)
    host, memory, beside = device.staging(1024), device.allocate(1024), device.allocate(2048)

    def step() -> None:
        device.upload(memory, host)
        device.clear(memory.part(0, 128), 16, 4, 32)
        device.copy(beside, memory, 64, 16, (128, 64))
        device.download(host.reshape(16, 64), beside, 128)

    host[:] = 7
    step()
    assert (host == 7).all()  # nothing has run yet
    device.synchronize()
    expected = np.full(1024, 7, dtype=np.uint8)
    expected[:128].reshape(4, 32)[:, :16] = 0
    assert np.array_equal(host, expected)
    host[:] = 9
    replay = device.capture(step)
    device.synchronize()
    assert (host == 9).all()
    replay()
    replay()
    device.synchronize()
    assert np.array_equal(host, np.where(expected == 7, 9, 0))
    assert (cudart.device.captures, cudart.device.replays) == (1, 2)


def test_memory_is_freed_with_its_last_reference() -> None:
    cudart = Cudart()
    device = CudaDevice(cudart)
    memory, staging = device.allocate(512), device.staging(512)
    part, view = memory.part(256, 8), staging[8:].view(np.int64)
    del memory, staging
    gc.collect()
    assert len(cudart.memory) == len(cudart.pinned) == 1
    del part, view
    gc.collect()
    assert not cudart.memory
    assert not cudart.pinned


def test_a_graph_ends_with_what_replays_it() -> None:
    cudart = Cudart()
    device = CudaDevice(cudart)
    replay = device.capture(lambda: None)
    graph = max(cudart.graphs)
    del replay
    with pytest.raises(RuleBroken, match="after it had been destroyed"):
        cudart.graphs[graph]()


def test_a_capture_that_fails_ends() -> None:
    cudart = Cudart()
    device = CudaDevice(cudart)

    def fail() -> None:
        raise SessionError("no launch")

    with pytest.raises(SessionError, match="no launch"):
        device.capture(fail)
    assert cudart.device.recording is None


def test_failures_are_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = Cudart(room=1000)
    device = CudaDevice(cudart)
    assert device.allocate(0).size == 1
    with pytest.raises(SessionError, match=r"^stand-in GPU has no room for what a session needs; free some of its"):
        device.allocate(5_000_000)
    cudart.cudaStreamSynchronize = lambda stream: 700  # type: ignore[method-assign]
    with pytest.raises(SessionError, match=r"^stand-in GPU failed \(cudaStreamSynchronize failed: .* error 700\)"):
        device.synchronize()


def test_no_gpu_and_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SessionError) as caught:
        CudaDevice(Cudart(gpus=0))
    assert str(caught.value) == NO_GPU
    monkeypatch.setattr(cuda_memory, "library_names", lambda: iter(["/nowhere/libcudart.so.13"]))
    for driver, message in ((False, NO_GPU), (True, "no CUDA runtime library found; install it with: pip install ")):
        monkeypatch.setattr(trt_device, "has_driver", lambda driver=driver: driver)
        with pytest.raises(SessionError) as caught:
            CudaDevice()
        assert str(caught.value).startswith(message)


@pytest.mark.parametrize("flavour", ["tensorrt", "tensorrt_rtx"])
def test_a_session_over_the_library_itself(flavour: str, bundles: dict[str, Path], tmp_path: Path) -> None:
    """The same code as on a GPU, down to the calls of the CUDA runtime library."""
    cudart = Cudart()
    folder = put_engines(copied(bundles["static"], tmp_path / "run7"), flavour=flavour)
    with session_over(folder, device=CudaDevice(cudart)) as session:
        found = generate(session, SOURCES, SearchOptions(max_length=LENGTH))
    assert [list(row[0].tokens) for row in found] == [reference_greedy(MODEL, source, LENGTH) for source in SOURCES]
    assert (cudart.device.captures > 0) == (flavour == "tensorrt")
    del session
    gc.collect()
    assert not cudart.memory


def test_the_name_is_at_the_front_of_the_properties() -> None:
    """Whatever a version of CUDA has behind it."""
    buffer = ctypes.create_string_buffer(cuda_memory.PROPERTIES)
    Cudart().cudaGetDeviceProperties(buffer, ctypes.c_int(0))
    assert buffer.value == b"stand-in GPU"

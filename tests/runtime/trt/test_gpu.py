"""What only a GPU can tell: engines built and run on the one that is here. `pytest -m gpu` runs these."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.builds import build_engines
from support.stand_in_engines import FOUR_BEAMS, MODEL, ONE_BEAM, SOURCES, THREE_BEAMS
from support.trt_steps import FLAVOURS, FORMS

from seq2engine.errors import SessionError
from seq2engine.export.artifact.passport import PASSPORT, read_passport
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.packaging.package import PackageOptions, package_from_bundle
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.ort.providers import check_provider
from seq2engine.runtime.parity.options import ParityOptions
from seq2engine.runtime.parity.run import parity_of
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.torch_session import TorchSession
from seq2engine.runtime.trt.device import CudaDevice
from seq2engine.runtime.trt.session import TrtSession

pytestmark = pytest.mark.gpu


def targets_here(flavour: str) -> list[str]:
    pytest.importorskip(flavour, reason=f"needs {flavour}: pip install {flavour}")
    return [CudaDevice().capability] if flavour == "tensorrt_rtx" else []


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("form", FORMS)
def test_a_real_engine_decodes_as_pytorch_does(form: str, flavour: str, tmp_path: Path) -> None:
    targets = targets_here(flavour)
    bundle = onnx_from_model(MODEL, tmp_path / "run7", ("fp32",), form)
    for ranges in (ONE_BEAM, THREE_BEAMS, FOUR_BEAMS):
        build_engines(bundle, targets, ranges, "fp32", flavour=flavour)
    for folder in sorted((bundle.root / "engines").iterdir()):
        beam = read_passport(folder / PASSPORT).ranges.beam.max
        options = SearchOptions(max_length=12, beam=beam)
        for _ in range(2):  # the second time with the runtime cache of the first
            with open_session(bundle, "tensorrt", "fp32", engine=folder.name) as session:
                found = [row[0].tokens for row in generate(session, SOURCES, options)]
                again = [row[0].tokens for row in generate(session, SOURCES, options)]
            assert found == again == [row[0].tokens for row in generate(TorchSession(MODEL), SOURCES, options)]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_rtx_keeps_its_kernels_and_tensorrt_its_graph(flavour: str, tmp_path: Path) -> None:
    targets = targets_here(flavour)
    bundle = onnx_from_model(MODEL, tmp_path / "run7", ("fp32",))
    build_engines(bundle, targets, THREE_BEAMS, "fp32", flavour=flavour)
    with open_session(bundle, "tensorrt", "fp32") as session:
        assert isinstance(session, TrtSession)
        generate(session, SOURCES[:1], SearchOptions(max_length=12, beam=3))
        step = session.engines["decoder_step"]
        assert (step.graph is not None) == (flavour == "tensorrt"), "captured by hand, or by TensorRT-RTX itself"
    kept = list((bundle.root / "engines").rglob("*.runtime_cache"))
    assert len(kept) == (2 if flavour == "tensorrt_rtx" else 0)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_parity(flavour: str, precision: str, tmp_path: Path) -> None:
    targets = targets_here(flavour)
    bundle = onnx_from_model(MODEL, tmp_path / "run7", (precision,))
    ranges = dataclasses.replace(FOUR_BEAMS, batch=dataclasses.replace(FOUR_BEAMS.batch, max=32))
    build_engines(bundle, targets, ranges, precision, flavour=flavour)
    result = parity_of(bundle, "tensorrt", precision, options=ParityOptions(beam=4, max_length=12, count=32))
    assert result, result.reason


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_package_is_verified_by_its_own_scripts(flavour: str, tmp_path: Path) -> None:
    targets = targets_here(flavour)
    bundle = onnx_from_model(MODEL, tmp_path / "run7", ("fp32",))
    package_from_bundle(bundle, tmp_path / "out", PackageOptions("fp32", ranges=FOUR_BEAMS))
    target = ["--gpu", *targets] if targets else []
    build = ["build.py", "--flavour", flavour, *target]
    for command in (build, ["verify.py"], ["run_all.py", "--rounds", "3"], ["decode.py", "5 17 250"]):
        done = subprocess.run([sys.executable, *command], cwd=tmp_path / "out", capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("provider", ["cuda", "tensorrt", "nv_tensorrt_rtx"])
def test_providers_of_onnxruntime(provider: str, tmp_path: Path) -> None:
    try:
        check_provider(provider)
    except SessionError as error:
        pytest.skip(str(error))
    bundle = onnx_from_model(MODEL, tmp_path / "run7", ("fp32",))
    options = SearchOptions(max_length=12, beam=2)
    with open_session(bundle, provider=provider) as session, TorchSession(MODEL) as torch_session:
        found, expected = (generate(each, SOURCES, options) for each in (session, torch_session))
    assert [row[0].tokens for row in found] == [row[0].tokens for row in expected]


def test_the_device_keeps_its_promises() -> None:
    """Alignment, order on one stream, copies through pinned memory, and capture and replay at fixed addresses."""
    device = CudaDevice()
    host, memory, beside = device.staging(1024), device.allocate(1024), device.allocate(2048)
    assert memory.address % 256 == beside.address % 256 == 0

    def step() -> None:
        device.upload(memory, host)
        device.clear(memory.part(0, 128), 16, 4, 32)
        device.copy(beside, memory, 64, 16, (128, 64))
        device.download(host.reshape(16, 64), beside, 128)

    host[:] = 7
    step()
    device.synchronize()
    expected = np.full(1024, 7, dtype=np.uint8)
    expected[:128].reshape(4, 32)[:, :16] = 0
    assert np.array_equal(host, expected)
    host[:] = 9
    replay = device.capture(step)
    device.synchronize()
    assert (host == 9).all(), "a capture runs nothing"
    for _ in range(3):
        replay()
    device.synchronize()
    assert np.array_equal(host, np.where(expected == 7, 9, 0))

"""The check that a GPU machine runs, over the stand-in: its stages, its report, and a machine without a GPU."""

from __future__ import annotations

import html
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.host_device import HostDevice
from support.stand_in_engines import BEAMS, MODEL, put_engines
from support.tensorrt_stand_in import tensorrt_stand_in

from seq2engine.benchmarks.cases import Case
from seq2engine.benchmarks.options import BenchOptions
from seq2engine.benchmarks.runner import bench_bundle
from seq2engine.commands.pipeline import gpu_check as check
from seq2engine.errors import BuildError, SessionError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.artifact.passport import PASSPORT, Passport, read_passport
from seq2engine.export.artifact.profiles import ShapeRanges
from seq2engine.export.contract import PRECISIONS
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.runtime.trt import session as trt_session

ROOT = Path(__file__).parents[3]
REPORTED = ((1, "next_greedy"), (4, "candidates"))
SMALL_TESTS = """
import pytest
@pytest.mark.gpu
def test_right(): pass
@pytest.mark.gpu
def test_left(): pytest.skip("needs two GPUs")
def test_elsewhere(): assert False
"""


def build(bundle: Bundle, targets: Sequence[str], ranges: ShapeRanges, precision: str, flavour: str) -> Passport:
    if precision == "fp16":
        raise BuildError("no room\nfor a build")
    folder = put_engines(bundle, ranges, precision, flavour, targets=tuple(targets))
    return read_passport(folder / PASSPORT)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[check.Stage]]:
    """A machine with a GPU and TensorRT-RTX, both the stand-in's, and the check on it."""
    tests = tmp_path / "small"
    tests.mkdir()
    (tests / "test_small.py").write_text(SMALL_TESTS)
    (tests / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs one\n")
    for module in (trt_session, check):
        monkeypatch.setattr(module, "load_tensorrt", tensorrt_stand_in)
    monkeypatch.setattr(trt_session, "CudaDevice", HostDevice)
    given = {"tests": tests, "rounds": 1, "count": 2, "rehearsal": True, "build": build}
    return lambda **changed: check.gpu_check(tmp_path / "out", HostDevice(), ["tensorrt_rtx"], **{**given, **changed})


@pytest.mark.slow
def test_one_report_of_everything(tmp_path: Path, machine: Callable[..., list[check.Stage]]) -> None:
    """A build that fails takes its parity, its times and the benchmark with it; the rest is reported nevertheless."""
    stages = machine(precisions=("fp32", "fp16", "int8"))
    assert [(stage.name, stage.passed) for stage in stages] == [
        ("machine", True),
        ("tensorrt_rtx: export", True),
        ("tensorrt_rtx fp32: build", True),
        ("tensorrt_rtx fp32: parity", True),
        ("tensorrt_rtx fp32: time of a token", True),
        ("tensorrt_rtx fp16: build", False),
        ("tensorrt_rtx fp16: parity", False),
        ("tensorrt_rtx fp16: time of a token", False),
        ("tensorrt_rtx int8: build", True),
        ("tensorrt_rtx int8: parity", True),
        ("tensorrt_rtx int8: time of a token", True),
        ("tensorrt_rtx: benchmark", False),
        ("tests that need a GPU", True),
    ]
    page = (tmp_path / "out" / "gpu-check.html").read_text()
    values = json.loads((tmp_path / "out" / "gpu-check.json").read_text())
    assert values["passed"] is False
    assert values["rehearsal"] is True
    assert values["stages"][0]["values"]["capability"] == "sm89"
    assert values["stages"][3]["values"]["verdict"] is True
    assert stages[5].text == "BuildError: no room for a build"
    assert "no fp16 engine in" in stages[6].text
    assert stages[12].text == "passed: test_small.test_right\nskipped: test_small.test_left: needs two GPUs"
    times = {(one["case"], one["reduction"]): one for one in values["stages"][4]["values"]}
    assert len(times) == 3 + 3 + 2  # with one beam also ahead of the host
    greedy, beams = (times[f"batch 32, beam {beam}, source 9, output 9", name] for beam, name in REPORTED)
    assert (greedy["sent"], greedy["received"]) == (0, 640)
    assert beams["received"] < 20_000
    for one in times.values():
        assert one["seconds"] > 0
        assert 0 < one["host"] <= 1
    page = html.unescape(page)
    for word in ("launch-bound", "to host", "host's part"):
        assert word in page
    for stage in stages:
        assert f"<h2>{stage.name}</h2>" in page
    assert "13 stages, 4 failed: tensorrt_rtx fp16: build" in page
    assert check.REHEARSAL in page
    assert "<script" not in page
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"gpu-check.html", "gpu-check.json", "tensorrt_rtx"}


@pytest.mark.slow
def test_a_killed_check_goes_on(
    tmp_path: Path, machine: Callable[..., list[check.Stage]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has passed is not done again, what has failed is."""
    for name in ("parity_stage", "steps_stage", "bench_stage"):  # which take their time, and do in the test above
        monkeypatch.setattr(check, name, lambda *given: check.Stage("", True, "quick"))
    builds: list[str] = []

    def killed_in_int8(bundle: Bundle, targets: Any, ranges: Any, precision: str, flavour: str) -> Passport:
        builds.append(precision)
        if precision == "int8" and builds.count("int8") == 1:
            raise KeyboardInterrupt
        if precision == "fp16" and builds.count("fp16") == 1:
            raise BuildError("no room")
        folder = put_engines(bundle, ranges, precision, flavour, targets=tuple(targets))
        return read_passport(folder / PASSPORT)

    wanted = {"precisions": ("fp32", "fp16", "int8"), "build": killed_in_int8, "tests": None}
    with pytest.raises(KeyboardInterrupt):
        machine(**wanted)
    assert (tmp_path / "out" / "stages").is_dir()
    assert not (tmp_path / "out" / "gpu-check.html").exists()
    stages = machine(**wanted)
    assert builds == ["fp32", "fp16", "int8", "fp16", "int8"]
    assert all(stage.passed for stage in stages), [stage.text for stage in stages if not stage.passed]
    assert stages[2].values["precision"] == "fp32"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"gpu-check.html", "gpu-check.json", "tensorrt_rtx"}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_check_that_was_killed_by_the_system_goes_on(tmp_path: Path) -> None:
    """The process is gone in the middle of a build: nothing was tidied up."""
    command = [sys.executable, str(ROOT / "tests" / "support" / "rehearsed_check.py"), str(tmp_path)]
    first, second = (subprocess.run(command, capture_output=True, text=True) for _ in range(2))
    assert first.returncode == -signal.SIGKILL, first.stderr
    assert "tensorrt_rtx fp16: build ..." in first.stdout
    assert second.returncode == 0, second.stderr
    assert "tensorrt_rtx fp32: build: passed before" in second.stdout
    assert "tensorrt_rtx fp16: build ..." in second.stdout
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {"gpu-check.html", "gpu-check.json", "tensorrt_rtx"}
    assert json.loads((out / "gpu-check.json").read_text())["passed"] is True
    names = {path.name for path in (out / "tensorrt_rtx" / "engines").iterdir()}
    assert names == {"sm86-sm89-fp32", "sm86-sm89-fp16"}


@pytest.mark.parametrize("error", [ValueError("no such\nthing"), OSError(28, "No space left on device"), MemoryError()])
def test_whatever_a_stage_raises_is_reported(error: Exception) -> None:
    def stage() -> check.Stage:
        raise error

    found = check.attempt("one", stage)
    assert not found.passed
    assert found.text.startswith(f"{type(error).__name__}: ")
    assert "\n" not in found.text


def test_stages_of_another_machine_are_forgotten(tmp_path: Path) -> None:
    runs: list[str] = []

    def stage() -> check.Stage:
        runs.append("")
        return check.Stage("", True, "text", [1])

    for facts, expected in (("a", 1), ("a", 1), ("b", 2)):
        found = check.PassedStages(tmp_path / "stages", facts).stage("one: two", stage)
        assert (found.name, found.values, len(runs)) == ("one: two", [1], expected)


@pytest.mark.parametrize(
    ("capability", "flavour", "left_out"),
    [
        ("sm75", "tensorrt_rtx", {"fp32", "bf16", "int4", "fp8"}),
        ("sm75", "tensorrt", {"bf16", "int4", "fp8"}),
        ("sm86", "tensorrt_rtx", {"fp8"}),
        ("sm89", "tensorrt_rtx", set()),
        ("sm90", "tensorrt", set()),
    ],
)
def test_what_a_gpu_cannot_run_is_not_asked_of_it(capability: str, flavour: str, left_out: set[str]) -> None:
    assert PRECISIONS.keys() - check.precisions_on(capability, flavour, tuple(PRECISIONS)) == {
        *left_out,
        "w8a8",
    }  # which is for CPUs


@pytest.mark.parametrize("form", ["static", "growing"])
def test_tensorrt_is_an_arm_of_the_benchmark(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trt_session, "load_tensorrt", tensorrt_stand_in)
    monkeypatch.setattr(trt_session, "CudaDevice", HostDevice)
    bundle = onnx_from_model(MODEL, tmp_path / "run7", ("fp32",), form)
    put_engines(bundle, BEAMS)
    result = bench_bundle(
        bundle,
        BenchOptions(("onnxruntime", "tensorrt"), cases=[Case("two", 2, 2, 5, 4)], rounds=2, threads=1, quick=True),
    )
    assert list(result.arms) == ["onnxruntime fp32", "tensorrt fp32"]
    assert result.arms["tensorrt fp32"].bytes == sum(f.stat().st_size for f in bundle.root.glob("engines/*/*.engine"))
    assert result.cases[0].arms["tensorrt fp32"].equal == 2


@pytest.mark.slow
def test_tests_that_fail_or_are_none(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs one\n")
    file = tmp_path / "tests" / "test_small.py"
    file.write_text("import pytest\n@pytest.mark.gpu\ndef test_wrong(): assert 1 == 2\n")
    failed = check.tests_stage(tmp_path / "tests", tmp_path)
    assert not failed.passed
    assert failed.text.startswith("FAILED: test_small.test_wrong: assert 1 == 2")
    file.write_text("")
    assert not check.tests_stage(tmp_path / "tests", tmp_path).passed


def test_the_tests_are_those_of_the_repository() -> None:
    assert check.TESTS == ROOT / "tests"
    assert check.TESTS.is_dir()


def test_a_machine_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([str(tmp_path / "out")]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("error: no NVIDIA GPU on this machine")
    assert errors.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has a GPU")
def test_make_reports_it_before_it_makes_anything(tmp_path: Path) -> None:
    shutil.copyfile(ROOT / "Makefile", tmp_path / "Makefile")
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of `make test`
    done = subprocess.run(["make", "gpu-check"], cwd=tmp_path, capture_output=True, text=True, env=outside)
    assert done.returncode != 0
    assert done.stdout == "error: no NVIDIA GPU on this machine, which gpu-check needs; run it on one that has\n"
    assert [path.name for path in tmp_path.iterdir()] == ["Makefile"]


def test_no_tensorrt_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(flavour: str) -> Any:
        raise SessionError(f"{flavour} cannot be imported")

    monkeypatch.setattr(check, "load_tensorrt", nothing)
    with pytest.raises(SessionError, match="tensorrt cannot be imported; tensorrt_rtx cannot be imported"):
        check.installed()
    monkeypatch.setattr(check, "load_tensorrt", tensorrt_stand_in)
    assert check.installed() == ["tensorrt", "tensorrt_rtx"]

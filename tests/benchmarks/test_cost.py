"""Memory and build time of an arm, measured in separate processes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from seq2engine.benchmarks import runner
from seq2engine.benchmarks.cases import Case
from seq2engine.benchmarks.ceiling import Ceiling
from seq2engine.benchmarks.cost import export_seconds, peak_of_arm
from seq2engine.benchmarks.options import BenchOptions, plan_from_options
from seq2engine.benchmarks.peers.worker import peak_bytes
from seq2engine.benchmarks.report.page import bench_html, bench_table
from seq2engine.benchmarks.result import Arm
from seq2engine.benchmarks.runner import bench_bundle
from seq2engine.errors import SessionError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS

SMALL = dataclasses.replace(
    PRESETS["tiny"], encoder_layers=1, decoder_layers=1, d_model=16, heads=2, d_ff=16, source_vocab=64, target_vocab=64
)
CASE = Case("greedy", batch=2, beam=1, source=4, target=3)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return onnx_from_model(random_model(SMALL), tmp_path_factory.mktemp("footprint") / "small", ("fp32",))


def peak_of(bundle: Bundle, precision: str) -> int:
    plan = plan_from_options(bundle, BenchOptions(["onnxruntime"], [precision], [CASE], threads=1))
    return peak_of_arm(plan, Arm("onnxruntime", precision, 0, 0.0), None)


@pytest.mark.slow
def test_memory_is_that_of_the_arm_alone(bundle: Bundle) -> None:
    """What this process holds is not charged to the one it starts, as getrusage would."""
    held = np.ones(120_000_000)  # 960 MB
    mine = peak_bytes()
    assert mine > held.nbytes
    assert 1e7 < peak_of(bundle, "fp32") < mine / 2


def test_a_process_that_fails_is_reported_with_its_error(bundle: Bundle) -> None:
    with pytest.raises(SessionError, match=r"onnxruntime int8 failed in the process that .*holds no int8 graphs"):
        peak_of(bundle, "int8")


def test_a_system_that_does_not_tell_is_asked_another_way(tmp_path: Path) -> None:
    assert peak_bytes(tmp_path / "none") > 1e7


def test_an_export_is_timed_with_its_calibration(tmp_path: Path) -> None:
    """Without calibration a model with RMS norms is not exported in fp16 at all."""
    model = random_model(dataclasses.replace(SMALL, norm="pre", norm_kind="rms", positions="relative"), 3)
    assert export_seconds(onnx_from_model(model, tmp_path / "b", ("fp32",)), "fp16") > 0


def test_a_run_that_is_not_quick_has_it_all(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "ceiling_of", lambda threads: Ceiling(1e10, 1e11))
    result = bench_bundle(
        bundle,
        BenchOptions(["onnxruntime"], cases=[CASE], rounds=1, threads=1, quick=False, export_times=True),
    )
    arm = result.arms["onnxruntime fp32"]
    assert arm.peak_bytes is not None
    assert arm.export_seconds is not None
    assert arm.export_seconds > 0
    assert arm.build_seconds is None
    (case,) = result.cases
    fraction = result.of_ceiling(case, "onnxruntime fp32", "end_to_end")
    assert fraction is not None
    assert fraction > 0
    for text in (bench_table(result), bench_html(result)):
        assert "ceiling with 1 thread: 10.0 GB/s read from memory, 100 GFLOP/s" in text
        assert f"{arm.peak_bytes / 1e6:.0f} MB" in text

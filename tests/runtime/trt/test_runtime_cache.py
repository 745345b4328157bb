"""Kernels that TensorRT-RTX compiled, kept beside the engine."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.stand_in_engines import (
    ONE_BEAM,
    copied,
    put_engines,
    session_over,
)
from support.tensorrt_stand_in import tensorrt_stand_in

from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.artifact.passport import PASSPORT
from seq2engine.runtime.encoder_inputs import padded


@pytest.fixture
def bundle(bundles: dict[str, Path], tmp_path: Path) -> Bundle:
    return copied(bundles["static"], tmp_path / "run7")


def one_step(session: Any) -> None:
    state = session.encode(*padded([[5, 6, 7]], 0))
    session.reserve(state, ONE_BEAM.slots)
    zero = np.zeros(1, dtype=np.int64)
    session.step(state, np.full((1, 1), 7), zero, zero, np.ones((1, 1, ONE_BEAM.slots), dtype=bool))


def test_compiled_kernels_are_kept_beside_the_engine(bundle: Bundle) -> None:
    folder = put_engines(bundle)
    trt = tensorrt_stand_in()
    with session_over(folder, trt) as session:
        first = (folder / "decoder_step.runtime_cache").read_bytes()  # there as soon as the engine is open
        one_step(session)
    assert len((folder / "decoder_step.runtime_cache").read_bytes()) > len(first)
    used = 2  # encoder and decoder step: once more for the shapes
    assert len(trt.compiled) == len(session.passport.engines) + used

    again = tensorrt_stand_in()
    before = (folder / "encoder.runtime_cache").stat().st_mtime_ns
    with session_over(folder, again) as session:
        one_step(session)
    assert not again.compiled
    assert (folder / "encoder.runtime_cache").stat().st_mtime_ns == before

    elsewhere = tensorrt_stand_in()
    elsewhere.environment = "sm120 driver 590"
    with session_over(folder, elsewhere) as session:
        one_step(session)
    assert len(elsewhere.compiled) == len(session.passport.engines) + used
    assert (folder / "encoder.runtime_cache").read_bytes().startswith(b"sm120 driver 590")


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"sm89 driver 580\n[", b"\xff\xfe"])
def test_a_damaged_cache_is_reported_and_written_again(
    damage: bytes, bundle: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    folder = put_engines(bundle)
    with session_over(folder) as session:
        one_step(session)
    path = folder / "decoder_step.runtime_cache"
    whole = path.read_bytes()
    path.write_bytes(damage)
    trt = tensorrt_stand_in()
    with session_over(folder, trt) as session, caplog.at_level(logging.WARNING):
        one_step(session)
    assert len(trt.compiled) == 2  # of one engine: the other's cache is whole
    assert path.read_bytes() == whole
    assert not [file for file in folder.iterdir() if file.name.startswith(".")]
    logged = [record.message for record in caplog.records]
    line = f"{path} is damaged or of another GPU or driver: it is ignored and written again"
    assert logged == ([line] if damage else [])


def test_a_bundle_that_cannot_be_written_to_costs_only_the_cache(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @contextlib.contextmanager
    def read_only(path: Path) -> Any:
        raise OSError(30, "Read-only file system")
        yield

    monkeypatch.setattr("seq2engine.runtime.trt.engine.new_file", read_only)
    folder = put_engines(bundle)
    with session_over(folder) as session, caplog.at_level(logging.WARNING):
        one_step(session)
    assert "encoder.runtime_cache not written (Read-only file system): the next start compiles" in caplog.text


def test_tensorrt_without_runtime_cache_writes_none(bundle: Bundle) -> None:
    folder = put_engines(bundle, flavour="tensorrt")
    with session_over(folder) as session:
        one_step(session)
    engines = {f"{name}.engine" for name in session.passport.engines}
    assert {path.name for path in folder.iterdir()} == {*engines, PASSPORT}

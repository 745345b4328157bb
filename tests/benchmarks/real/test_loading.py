"""Loads are measured in processes of their own, each arm with a cache of its own."""

from __future__ import annotations

import pytest

from seq2engine.benchmarks.real.loading import Arm, Load, arms_of, cache_of, measured_load, table
from seq2engine.benchmarks.real.loading_process import MARKS, SENTENCES
from seq2engine.errors import SessionError, UsageError
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("loading")
    onnx_from_model(random_model(PRESETS["tiny"], seed=0), found / "bundle", ("fp32",))
    (found / "pairs.tsv").write_text("5 6 7\ta reference\n" * SENTENCES, encoding="utf-8")
    return found


@pytest.mark.slow
def test_stages_follow_one_another(folder):
    arm = Arm("onnxruntime fp32", "seq2engine", "fp32", folder / "bundle")
    first, warm, cold = (measured_load(arm, condition, folder, 1) for condition in arm.conditions)
    assert tuple(first.seconds) == tuple(warm.seconds) == MARKS
    assert tuple(cold.seconds) == MARKS[:-1]
    for load in (first, warm, cold):
        for values in (load.seconds, load.cpu, load.peak):
            assert sorted(values.values()) == list(values.values())
        assert load.text == first.text
    assert (cache_of(arm, folder) / "seq2engine" / "graphs").is_dir()
    assert "onnxruntime fp32  warm" in table([first, warm, cold])


def test_times_are_counted_from_load():
    load = Load("arm", "warm", {"import": 1.0, "first token": 1.5}, {"import": 0.5, "first token": 0.75}, {}, "")
    assert load.since_import("first token") == (0.5, 0.25)


def test_what_is_missing_is_named(folder):
    with pytest.raises(UsageError, match="has no hf; make it with: make measure-real"):
        arms_of(folder)
    arm = Arm("onnxruntime w8a8", "seq2engine", "w8a8", folder / "bundle")
    with pytest.raises(SessionError, match=r"onnxruntime w8a8 failed in its process: .* holds no w8a8 graphs"):
        measured_load(arm, "first", folder, 1)

"""The speed of a machine's threads: measured where they are free, kept, and derived otherwise."""

from __future__ import annotations

import pytest

from seq2engine.common.measured import Measured
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime import machine_speed as module
from seq2engine.runtime.generate import generate
from seq2engine.runtime.machine_speed import machine_speed, measured_speed, sensible_threads, speed_from_value
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.threads import MachineSpeed, derived_speed

FOUND = MachineSpeed(2, (30e9, 48e9), (64e9, 100e9), (54e9, 108e9), (16e-6, 10e-6), (15e-6, 7.7e-6))
VALUE = {"memory": [30e9, 48e9], "cached": [64e9, 100e9], "products": [54e9, 108e9], "chained": [16e-6, 10e-6]} | {
    "fused": [15e-6, 7.7e-6]
}


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "user_cache", lambda: tmp_path)
    machine_speed.cache_clear()
    yield tmp_path
    machine_speed.cache_clear()


def test_it_is_measured_once_for_a_machine(monkeypatch, folder):
    monkeypatch.setattr(module, "measured_speed", lambda threads: FOUND)
    assert machine_speed(2) == FOUND
    machine_speed.cache_clear()
    monkeypatch.setattr(module, "measured_speed", lambda threads: pytest.fail("it is kept"))
    assert machine_speed(2) == FOUND
    assert Measured(folder / "measured", {"what": "threads", "threads": 2, "passes": module.PASSES}).value() == VALUE


def test_a_busy_machine_keeps_nothing(monkeypatch, folder):
    monkeypatch.setattr(module, "measured_speed", lambda threads: None)
    assert machine_speed(2) == derived_speed(2)
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    "damage",
    [
        {"memory": [1.0]},
        {"cached": [0, 1]},
        {"products": "fast"},
        {"chained": [-1, 1]},
        {"chained": None},
        {"fused": [0, 1]},
        {"memory": 3},
    ],
)
def test_damaged_values_are_measured_again(damage):
    assert speed_from_value(2, VALUE) == FOUND
    assert speed_from_value(2, {**VALUE, **damage}) is None
    assert speed_from_value(2, {}) is None


@pytest.mark.parametrize("cores", [1, 2])
def test_two_cores_are_not_measured(monkeypatch, cores):
    monkeypatch.setattr(module, "usable_cores", lambda: cores)
    monkeypatch.setattr(module, "measured_speed", lambda threads: pytest.fail("there is nothing to choose"))
    assert sensible_threads(PRESETS["base"]) == cores


def test_it_is_measured_when_a_batch_depends_on_it(monkeypatch, tmp_path):
    """Not for single sentences of a large model: they have all threads in any case."""
    measured = []
    monkeypatch.setattr(module, "measured_speed", lambda threads: measured.append(threads) or FOUND)
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    monkeypatch.setattr(module, "is_small", lambda config: False)
    bundle = onnx_from_model(random_model("tiny", seed=5), tmp_path / "bundle", ("fp32", "w8a8"))
    for precision in ("fp32", "w8a8"):
        with open_session(bundle, precision=precision, threads=2) as session:
            generate(session, [[5, 6, 7]], SearchOptions(max_length=4, beam=4))
            assert not measured
            generate(session, [[5, 6, 7], [8, 9]], SearchOptions(max_length=4))
            assert measured == [2]
        measured.clear()
        machine_speed.cache_clear()
        for path in (tmp_path / "measured").iterdir():
            path.unlink()


def test_the_best_of_all_passes_counts(monkeypatch):
    """A pass beside another process counts for what it found faster than the others; one that found no second core, not
    at all."""
    busy = MachineSpeed(2, (27e9, 26e9), (63e9, 110e9), (50e9, 90e9), (18e-6, 17e-6), (15e-6, 7.7e-6))
    passes = iter([busy, None, FOUND, None])
    monkeypatch.setattr(module, "speed_of_pass", lambda threads: next(passes))
    assert measured_speed(2) == MachineSpeed(
        2, (30e9, 48e9), (64e9, 110e9), (54e9, 108e9), (16e-6, 10e-6), (15e-6, 7.7e-6)
    )
    monkeypatch.setattr(module, "speed_of_pass", lambda threads: None)
    assert measured_speed(2) is None


def test_a_pass_that_disturbs_one_thread_does_not_make_sharing_seem_free(monkeypatch):
    """What sharing costs is a difference: in that pass it is 0.5 us, but neither of its times is the shortest."""
    disturbed = MachineSpeed(2, (30e9, 48e9), (64e9, 100e9), (54e9, 108e9), (21e-6, 11e-6), (15e-6, 7.7e-6))
    passes = iter([FOUND, disturbed])
    monkeypatch.setattr(module, "speed_of_pass", lambda threads: next(passes))
    found = measured_speed(2)
    assert found is not None
    assert found.region() == FOUND.region() == pytest.approx(2e-6)
    assert disturbed.region() == pytest.approx(0.5e-6)


def test_passes_end_when_none_finds_more(monkeypatch):
    slow = MachineSpeed(2, (20e9, 40e9), (60e9, 100e9), (54e9, 108e9), (16e-6, 11e-6), (15e-6, 7.7e-6))
    passes = iter([slow, FOUND, FOUND])
    monkeypatch.setattr(module, "speed_of_pass", lambda threads: next(passes))
    assert measured_speed(2) == FOUND
    assert next(passes, None) is None


def test_the_measurement_finds_positive_numbers(monkeypatch):
    for name in ("SCALES", "READS"):
        monkeypatch.setattr(module, name, 0.0)  # however busy this machine is
    monkeypatch.setattr(module, "LARGE", 1 << 20)
    monkeypatch.setattr(module, "RUNS", 2)
    found = measured_speed(2)
    assert found is not None
    assert min(*found.memory, *found.cached, *found.products, *found.chained, *found.fused) > 0
    assert min(found.region(), found.region(fused=True)) >= 0

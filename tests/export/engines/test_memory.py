"""The peak of some work, measured in a process of its own; free memory of the machine or its container."""

from __future__ import annotations

import subprocess
import sys

import pytest

from seq2engine.export.engines import memory
from seq2engine.export.engines.memory import RESET

MEASURED = """
from seq2engine.export.engines.memory import peak_memory
earlier = b"1" * (96 << 20)  # a peak that is not of the work
del earlier
with peak_memory() as peak:
    work = b"1" * (48 << 20)
    del work
print(peak.bytes)
with peak_memory() as peak:
    pass
print(peak.bytes)
"""
COUNTED = 1 << 20  # bytes: the kernel adds up pages in batches of 64 a CPU, and Python takes 256 kB at a time


@pytest.mark.skipif(not RESET.exists(), reason="known on Linux only")
def test_the_peak_is_that_of_the_work_alone():
    done = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True)
    work, nothing = map(int, done.stdout.split())
    assert abs(work - (48 << 20)) <= COUNTED
    assert nothing <= COUNTED


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(None, 4096 * 1024), ("max\n", 4096 * 1024), ("1000000\n", 10**6), ("99999999\n", 4096 * 1024)],
)
def test_a_container_has_less(tmp_path, monkeypatch, limit, expected):
    machine, container = tmp_path / "meminfo", tmp_path / "memory.max"
    machine.write_text("MemTotal:  8192 kB\nMemAvailable:  4096 kB\n")
    if limit is not None:
        container.write_text(limit)
    monkeypatch.setattr(memory, "MACHINE", machine)
    monkeypatch.setattr(memory, "CONTAINER", container)
    assert memory.available_memory() == expected

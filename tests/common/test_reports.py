"""Where reports go: dated names that never meet, `--out`, and a place that cannot be written to."""

from __future__ import annotations

import os
import re
from datetime import datetime

import pytest

from seq2engine.common.reports import latest_report, report_files
from seq2engine.errors import BundleError

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


def test_a_reports_folder_that_is_a_link_is_not_written_through(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "reports").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleError, match="reports is a link, and nothing is written through links"):
        report_files(tmp_path, "bench")


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


def rows_of(page):
    cells = (
        r'<a href="([^"]*)">([^<]*)</a>.*?</td><td[^>]*><span class="short">([^<]*)</span></td>(?:<td[^>]*>(.*?)</td>)?'
    )
    return re.findall(cells, page)


def test_an_index_links_all_reports_newest_first(tmp_path):
    data = ['{"verdict": true, "reason": "all <equal>"}', '{"verdict": false, "reason": "x"}', '{"cases": [1, 2]}']
    for number, (kind, values) in enumerate(zip(("parity", "attention", "bench"), data, strict=True)):
        files = report_files(tmp_path, kind, "a b", now=NOON)
        files.write("page", values)
        os.utime(files.page, (1e9 + number, 1e9 + number))
    report_files(tmp_path, "inspect", now=NOON).write("page", '{"damage": []}')
    page = (tmp_path / "reports" / "index.html").read_text(encoding="utf-8")
    found = rows_of(page)
    assert [row[0] for row in found] == [
        "inspect-20260504-123001.html",
        "bench-a-b-20260504-123001.html",
        "attention-a-b-20260504-123001.html",
        "parity-a-b-20260504-123001.html",
    ]
    assert [row[1] for row in found] == ["inspect", "bench-a-b", "attention-a-b", "parity-a-b"]
    assert ["badge good" in row[3] for row in found] == [False, False, False, True]
    assert ["badge bad" in row[3] for row in found] == [False, False, True, False]
    for words in ("all &lt;equal&gt;", "2 cases", "all files are there", f"Reports of {tmp_path.name}", "4 reports"):
        assert words in page


def test_an_index_shows_what_a_precision_costs(tmp_path):
    report_files(tmp_path, "parity").write(
        "page", '{"verdict": true, "reason": "faithful", "cost_line": "1 of 4 equal"}'
    )
    assert "faithful. 1 of 4 equal" in (tmp_path / "reports" / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("data", ["", "[1]", "null", '{"verdict": 7, "reason": [], "damage": 3}', "{" * 10, "\udcff"])
def test_data_without_a_verdict_is_accepted(tmp_path, data):
    folder = tmp_path / "reports"
    folder.mkdir()
    (folder / "mine.html").write_text("page")
    (folder / "mine.json").write_bytes(data.encode("utf-8", "surrogateescape"))
    files = report_files(tmp_path, "bench", now=NOON)
    files.write("page", data.encode("utf-8", "replace").decode())
    assert [row[1] for row in rows_of((folder / "index.html").read_text())] == ["bench", "mine"]


def test_an_index_that_cannot_be_written_leaves_the_report(tmp_path):
    (tmp_path / "reports" / "index.html" / "folder").mkdir(parents=True)
    files = report_files(tmp_path, "bench", now=NOON)
    files.write("page", "{}")
    assert files.page.read_text() == "page"
    assert (tmp_path / "reports" / "index.html").is_dir()


def test_reports_elsewhere_have_no_index(tmp_path):
    report_files(tmp_path, "bench", out=tmp_path / "a").write("page", "{}")
    assert not (tmp_path / "a" / "index.html").exists()

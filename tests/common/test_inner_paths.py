"""A path that a file names stays inside its folder, and nothing is written through a planted link."""

from __future__ import annotations

from pathlib import Path

import pytest

from seq2engine.common.inner_paths import path_inside, place_inside
from seq2engine.errors import BundleError


@pytest.mark.parametrize(
    ("named", "problem"),
    [
        ("", "lies outside"),
        (".", "lies outside"),
        ("/etc/passwd", "lies outside"),
        ("a/../../b", "lies outside"),
        ("a\0b", "is not text that a path can be"),
        ("\ud800", "is not text that a path can be"),
        ("a" * 256, "is too long for a path"),
        ("a/" * 600, "is too long for a path"),
    ],
)
def test_a_path_that_is_none(named: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=problem):
        path_inside(tmp_path, named)


def test_links(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").write_text("")
    (root / "inside").symlink_to("file")
    (root / "outside").symlink_to(tmp_path)
    (root / "loop").symlink_to("loop")
    assert path_inside(root, "inside") == (root / "file").resolve()
    with pytest.raises(ValueError, match="'outside/x' lies outside"):
        path_inside(root, "outside/x")
    assert not path_inside(root, "loop").is_file()


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "reports").symlink_to(tmp_path / "elsewhere")
    assert place_inside(tmp_path, "engines", "a") == tmp_path / "engines" / "a"
    with pytest.raises(BundleError, match="reports is a link, and nothing is written through links"):
        place_inside(tmp_path, "reports", "a.html")

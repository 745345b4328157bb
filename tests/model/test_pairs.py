"""Pairs of lines from a file: what ends a line, and what does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from seq2engine.errors import RequestError
from seq2engine.model.pairs import read_pairs


def test_only_a_newline_ends_a_line(tmp_path):
    """U+2028, U+0085 and a form feed are text; a carriage return before the newline and a mark at the start are not."""
    path = tmp_path / "pairs.tsv"
    path.write_bytes("\ufeffa\u2028b\tA\x0cB\r\nc\u0085\tC\r\n".encode())
    assert read_pairs(path) == [("a\u2028b", "A\x0cB"), ("c\u0085", "C")]


def test_a_last_line_needs_no_newline(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_bytes(b"a\tA\nb\tB")
    assert read_pairs(path) == [("a", "A"), ("b", "B")]


@pytest.mark.parametrize("folder", [".", "/", ".."])
def test_a_folder_without_a_name_is_no_data(folder):
    with pytest.raises(RequestError, match="expected a TSV of source and target, or two files"):
        read_pairs(Path(folder))

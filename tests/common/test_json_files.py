"""One reader for JSON: what is no file, too large, too deep or of the wrong type is a ValueError in plain words."""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seq2engine.common.json_files import (
    fields_from_json,
    parse_json,
    read_json,
    read_object,
    read_text,
    typed_from_json,
)


@dataclass(frozen=True)
class Inner:
    name: str
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Outer:
    count: int
    ratio: float
    inner: Inner
    pair: tuple[int, float]
    by_name: dict[str, Inner] = field(default_factory=dict)
    end: int | None = None
    mode: bool | str = False
    anything: Any = None


RIGHT = {
    "count": 3,
    "ratio": 1,
    "inner": {"name": "a", "sizes": [1, 2]},
    "pair": [1, 0.5],
    "by_name": {"x": {"name": "b"}},
    "end": None,
    "mode": "never",
    "anything": [{}],
}


def test_a_right_value_becomes_its_dataclass() -> None:
    made = typed_from_json(Outer, RIGHT)
    assert made == Outer(3, 1.0, Inner("a", (1, 2)), (1, 0.5), {"x": Inner("b")}, None, "never", [{}])
    assert isinstance(made.ratio, float)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"count": "3"}, "count is '3', expected an integer"),
        ({"count": True}, "count is True, expected an integer"),
        ({"ratio": float("nan")}, "ratio is nan, expected a number"),
        ({"inner": None}, "inner is None, expected an object"),
        ({"inner": {"name": 3}}, "inner.name is 3, expected text"),
        ({"inner": {}}, "missing field inner.name"),
        ({"inner": {"name": "\ud800"}}, r"inner.name is '\ud800', expected text"),
        ({"inner": {"name": "a\0"}}, r"inner.name is 'a\x00', expected text"),
        ({"inner": {"name": "a", "sizes": [1, "x"]}}, "inner.sizes[1] is 'x', expected an integer"),
        ({"inner": {"name": "a", "sizes": 3}}, "inner.sizes is 3, expected a list"),
        ({"pair": [1]}, "pair has 1 values, expected 2"),
        ({"by_name": {"x": 3}}, "by_name.x is 3, expected an object"),
        ({"end": "x"}, "end is 'x', expected an integer or null"),
        ({"mode": 3}, "mode is 3, expected true or false or text"),
        ({"new": 1}, "unknown field new"),
        ({"count": "x" * 100}, f"count is '{'x' * 59}..., expected an integer"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}$"):
        typed_from_json(Outer, {**RIGHT, **change})


def test_all_problems_come_in_one_error() -> None:
    with pytest.raises(ValueError, match="unknown field new; missing field inner; count is 'x'") as caught:
        typed_from_json(Outer, {"count": "x", "ratio": 1, "pair": [1, 2], "new": 0})
    assert str(caught.value).count(";") == 2


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*RIGHT, "name", "x"]), inner),
    max_leaves=12,
)


@given(values)
def test_whatever_is_given_is_taken_or_refused_in_words(value: Any) -> None:
    """Any other exception than a ValueError fails here."""
    with contextlib.suppress(ValueError):
        assert isinstance(typed_from_json(Outer, value), Outer)


@pytest.mark.parametrize("depth", [5_000, 200_000])
def test_deep_nesting_is_refused(depth: int) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * depth + "]" * depth)


def test_a_long_integer_is_refused() -> None:
    with pytest.raises(ValueError, match="5,000 digits, expected at most 40"):
        parse_json("9" * 5_000)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"a": ["[" * 500, "{" * 500, '"' * 300, "\\" * 301, '\\"[' * 300]}),
        "[" + "[]," * 500 + "[]]",
        "[" * 100 + "]" * 100,
    ],
)
def test_brackets_in_text_and_beside_one_another_are_no_nesting(text: str) -> None:
    assert parse_json(text) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": NaN}', "NaN is no JSON number"),
        ('{"a": -Infinity}', "-Infinity is no JSON number"),
        ('{"a": 1, "a": 2}', "the name 'a' occurs twice"),
        ('["\\ud800"]', r"half of a surrogate pair"),
        (b"\xff{}", "not UTF-8 text"),
        ("[1", "not JSON: it is truncated"),
        ("[1\n}", "not JSON: Expecting ',' delimiter, line 2, column 1"),
    ],
)
def test_what_is_no_json_is_refused(text: bytes | str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_json(text)


def test_a_whole_surrogate_pair_is_a_character() -> None:
    assert parse_json('["\\ud83d\\ude00"]') == ["\U0001f600"]


def test_reports_may_hold_what_is_no_number() -> None:
    assert parse_json("[Infinity]", finite=False) == [float("inf")]


def test_long_digits_in_a_text_are_no_integer() -> None:
    assert parse_json(f'["{"9" * 5000}", 1]') == ["9" * 5000, 1]


def test_fields_by_name() -> None:
    kinds = {"beam": int, "prefix": tuple[int, ...]}
    assert fields_from_json(kinds, {"prefix": [1, 2]}) == {"prefix": (1, 2)}
    with pytest.raises(ValueError, match="unknown field x; beam is None, expected an integer"):
        fields_from_json(kinds, {"beam": None, "x": 1})
    with pytest.raises(ValueError, match=r"it is \[\], expected an object"):
        fields_from_json(kinds, [])


def test_a_file_of_an_object_or_of_text(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("[]")
    assert read_text(tmp_path / "a") == "[]"
    with pytest.raises(ValueError, match="expected an object"):
        read_object(tmp_path / "a")


def test_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(RIGHT))
    assert read_json(path) == RIGHT


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a regular file"):
        read_json(tmp_path / "pipe")


def test_a_folder_and_a_loop_of_links_are_errors_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError, match="symbolic links"):
        read_json(tmp_path / "loop")
    with pytest.raises((OSError, ValueError)):
        read_json(tmp_path)


def test_a_large_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[" + "1," * 100 + "1]")
    with pytest.raises(ValueError, match="203 bytes, expected at most 100"):
        read_json(path, largest=100)

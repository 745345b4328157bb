"""Bytes to lines: where a line ends, what is wrong with it, and that no line waits for a window to fill."""

from __future__ import annotations

import threading
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seq2engine.runtime.text import lines as lines_module
from seq2engine.runtime.text.lines import Line, line_from_bytes, lines_from_chunks, windows_of


def texts_of(*chunks):
    return [line.text for line in lines_from_chunks(chunks)]


def chunks_of(data, size):
    return [data[start : start + size] for start in range(0, len(data), size)]


@given(st.lists(st.text(st.characters(blacklist_characters="\n", blacklist_categories=["Cs"]))), st.integers(1, 40))
def test_only_a_newline_ends_a_line_however_the_bytes_arrive(texts, size):
    data = "".join(f"{text}\n" for text in texts).encode()
    found = list(lines_from_chunks(chunks_of(data, size)))
    expected = [text.removesuffix("\r") for text in texts]
    if expected:
        expected[0] = expected[0].removeprefix("\ufeff")
    assert [line.text for line in found] == expected
    assert [line.number for line in found] == list(range(1, len(texts) + 1))
    assert all(line.error is None for line in found)
    assert not found or found[-1].end == len(data)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a\n\nb\n", ["a", "", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"a\nb", ["a", "b"]),
        (b"a\r", ["a"]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", ["a", "\ufeffb"]),
        (b"\xef\xbb\xbf", [""]),
        (b"\0a\0\n", ["\0a\0"]),
        ("a\u2028b\u0085c\x0cd\x1ce\rf\n".encode(), ["a\u2028b\u0085c\x0cd\x1ce\rf"]),
    ],
)
def test_line_ends(data, expected):
    assert texts_of(data) == expected
    assert texts_of(*chunks_of(data, 1)) == expected


def test_what_is_no_utf_8_is_an_error_of_its_line():
    found = list(lines_from_chunks([b"ok\nab\xff\n\xe2\x82\nfine"]))
    assert [line.text for line in found] == ["ok", "", "", "fine"]
    assert found[1].error == "byte 3 (0xff) is not UTF-8; save the input as UTF-8"
    assert "byte 1 (0xe2)" in found[2].error
    assert line_from_bytes(1, "ab".encode("utf-16")).error.startswith("byte 1 (0xff)")


def test_a_line_without_end_is_an_error_and_does_not_stay_in_memory(monkeypatch):
    monkeypatch.setattr(lines_module, "LONGEST", 10)
    found = list(lines_from_chunks([b"0123456789\n", *[b"x" * 7] * 100, b"\nafter\n"]))
    assert [line.text for line in found] == ["0123456789", "", "after"]
    assert found[1].error == "more than 10 bytes; shorten it"
    assert found[-1].end == 11 + 700 + 7


@pytest.mark.parametrize("total", [0, 1, 7, 8, 9, 50])
def test_windows_hold_every_line_once_and_in_order(total):
    windows = list(windows_of([Line(number) for number in range(total)], 8))
    assert [line.number for window in windows for line in window] == list(range(total))
    assert all(1 <= len(window) <= 8 for window in windows)


def test_a_fast_source_fills_its_windows():
    windows = windows_of(map(Line, count()), 64)
    next(windows)  # while it is worked on, the next one fills
    wait_for_reader(windows)
    assert len(next(windows)) == 64
    windows.close()


def wait_for_reader(windows):
    arrivals = windows.gi_frame.f_locals["arrivals"]
    with arrivals.changed:
        assert arrivals.changed.wait_for(lambda: len(arrivals.waiting) == arrivals.most, 10)


def test_a_slow_source_does_not_delay_others():
    more = threading.Event()

    def slow():
        yield Line(1)
        yield Line(2)
        assert more.wait(10)
        yield Line(3)

    windows = windows_of(slow(), 1000)
    first = next(windows)
    assert [line.number for line in first + (next(windows) if len(first) < 2 else [])] == [1, 2]
    more.set()
    assert [line.number for line in next(windows)] == [3]
    assert list(windows) == []


def test_a_failing_source_fails_after_the_lines_before_it():
    def failing():
        yield Line(1)
        raise OSError("gone")

    windows = windows_of(failing(), 8)
    assert next(windows) == [Line(1)]
    with pytest.raises(OSError, match="gone"):
        next(windows)


def test_windows_that_are_given_up_end_their_thread():
    windows = windows_of(map(Line, count()), 4)
    next(windows)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "lines"]
    windows.close()
    thread.join(10)
    assert not thread.is_alive()

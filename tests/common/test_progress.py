"""Progress as a log shows it and as a terminal does, by a clock that the test turns."""

from __future__ import annotations

import io
import re

import pytest

from seq2engine.common.progress import ProgressPrinter, duration, silent


class Terminal(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.flushed = ""  # what a person sees

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        self.flushed = self.getvalue()


class Clock:
    """Stands still until it is turned."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _terminal_with_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


def uncoloured(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def printed(stream: io.StringIO, *reports: tuple[float, str, float]) -> str:
    """What a printer writes of reports (seconds since the last one, stage, fraction)."""
    clock = Clock()
    printer = ProgressPrinter(stream, clock)
    for wait, stage, fraction in reports:
        clock.now += wait
        printer(stage, fraction)
    return stream.getvalue()


# In a log


def test_a_log_gets_plain_lines() -> None:
    text = printed(io.StringIO(), (0, "build", 0.0), (2.5, "build", 1.0))
    assert text == "build ...\nbuild: done in 2.5 s\n"


def test_a_log_gets_a_line_every_ten_seconds_with_the_time_left() -> None:
    reports = [(0, "build", 0.0)] + [(1, "build", second / 100) for second in range(1, 26)]
    assert printed(io.StringIO(), *reports).splitlines() == [
        "build ...",
        "build:  10%, 1 min 30 s left",
        "build:  20%, 1 min 20 s left",
    ]


def test_a_stage_that_is_done_at_once_is_one_line() -> None:
    assert printed(io.StringIO(), (0, "copy", 1.0)) == "copy: done in 0.0 s\n"


def test_each_stage_counts_its_own_time() -> None:
    text = printed(io.StringIO(), (0, "export", 0.0), (3, "export", 1.0), (5, "build", 0.0), (4, "build", 1.0))
    assert text.splitlines() == ["export ...", "export: done in 3.0 s", "build ...", "build: done in 4.0 s"]


def test_a_stage_may_come_again() -> None:
    text = printed(io.StringIO(), (0, "build", 0.5), (1, "build", 1.0), (9, "build", 0.5), (2, "build", 1.0))
    assert text.splitlines() == ["build ...", "build: done in 1.0 s", "build ...", "build: done in 2.0 s"]


def test_a_log_has_no_control_codes() -> None:
    text = printed(io.StringIO(), *[(11, "build", step / 4) for step in range(5)])
    assert len(text.splitlines()) == 5
    assert text.isascii()
    assert text.replace("\n", "").isprintable()


# On a terminal


def test_a_terminal_gets_one_line_that_is_redrawn() -> None:
    text = printed(Terminal(), (0, "build", 0.0), (10, "build", 0.25), (10, "build", 0.5), (20, "build", 1.0))
    assert uncoloured(text).split("\r\x1b[K") == [
        "",
        "━" * 24 + " build ...",
        "━" * 6 + "╺" + "━" * 17 + " build:  25%, 30.0 s left",
        "━" * 12 + "╺" + "━" * 11 + " build:  50%, 20.0 s left",
        "━" * 24 + " build: done in 40.0 s\n",
    ]


def test_a_redraw_leaves_neither_a_colour_nor_a_hidden_cursor_behind() -> None:
    """So that an interrupt at any moment leaves a terminal as it was."""
    text = printed(Terminal(), (0, "build", 0.0), (10, "build", 0.25))
    for line in text.split("\r\x1b[K"):
        assert re.findall(r"\x1b\[(.*?)m", line)[-1:] in ([], ["0"])
    assert "?25" not in text


def test_without_colours_the_rest_of_the_bar_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = printed(Terminal(), (0, "build", 0.0), (10, "build", 0.25))
    assert text.endswith("\r\x1b[K" + "━" * 6 + " " * 19 + "build:  25%, 30.0 s left")


def test_a_terminal_is_not_redrawn_more_than_ten_times_a_second() -> None:
    reports = [(0.01, "build", step / 1000) for step in range(1, 101)]  # one second
    assert 9 <= printed(Terminal(), *reports).count("\r") <= 11


def test_the_end_is_always_drawn() -> None:
    text = printed(Terminal(), (0, "build", 0.0), (0.01, "build", 0.5), (0.01, "build", 1.0))
    assert "50%" not in text
    assert uncoloured(text).endswith("━ build: done in 0.0 s\n")


def test_what_is_drawn_is_seen_at_once() -> None:
    terminal = Terminal()
    text = printed(terminal, (0, "build", 0.0), (1, "build", 0.5))
    assert "50%" in text
    assert terminal.flushed == text


def test_a_fraction_beyond_the_end_is_the_end() -> None:
    text = printed(Terminal(), (0, "build", 1.5))
    assert uncoloured(text) == "\r\x1b[K" + "━" * 24 + " build: done in 0.0 s\n"


# Both


def test_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    ProgressPrinter()("build", 1.0)
    silent("build", 1.0)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "build: done in 0.0 s\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (4.24, "4.2 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (60, "1 min 00 s"),
        (185.4, "3 min 05 s"),
        (119.7, "2 min 00 s"),
        (3600, "60 min 00 s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text

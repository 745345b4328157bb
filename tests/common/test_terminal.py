"""What a real terminal shows: lines of progress that never wrap, and tables that are as narrow as it is."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import termios
import tty

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seq2engine.common.progress import ProgressPrinter
from seq2engine.common.tables import filled, text_table
from seq2engine.common.terminal import columns_of, cut_to, fresh_line, width_of

END = "\0"


@pytest.fixture(autouse=True, scope="module")
def _terminal_with_colours():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm-256color")
        patch.delenv("NO_COLOR", raising=False)
        yield


class Window:
    """A pseudo-terminal of a width that can be changed, and what has been written to it."""

    def __init__(self, columns: int):
        self.reader, writer = pty.openpty()
        tty.setraw(writer)  # a newline stays one character
        self.stream = os.fdopen(writer, "w", encoding="utf-8")
        self.resize(columns)

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.reader, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def written(self) -> str:
        """All since the last call: what was written arrives in pieces, so that an end mark is waited for."""
        self.stream.write(END)
        self.stream.flush()
        found = b""
        while not found.endswith(END.encode()):
            found += os.read(self.reader, 1 << 16)
        return found.decode("utf-8").removesuffix(END)

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()
        os.close(self.reader)


def drawn(text: str) -> list[str]:
    """The lines that were drawn one over the other, without colours and what clears the one before."""
    return [line for line in re.split(r"\r\x1b\[K|\n", re.sub(r"\x1b\[[0-9;]*m", "", text)) if line]


TEXT = st.text(st.sampled_from("ab ,é中語😀\u0301\n\t\x1b0"), max_size=200)


@settings(deadline=None)
@given(st.integers(20, 200), st.floats(0, 1), TEXT, TEXT)
def test_no_line_of_progress_is_wider_than_the_terminal(columns, fraction, stage, detail):
    with Window(columns) as window:
        printer = ProgressPrinter(window.stream, clock=iter(range(1000, 2000, 10)).__next__)
        printer(f"s{stage}", fraction / 2, detail)
        printer(f"s{stage}", 0.5 + fraction / 2, detail)
        printer(f"s{stage}", 1.0, detail)
        lines = drawn(window.written())
    assert 3 <= len(lines) <= 4  # a stage that is done may be begun again
    assert all(width_of(line) < columns for line in lines)
    assert all(line.isprintable() for line in lines)


def test_the_line_of_a_training_fits_eighty_columns_and_follows_the_window():
    detail = "epoch 3 of 20, loss 3.123, 12,345 tokens/s; after epoch 2: dev loss 2.345, exact match 12.3%"
    shown = {}
    with Window(80) as window:
        printer = ProgressPrinter(window.stream, clock=iter(range(1000, 2000, 10)).__next__)
        printer("train", 0.0)
        window.written()
        for columns in (80, 160, 30):
            window.resize(columns)
            printer("train", 0.1, detail)
            (shown[columns],) = drawn(window.written())
    assert shown[80].startswith("╸━━━━━━━ train:  10%, 1 min 30 s left, epoch 3 of 20, loss 3.123, ")
    assert shown[80].endswith("…")
    assert len(shown[80]) == 79
    assert shown[160].endswith("exact match 12.3%")
    assert shown[160].startswith("━━╺" + "━" * 21 + " train")
    assert shown[30] == "train:  10%, 4 min 30 s left…"


def test_a_line_after_a_bar_of_progress_takes_its_place():
    with Window(80) as window:
        ProgressPrinter(window.stream)("build", 0.5)
        window.stream.write(f"{fresh_line(window.stream)}interrupted\n")
        assert drawn(window.written())[-1] == "interrupted"
    assert fresh_line(io.StringIO()) == ""


def test_what_is_no_terminal_has_no_width():
    assert columns_of(io.StringIO()) is None
    with Window(123) as window:
        assert columns_of(window.stream) == 123


@pytest.mark.parametrize(
    ("text", "columns", "cut"),
    [
        ("abcdef", 6, "abcdef"),
        ("abcdef", 4, "abc…"),
        ("中語中語", 8, "中語中語"),
        ("中語中語", 6, "中語…"),
        ("ab\u0301c", 3, "ab\u0301c"),
        ("abc", 1, "…"),
        ("abc", 0, ""),
    ],
)
def test_a_cut_counts_columns_not_characters(text, columns, cut):
    assert cut_to(text, columns) == cut
    assert width_of(cut) <= columns


HEAD = ("graph", "precision", "weights", "products of weights")
ROWS = [("encoder", "fp32", "12.5 MB", "float32: 24, float16: 12"), ("decoder_step", "fp16", "7 MB", "float16: 36")]


def test_a_table_without_a_limit_is_as_wide_as_its_cells():
    assert text_table(HEAD, ROWS).splitlines() == [
        "graph         precision  weights  products of weights",
        "encoder       fp32       12.5 MB  float32: 24, float16: 12",
        "decoder_step  fp16          7 MB  float16: 36",
    ]
    assert text_table(HEAD, ROWS, width=80) == text_table(HEAD, ROWS)


def test_a_column_without_any_value_is_left_out():
    assert text_table(("arm", "ms", "note"), [("torch", "", ""), ("trt", "", "x")]) == "arm    note\ntorch\ntrt    x"
    assert text_table(("arm", "ms"), []) == "arm  ms"


def test_a_narrow_terminal_wraps_cells_between_words():
    assert text_table(HEAD, ROWS, width=48).splitlines() == [
        "graph         precision  weights  products of",
        "                                  weights",
        "encoder       fp32       12.5 MB  float32: 24,",
        "                                  float16: 12",
        "decoder_step  fp16          7 MB  float16: 36",
    ]


def test_columns_move_closer_before_rows_become_records():
    assert text_table(HEAD, ROWS, width=44).splitlines()[0] == "graph        precision weights products of"
    assert text_table(HEAD, ROWS, width=43).splitlines()[-1] == "decoder_step fp16         7 MB float16: 36"


def test_a_long_line_is_wrapped_behind_commas():
    line = "encoder: tokens int64 [B,K], position int64 [B] -> logits float32 [B,K,73]"
    assert filled(line) == filled(line, width=80) == line
    assert filled(line, width=34).splitlines() == [
        "encoder: tokens int64 [B,K],",
        "  position int64 [B] -> logits",
        "  float32 [B,K,73]",
    ]


def test_a_terminal_too_narrow_for_that_gets_a_record_a_row():
    assert text_table(HEAD, [ROWS[0], ("decoder_step", "fp16", "", "")], width=36).splitlines() == [
        "graph                encoder",
        "precision            fp32",
        "weights              12.5 MB",
        "products of weights  float32: 24,",
        "                     float16: 12",
        "",
        "graph                decoder_step",
        "precision            fp16",
    ]


def test_a_table_takes_the_width_of_the_terminal_it_is_printed_to():
    with Window(48) as window:
        assert text_table(HEAD, ROWS, stream=window.stream) == text_table(HEAD, ROWS, width=48)


WORDS = st.lists(st.text(st.sampled_from("abc中é0."), min_size=1, max_size=8), max_size=6).map(" ".join)


@settings(deadline=None)
@given(st.lists(st.tuples(WORDS, WORDS, WORDS), min_size=1, max_size=4), st.integers(20, 120))
def test_no_line_of_a_table_is_wider_than_asked_unless_a_word_is(rows, width):
    table = text_table(("a", "some name", "c"), rows, width=width)
    longest = max(width_of(part) for row in rows for cell in row for part in cell.split(", "))
    for line in table.splitlines():
        assert width_of(line) <= max(width, longest + len("some name  "))
    letters = "".join(sorted("".join(cell for row in rows for cell in row).replace(" ", "")))
    plain = table.replace("some name", "").replace("\n", "").replace(" ", "")
    assert all(plain.count(letter) >= letters.count(letter) for letter in set(letters))


def test_wide_characters_are_padded_by_their_columns():
    assert text_table(("text", "n"), [("中語", 1), ("ab", 2)]).splitlines() == ["text  n", "中語  1", "ab    2"]

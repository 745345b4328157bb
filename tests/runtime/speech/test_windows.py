"""How a window's tokens become segments, and where the next window begins; and how a transcript is written."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seq2engine.runtime.speech.formats import FORMATS, clock
from seq2engine.runtime.speech.transcript import Segment, Transcript, Word
from seq2engine.runtime.speech.windows import cuts_of

FIRST, FRAMES = 100, 3000


def time(seconds: float) -> int:
    return FIRST + round(seconds / 0.02)


@pytest.mark.parametrize(
    ("tokens", "cuts", "advance"),
    [
        # A pair ends a segment; what is behind the last pair is heard again.
        ([time(0), 1, 2, time(4.2), time(4.2), 3, time(9), time(9), 4], [(0, 4.2, [1, 2]), (4.2, 9, [3])], 900),
        ([time(0), 1, time(2), time(2)], [(0, 2, [1])], 200),
        # A timestamp alone at the end: nobody speaks in the rest of the window.
        ([time(0), 1, time(2), time(2), 2, time(3)], [(0, 2, [1]), (2, 3, [2])], FRAMES),
        ([time(0), 1, time(2.5)], [(0, 2.5, [1])], FRAMES),
        # No timestamp but the first, or none at all: the whole window.
        ([time(0), 1, 2], [(0, 30, [1, 2])], FRAMES),
        ([1, 2], [(0, 30, [1, 2])], FRAMES),
        ([], [(0, 30, [])], FRAMES),
    ],
)
def test_cuts(tokens, cuts, advance):
    found, frames, _ = cuts_of(tokens, FIRST, FRAMES)
    texts = [[token for token in cut.tokens if token < FIRST] for cut in found]
    assert [(pytest.approx(cut.start * 0.02), pytest.approx(cut.end * 0.02)) for cut in found] == [
        (start, end) for start, end, _ in cuts
    ]
    assert texts == [text for _, _, text in cuts]
    assert frames == advance


@given(st.lists(st.integers(90, 130)), st.integers(1, FRAMES))
def test_every_window_leads_on(tokens, frames):
    cuts, advance, _ = cuts_of(tokens, FIRST, frames)
    assert advance > 0
    assert cuts
    joined = [token for cut in cuts for token in cut.tokens]
    assert joined == tokens[: len(joined)]


def segment(start: float, end: float, text: str, words: tuple[Word, ...] = ()) -> Segment:
    return Segment(start, end, text, (1, 2), -0.25, 0.1, 1.2, 0.0, words)


TRANSCRIPT = Transcript(
    "talk.wav",
    65.0,
    "en",
    (segment(0.0, 2.5, " Hello & <you>."), segment(61.02, 65.0, " A --> B", (Word(" A", 61.02, 61.5, 0.5),))),
)


def test_text():
    assert FORMATS["txt"](TRANSCRIPT, False) == "Hello & <you>. A --> B\n"
    assert FORMATS["txt"](TRANSCRIPT, True).splitlines() == [
        "[00:00:00.000 --> 00:00:02.500] Hello & <you>.",
        "[00:01:01.020 --> 00:01:05.000] A --> B",
    ]
    assert FORMATS["txt"](Transcript("empty"), False) == "\n"


def test_subtitles():
    assert FORMATS["srt"](TRANSCRIPT, True) == (
        "1\n00:00:00,000 --> 00:00:02,500\nHello & <you>.\n\n2\n00:01:01,020 --> 00:01:05,000\nA -> B\n\n"
    )
    assert FORMATS["vtt"](TRANSCRIPT, True) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:02.500\nHello &amp; &lt;you>.\n\n00:01:01.020 --> 00:01:05.000\nA -> B\n\n"
    )


def test_json():
    values = json.loads(FORMATS["json"](TRANSCRIPT, True))
    assert (values["file"], values["language"], values["seconds"]) == ("talk.wav", "en", 65.0)
    assert values["segments"][0]["tokens"] == [1, 2]
    assert "words" not in values["segments"][0]
    assert values["segments"][1]["words"] == [{"word": " A", "start": 61.02, "end": 61.5, "probability": 0.5}]
    assert json.loads(FORMATS["json"](Transcript("x", error="no"), True)) == {"file": "x", "error": "no"}


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "00:00:00.000"), (59.9996, "00:01:00.000"), (36061.5, "10:01:01.500")]
)
def test_clock(seconds, text):
    assert clock(seconds) == text

"""A transcript as text: plain, subtitles (SRT, WebVTT), or JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from .transcript import Segment, Transcript, Word


def plain_text(transcript: Transcript, timestamps: bool = False) -> str:
    """The whole text in one line; with timestamps, one line for each segment."""
    if not timestamps:
        return one_line(transcript.text) + "\n"
    lines = (f"[{clock(one.start)} --> {clock(one.end)}] {one_line(one.text)}\n" for one in transcript.segments)
    return "".join(lines)


def srt_text(transcript: Transcript, timestamps: bool = True) -> str:
    cues = enumerate(cues_of(transcript), start=1)
    return "".join(
        f"{number}\n{clock(start, ',')} --> {clock(end, ',')}\n{text.replace('-->', '->')}\n\n"
        for number, (start, end, text) in cues
    )


def vtt_text(transcript: Transcript, timestamps: bool = True) -> str:
    escaped = (
        (start, end, text.replace("&", "&amp;").replace("<", "&lt;")) for start, end, text in cues_of(transcript)
    )
    cues = (f"{clock(start)} --> {clock(end)}\n{text.replace('-->', '->')}\n\n" for start, end, text in escaped)
    return "WEBVTT\n\n" + "".join(cues)


def json_text(transcript: Transcript, timestamps: bool = True) -> str:
    return json.dumps(values_of(transcript), ensure_ascii=False) + "\n"


FORMATS: dict[str, Callable[[Transcript, bool], str]] = {
    "txt": plain_text,
    "srt": srt_text,
    "vtt": vtt_text,
    "json": json_text,
}
TIMED = ("srt", "vtt")  # formats that have times always


def cues_of(transcript: Transcript) -> Iterator[tuple[float, float, str]]:
    for segment in transcript.segments:
        yield segment.start, segment.end, one_line(segment.text)


def one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def clock(seconds: float, point: str = ".") -> str:
    """01:02:03.450"""
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{rest // 1000:02d}{point}{rest % 1000:03d}"


def values_of(transcript: Transcript) -> dict[str, Any]:
    if transcript.error is not None:
        return {"file": transcript.name, "error": transcript.error}
    return {
        "file": transcript.name,
        "seconds": round(transcript.seconds, 3),
        "language": transcript.language,
        "text": transcript.text,
        "segments": [segment_values(segment) for segment in transcript.segments],
    }


def segment_values(segment: Segment) -> dict[str, Any]:
    values: dict[str, Any] = {
        "start": segment.start,
        "end": segment.end,
        "text": segment.text,
        "tokens": segment.tokens,
        "log_prob": segment.log_prob,
        "no_speech": segment.no_speech,
        "compression_ratio": segment.compression_ratio,
        "temperature": segment.temperature,
    }
    return values | ({"words": [word_values(word) for word in segment.words]} if segment.words else {})


def word_values(word: Word) -> dict[str, Any]:
    return {"word": word.text, "start": word.start, "end": word.end, "probability": word.probability}

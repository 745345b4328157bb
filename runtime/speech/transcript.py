"""The data of a transcription: words, segments, and the transcript with its language."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Word:
    """A word with the space before it, the seconds it is spoken at, and the mean probability of its tokens."""

    text: str
    start: float
    end: float
    probability: float


@dataclass(frozen=True)
class Segment:
    """A piece of speech: seconds, text, tokens with their timestamps, and how sure the model was of its window."""

    start: float
    end: float
    text: str
    tokens: tuple[int, ...] = field(repr=False)
    log_prob: float
    no_speech: float
    compression_ratio: float
    temperature: float
    words: tuple[Word, ...] = ()


@dataclass(frozen=True)
class Transcript:
    """All of an audio: where it comes from, its language (None: the model knows one only), its segments in order.

    With an `error` there is no transcript.
    """

    name: str
    seconds: float = 0.0
    language: str | None = None
    segments: tuple[Segment, ...] = ()
    error: str | None = None

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments).strip()

    def __str__(self) -> str:
        return self.text

"""How audio is transcribed: the options, with the defaults of OpenAI's Whisper, and their checks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypedDict

from seq2engine.errors import RequestError, UsageError
from seq2engine.model.speech import SpeechConfig

TASKS = ("transcribe", "translate")
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class TranscribeOptions:
    """How to transcribe, in the words of openai-whisper.

    `language` is a code such as en (None: the model's only one, or detected from the first window). With `timestamps`,
    segments have times; audio longer than a window is always decoded with them, because the next window begins where
    the last segment ends. `words` gives every word its times; it needs a session that keeps its cross-attention.

    A window is decoded with the first of the `temperatures`: 0 is beam search (greedy search with one beam), others
    draw `best_of` samples and keep the likeliest. If the output is too repetitive (its text compresses by more than
    `compression_ratio`) or too unlikely (its mean log-probability is below `log_prob`), the next temperature is
    tried. A window is silence if it is too unlikely and the probability of no speech is above `no_speech`. None
    switches a threshold off.

    `prompt` is text that the first window continues, such as names and their spelling. With `previous_text`, a window
    continues the text before it, unless that was drawn at a temperature above 0.5. `max_length` are tokens of one
    window (None: half of what the model has room for; the other half is for the previous text).
    """

    language: str | None = None
    task: str = "transcribe"
    timestamps: bool = False
    words: bool = False
    beam: int = 1
    length_penalty: float = 1.0
    best_of: int = 5
    temperatures: tuple[float, ...] = TEMPERATURES
    compression_ratio: float | None = 2.4
    log_prob: float | None = -1.0
    no_speech: float | None = 0.6
    prompt: str | None = None
    previous_text: bool = True
    max_length: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if problems := [*problems_of(self)]:
            raise UsageError("transcribe: " + "; ".join(problems))


class TranscribeFields(TypedDict, total=False):
    """The fields of TranscribeOptions as keyword arguments, such as `transcribe(path, beam=5)`."""

    language: str | None
    task: str
    timestamps: bool
    words: bool
    beam: int
    length_penalty: float
    best_of: int
    temperatures: tuple[float, ...]
    compression_ratio: float | None
    log_prob: float | None
    no_speech: float | None
    prompt: str | None
    previous_text: bool
    max_length: int | None
    seed: int


def problems_of(options: TranscribeOptions) -> Iterator[str]:
    if options.task not in TASKS:
        yield f"task {options.task!r}, expected {' or '.join(TASKS)}"
    for name in ("beam", "best_of", "max_length"):
        value = getattr(options, name)
        if value is not None and value < 1:
            yield f"{name.replace('_', ' ')} {value}, expected at least 1"
    if not options.temperatures or not all(0 <= one < math.inf for one in options.temperatures):
        yield f"temperatures {', '.join(map(str, options.temperatures)) or 'empty'}, expected one or more from 0 on"
    if not math.isfinite(options.length_penalty):
        yield f"length penalty {options.length_penalty}, expected a number"
    for name in ("compression_ratio", "log_prob", "no_speech"):
        value = getattr(options, name)
        if value is not None and math.isnan(value):
            yield f"{name.replace('_', ' ')} {value}, expected a number"
    if options.seed < 0:
        yield f"seed {options.seed}, expected 0 or more"


def check_model(options: TranscribeOptions, speech: SpeechConfig) -> None:
    """Refuses what a model cannot do."""
    if speech.multilingual:
        if options.language is not None and options.language not in speech.languages:
            known = ", ".join(sorted(speech.languages))
            raise RequestError(f"language {options.language!r}, expected one of {known}")
        return
    if options.language not in (None, "en"):
        raise RequestError(f"language {options.language!r}, but this model knows English only; leave it out")
    if options.task != "transcribe":
        raise RequestError(f"task {options.task!r}, but this model knows English only; leave it out")

"""Audio files and arrays as samples at 16 kHz, one channel, in pieces: no file is held as a whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from seq2engine.errors import RequestError, imported_package

from .features import RATE, Blocks, FeatureStream

WINDOW_SECONDS = 30  # seconds of a window
WINDOW_SAMPLES = WINDOW_SECONDS * RATE
PIECE = 1 << 18  # samples of a file that are read at once

AudioInput = str | os.PathLike[str] | np.ndarray


@dataclass(frozen=True)
class Audio:
    """`blocks` iterates over the samples from the beginning, float32 at 16 kHz; it may be called again."""

    name: str
    blocks: Callable[[], Iterator[np.ndarray]]


@dataclass(frozen=True)
class Speech:
    """Audio as a model takes it: its features, and how many seconds of them are audio; the rest is padding."""

    name: str
    features: FeatureStream
    seconds: float
    short: bool  # whether it is one window, padded with silence


def audio_from(source: AudioInput, rate: int = RATE) -> Audio:
    """A file that libsndfile reads, or samples [N] or [N, channels] at a rate: float from -1 to 1, or integers."""
    if isinstance(source, np.ndarray):
        return audio_from_samples(source, rate)
    path = Path(source)
    return Audio(str(source), lambda: checked(str(source), resampled_blocks(*file_blocks(path))))


def audio_from_samples(samples: np.ndarray, rate: int = RATE) -> Audio:
    if samples.ndim not in (1, 2) or samples.dtype.kind not in "fiu" or rate < 1:
        raise RequestError(
            f"audio is an array {list(samples.shape)} of {samples.dtype} at {rate} Hz, expected samples [N] or "
            "[N, channels] of float or integers, and their rate"
        )
    return Audio("audio", lambda: checked("audio", resampled_blocks(rate, one_channel(samples))))


def one_channel(samples: np.ndarray) -> Iterator[np.ndarray]:
    for first in range(0, len(samples), PIECE):
        piece = samples[first : first + PIECE]
        if piece.dtype.kind == "u":  # 8-bit wav: silence is in the middle
            piece = piece.astype(np.float32) / np.float32(np.iinfo(piece.dtype).max // 2 + 1) - np.float32(1.0)
        elif piece.dtype.kind == "i":
            piece = piece.astype(np.float32) / np.float32(-float(np.iinfo(piece.dtype).min))
        yield mono(piece)


def mono(samples: np.ndarray) -> np.ndarray:
    """[N] or [N, channels] -> the mean of all channels, float32 [N]."""
    mixed = samples if samples.ndim == 1 else samples.mean(axis=1)
    return np.ascontiguousarray(mixed, dtype=np.float32)


def file_blocks(path: Path) -> tuple[int, Iterator[np.ndarray]]:
    """The rate of an audio file and its samples; a file that cannot be opened, or is not audio, is refused here."""
    soundfile = imported_package("soundfile", "reading audio files")
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for somebody to write to it
            raise RequestError(f"{path} is not a regular file, expected wav, flac, ogg, mp3 or aiff")
        with path.open("rb"):  # the system's error names the reason
            pass
        file = soundfile.SoundFile(path)
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}") from error
    except (soundfile.LibsndfileError, TypeError) as error:  # TypeError: a file whose suffix means raw samples
        other = path.with_suffix(".flac" if path.suffix == ".wav" else ".wav")  # it cannot be converted to itself
        raise RequestError(
            f"{path} is not audio that libsndfile reads, expected wav, flac, ogg, mp3 or aiff; "
            f"convert it with: ffmpeg -i {path} {other.name}"
        ) from error
    return file.samplerate, read_blocks(file, path)


def read_blocks(file: Any, path: Path) -> Iterator[np.ndarray]:
    soundfile = imported_package("soundfile", "reading audio files")
    with file:
        try:
            while len(block := file.read(PIECE, dtype="float32", always_2d=True)):
                yield mono(block)
        except soundfile.LibsndfileError as error:
            raise RequestError(f"{path} is damaged: {error.error_string}; create the file again") from error


def resampled_blocks(rate: int, blocks: Blocks) -> Iterator[np.ndarray]:
    """Samples at any rate -> at 16 kHz."""
    if rate == RATE:
        yield from blocks
        return
    stream = imported_package("soxr", f"audio of {rate} Hz").ResampleStream(rate, RATE, 1, dtype="float32")
    for block in blocks:
        yield stream.resample_chunk(block)
    yield stream.resample_chunk(np.zeros(0, dtype=np.float32), last=True)


def checked(name: str, blocks: Blocks) -> Iterator[np.ndarray]:
    for block in blocks:
        if not np.isfinite(block).all():
            raise RequestError(f"{name} has samples that are not finite numbers, expected numbers from -1 to 1")
        yield block


def speech_from(audio: Audio, bands: int, window: int = WINDOW_SAMPLES) -> Speech:
    """The features of an audio. If it is no longer than a window, it is one window, filled up with silence.

    Audio that is longer is not padded: frames after its end are zeros, as in OpenAI's code.
    """
    beginning = np.zeros(0, dtype=np.float32)
    for block in audio.blocks():
        beginning = np.concatenate([beginning, block])
        if len(beginning) > window:
            break
    if (count := len(beginning)) <= window:
        padded = np.concatenate([beginning, np.zeros(window - count, dtype=np.float32)])
        return Speech(audio.name, FeatureStream(lambda: [padded], bands), count / RATE, short=True)
    features = FeatureStream(audio.blocks, bands)
    return Speech(audio.name, features, features.samples / RATE, short=False)

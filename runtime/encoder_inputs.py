"""The encoder's inputs for a batch of sources (padded token ids or log-mel features, and a mask), and which
sources to encode together.

A source of audio is an array [mels, frames]; inside it is an `AudioSource`, which has a length as a list of tokens has.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from seq2engine.errors import RequestError
from seq2engine.model.config import FRAMES, ModelConfig

CALL = 32  # fixed cost of an encoder call, in tokens: it reads all weights


class AudioSource(Sequence[int]):
    """Log-mel features [mels, frames] of one source, as a sequence of as many numbers as the encoder has positions.

    The numbers replace token ids where sources are compared: equal features have equal numbers.
    """

    def __init__(self, features: np.ndarray):
        self.features = features

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        first = self.features[0, : FRAMES * len(self) : FRAMES].view(np.int32)
        return tuple(np.abs(first.astype(np.int64)).tolist())

    def __len__(self) -> int:
        return self.features.shape[1] // FRAMES

    def __getitem__(self, place: Any) -> Any:
        return self.numbers[place]


def check_takes_text(config: ModelConfig, bundle: object = "BUNDLE") -> None:
    """Refuses text for a model that takes audio."""
    if config.takes_audio:
        raise RequestError(f"this model takes audio; use: seq2engine transcribe {bundle} file.wav")


def listed_sources(sources: Sequence[Any], config: ModelConfig) -> list[Any]:
    """Sources as they are decoded: lists of token ids, or an `AudioSource` for each array of features."""
    if not config.takes_audio:
        if any(isinstance(source, AudioSource) or np.ndim(source) > 1 for source in sources):
            raise RequestError("sources are audio features, expected token ids: this model takes text")
        return [list(source) for source in sources]
    return [audio_source(source, row) for row, source in enumerate(sources)]


def audio_source(source: Any, row: int = 0) -> AudioSource:
    if isinstance(source, AudioSource):
        return source
    if not isinstance(source, np.ndarray) or source.ndim != 2:
        what = f"an array {list(source.shape)}" if isinstance(source, np.ndarray) else f"a {type(source).__name__}"
        raise RequestError(
            f"source {row} is {what}, expected features [mels, frames]: this model takes audio; "
            "use: seq2engine transcribe BUNDLE file.wav"
        )
    return AudioSource(np.ascontiguousarray(source, dtype=np.float32))


def problem_with_audio(source: AudioSource, config: ModelConfig) -> str | None:
    """Why a source cannot be encoded; None if it can."""
    wanted = (config.mels, config.frames)
    if source.features.shape != wanted:
        return f"is features of {list(source.features.shape)}, expected {list(wanted)}: pad or cut the audio to 30 s"
    if not np.isfinite(source.features).all():
        return "has features that are not finite numbers"
    return None


def encoder_inputs(sources: Sequence[Any], config: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """A batch -> ids int64 [B,S] or features float32 [B,mels,2S], and mask bool [B,S]; audio is never padded."""
    if not config.takes_audio:
        return padded(sources, config.pad_id)
    features = np.stack([source.features for source in sources])
    return features, np.ones((len(features), features.shape[2] // FRAMES), dtype=bool)


def padded(sequences: Sequence[Sequence[int]], pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Ragged token ids -> ids int64 and mask bool, both [B, longest]."""
    lengths = np.array([len(sequence) for sequence in sequences])
    mask = np.arange(lengths.max()) < lengths[:, None]
    ids = np.full(mask.shape, pad_id, dtype=np.int64)
    ids[mask] = np.concatenate([np.asarray(sequence, dtype=np.int64) for sequence in sequences])
    return ids, mask


def groups_by_padding(lengths: Sequence[int], call: int = CALL) -> list[list[int]]:
    """Groups of similar length, longest first, that minimise padded tokens plus `call` for each group."""
    places = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    least = [0]  # tokens for the first n places
    starts = []  # where the last group of the first n begins
    for end in range(1, len(places) + 1):
        tokens = [least[start] + call + (end - start) * lengths[places[start]] for start in range(end)]
        least.append(min(tokens))
        starts.append(tokens.index(least[-1]))
    groups = []
    while places:
        start = starts[len(places) - 1]
        groups.append(places[start:])
        places = places[:start]
    return groups[::-1]

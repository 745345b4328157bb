"""The encoder's inputs for a batch of sources (padded token ids, log-mel features or pixels, and a mask), and which
sources to encode together.

A source of audio or of an image is an array; here it is a `FeatureSource`, which has a length as a list of tokens has.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any
from zlib import crc32

import numpy as np

from seq2engine.errors import RequestError
from seq2engine.model.config import FRAMES, ModelConfig
from seq2engine.model.images import command_for

CALL = 32  # fixed cost of an encoder call, in tokens: it reads all weights


class FeatureSource(Sequence[int]):
    """Features of one source, [mels, frames] of audio or [channels, height, width] of an image, as a sequence of as
    many numbers as the encoder has positions.

    The numbers replace token ids where sources are compared: equal features have equal numbers.
    """

    def __init__(self, features: np.ndarray, positions: int):
        self.features, self.positions = features, positions

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        parts = np.array_split(np.ascontiguousarray(self.features).reshape(-1).view(np.uint8), self.positions)
        return tuple(crc32(part.tobytes()) for part in parts)

    def __len__(self) -> int:
        return self.positions

    def __getitem__(self, place: Any) -> Any:
        return self.numbers[place]


def check_takes_text(config: ModelConfig, bundle: object = "BUNDLE") -> None:
    """Refuses text for a model that takes audio or images."""
    if config.takes_features:
        raise RequestError(f"this model takes {config.source_kind}; {command_for(config, bundle)}")


def listed_sources(sources: Sequence[Any], config: ModelConfig) -> list[Any]:
    """Sources as they are decoded: lists of token ids, or a `FeatureSource` for each array of features."""
    if not config.takes_features:
        if any(map(has_features, sources)):
            raise RequestError("sources are features of audio or images, expected token ids: this model takes text")
        return [list(source) for source in sources]
    return [feature_source(source, config, row) for row, source in enumerate(sources)]


def has_features(source: Any) -> bool:
    """Whether a source is an array of features, or a list of lists, and no sequence of numbers."""
    if isinstance(source, (list, tuple)):
        return bool(source) and isinstance(source[0], (Sequence, np.ndarray))
    return isinstance(source, FeatureSource) or np.ndim(source) > 1


def feature_source(source: Any, config: ModelConfig, row: int = 0) -> FeatureSource:
    if isinstance(source, FeatureSource):
        return source
    if not isinstance(source, np.ndarray) or source.ndim != len(config.features_shape):
        what = f"an array {list(source.shape)}" if isinstance(source, np.ndarray) else f"a {type(source).__name__}"
        axes = "[channels, height, width]" if config.takes_images else "[mels, frames]"
        raise RequestError(
            f"source {row} is {what}, expected features {axes}: this model takes {config.source_kind}; "
            f"{command_for(config, 'BUNDLE')}"
        )
    positions = source.shape[1] // FRAMES if config.takes_audio else config.max_source
    return FeatureSource(np.ascontiguousarray(source, dtype=np.float32), positions)


def problem_with_features(source: FeatureSource, config: ModelConfig) -> str | None:
    """Why a source cannot be encoded; None if it can."""
    if source.features.shape != config.features_shape:
        advice = "resize the image" if config.takes_images else "pad or cut the audio to 30 s"
        return f"is features of {list(source.features.shape)}, expected {list(config.features_shape)}: {advice}"
    if not np.isfinite(source.features).all():
        return "has features that are not finite numbers"
    return None


def encoder_inputs(sources: Sequence[Any], config: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """A batch -> ids int64 [B,S], or float32 features [B,mels,2S] or pixels [B,C,height,width], and mask bool [B,S].

    Features are never padded.
    """
    if not config.takes_features:
        return padded(sources, config.pad_id)
    features = np.stack([source.features for source in sources])
    return features, np.ones((len(features), len(sources[0])), dtype=bool)


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
    if len(set(lengths)) == 1:
        return [places]
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

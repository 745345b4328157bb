"""Sources to decode, as token ids: from texts, or random; and how many suffice for a comparison."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from seq2engine.errors import ConfigError, RequestError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.model.config import ModelConfig
from seq2engine.model.tokenizers.base import Coder
from seq2engine.model.tokenizers.ids import IdsTokenizer

from ..encoder_inputs import FeatureSource

TENSOR_SOURCES = 64  # tensors are compared on this many sources, of all lengths: more would show nothing new
STEP_LOGITS = 1 << 20  # or fewer sources, so that a step has at most this many logits
FEATURE_SOURCES = 4  # of audio or images: each is as long as fifty sentences, or as twenty
FEATURE_DECODES = 8  # random ones that are decoded, unless fewer are asked for
SMOOTH = 8  # frames from one sound to the next, in random audio features, or pixels from one stroke to the next
FEWEST_SOURCES = 16  # never on fewer: the error ratio of a single row was measured at up to 17 in correct exports


def tensor_sources(config: ModelConfig) -> int:
    """How many sources tensors are compared on."""
    if config.takes_features:
        return FEATURE_SOURCES
    return min(TENSOR_SOURCES, max(FEWEST_SOURCES, STEP_LOGITS // config.target_vocab))


def fewest_sources(config: ModelConfig) -> int:
    return FEATURE_SOURCES if config.takes_features else FEWEST_SOURCES


def compared_sources(sources: list[list[int]], config: ModelConfig, limit: int) -> tuple[list[list[int]], list[int]]:
    """The sources that tensors are compared on, and the indices of those that continue to the last step.

    They are some of the given ones, with random ones of at most `limit` tokens if those are too few.
    """
    shown = sample_of(sources, tensor_sources(config))
    fewest = fewest_sources(config)
    if len(shown) < fewest:
        shown += random_sources(config, fewest - len(shown), 0, limit)
    return shown, sample_rows(shown, fewest)


def tree_sources(config: ModelConfig, beam: int) -> int:
    """How many sources with `beam` rows each: by the same rule, but never fewer rows than the fewest sources have."""
    fewest = -(-fewest_sources(config) // beam)
    return min(fewest_sources(config), max(fewest, STEP_LOGITS // (beam * config.target_vocab)))


def coder_of(bundle: Bundle, ids: bool = False) -> Coder:
    """What converts lines to ids and back: the bundle's tokenizer, or lines of ids if `ids` or where it has none."""
    return IdsTokenizer() if ids or not bundle.takes_text else bundle.tokenizer()


def sources_of(
    bundle: Bundle,
    texts: Iterable[str] | None,
    count: int,
    seed: int,
    longest: int | None = None,
    language: str | None = None,
) -> list[list[int]]:
    """The ids of texts, whose language may be named; without texts, `count` random sources."""
    if texts is not None and bundle.config.takes_features:
        kind = bundle.config.source_kind
        raise RequestError(f"texts were given, but this model takes {kind}; leave them out for random features")
    if texts is not None:
        tokenizer = bundle.tokenizer()
        return [tokenizer.encode_source(text, language) for text in texts]
    if count < 1:
        raise ConfigError(f"{count} random sources, expected at least 1")
    count = min(count, FEATURE_DECODES) if bundle.config.takes_features else count
    return random_sources(bundle.config, count, seed, longest)


def random_features(config: ModelConfig, rng: np.random.Generator) -> np.ndarray:
    """Features of one source of audio or of an image."""
    return random_pixels(config, rng) if config.takes_images else random_log_mel(config, rng)


def random_pixels(config: ModelConfig, rng: np.random.Generator) -> np.ndarray:
    """Pixels [channels, height, width] that look like a line of writing: dark strokes on bright paper, then paper.

    Real ones lie between -1 and 1, as most models normalise them.
    """
    height, width = config.image_height, config.image_width
    coarse = rng.normal(size=(height // SMOOTH + 1, width // SMOOTH + 1))
    ink = np.kron(coarse, np.ones((SMOOTH, SMOOTH)))[:height, :width] > 0.5
    ink[:, rng.integers(width // 4, width + 1) :] = False
    paper, dark = rng.uniform(0.5, 1.0, (config.channels, 1, 1)), rng.uniform(-1.0, -0.5, (config.channels, 1, 1))
    noise = 0.05 * rng.normal(size=config.features_shape)
    return np.clip(np.where(ink, dark, paper) + noise, -1.0, 1.0).astype(np.float32)


def random_log_mel(config: ModelConfig, rng: np.random.Generator) -> np.ndarray:
    """Features [mels, frames] that look like log-mel of speech: smooth in time, louder in low bands, then silence.

    Real ones lie between about -1 and 2, and silence is one number.
    """
    shape = (config.mels, config.frames)
    tilt = np.linspace(0.8, -0.6, config.mels)[:, None]
    rough = rng.normal(size=(config.mels, config.frames // SMOOTH + 2))
    places = np.arange(config.frames) / SMOOTH
    first = places.astype(int)
    smooth = rough[:, first] * (1 - places % 1) + rough[:, first + 1] * (places % 1)
    loud = np.clip(tilt + 0.5 * smooth + 0.1 * rng.normal(size=shape), -1.0, 2.0)
    spoken = rng.integers(config.frames // 4, config.frames + 1)
    loud[:, spoken:] = loud.min()
    return loud.astype(np.float32)


def random_sources(config: ModelConfig, count: int, seed: int = 0, longest: int | None = None) -> list[Any]:
    """Ragged random sources, the extremes first: one token, the longest there may be, one token over and over.

    Lengths are drawn evenly on a logarithmic scale: many short ones beside a few long ones find a mask that leaks.
    Of a model that takes audio or images, features of one shape.
    """
    if seed < 0:
        raise RequestError(f"seed {seed}, expected 0 or more")
    rng = np.random.default_rng(seed)
    if config.takes_features:
        return [FeatureSource(random_features(config, rng), config.max_source) for _ in range(count)]
    limit = min(config.max_source, longest or config.max_source)
    tokens = np.array([token for token in range(config.source_vocab) if token != config.pad_id] or [config.pad_id])
    drawn = np.exp(rng.uniform(0.0, np.log(limit + 1), size=count)).astype(int)
    lengths = [1, limit, *drawn.clip(1, limit).tolist()][:count]
    sources = [rng.choice(tokens, size=length).tolist() for length in lengths]
    if count > 2:
        sources[2] = [sources[2][0]] * max(len(sources[2]), limit // 2)
    return sources


def sample_of(sources: list[list[int]], count: int) -> list[list[int]]:
    """At most that many of the sources, evenly over their lengths, shortest and longest included, in their order."""
    return [sources[row] for row in sample_rows(sources, count)]


def sample_rows(sources: list[list[int]], count: int) -> list[int]:
    """Their indices among the sources."""
    if len(sources) <= count:
        return list(range(len(sources)))
    by_length = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    chosen = np.linspace(0, len(sources) - 1, count).round().astype(int)
    return sorted(by_length[place] for place in chosen)

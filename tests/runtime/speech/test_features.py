"""Log-mel features are those of Hugging Face's extractor; audio of any length has the same in pieces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rounding import EXP, FP32, FP64, apart, sum_error
from transformers import WhisperFeatureExtractor

from seq2engine.runtime.speech.features import BINS, HOP, RATE, FeatureStream, log_mel, mel_filters


def exact_features(wave: np.ndarray, bands: int) -> np.ndarray:
    """As the library computes them in fp64."""
    extractor = WhisperFeatureExtractor(feature_size=bands)
    return extractor._np_extract_fbank_features(wave[None].astype(np.float64), "cpu")[0]


def nearness(wave: np.ndarray, bands: int) -> float:
    """How far two fp32 computations of the same features may lie apart: twice what one errs by, which depends on how
    much of a spectrum cancels out, and the rounding of a band's sum and of its log10, which is at most 10."""
    own = float(np.abs(log_mel(wave, bands) - exact_features(wave, bands)).max())
    return 2 * own + (sum_error(BINS) / np.log(10) + 10 * apart([(3, FP32)])) / 4


def sound(samples: int, seed: int = 0) -> np.ndarray:
    """A tone that wavers, noise, and a stretch of silence."""
    times = np.arange(samples) / RATE
    wave = 0.3 * np.sin(2 * np.pi * 440 * times * (1 + 0.1 * np.sin(times)))
    wave += 0.05 * np.random.default_rng(seed).standard_normal(samples)
    wave[samples // 2 : samples // 2 + samples // 8] = 0.0
    return wave.astype(np.float32)


@pytest.mark.parametrize("bands", [80, 128])
def test_filters_are_the_libraries(bands):
    expected = WhisperFeatureExtractor(feature_size=bands).mel_filters
    # Edges of at most 8,000 Hz (a logarithm, a product, an exponential) are subtracted from frequencies; the difference
    # is divided by the width of a triangle's side, and by that of the triangle, whose height is one over it.
    height = expected.max()
    near = apart([(2 * EXP + 4, FP64)]) * RATE / 2 * height**2
    np.testing.assert_allclose(mel_filters(bands), expected, rtol=0, atol=near)


@pytest.mark.parametrize("bands", [80, 128])
@pytest.mark.parametrize("samples", [30 * RATE, 4 * RATE + 123, 31 * RATE + 80])
def test_features_are_the_libraries(bands, samples):
    """Nearer to the library's fp64 path (numpy) than its own fp32 path (torch) is: 1e-5 and 6e-5 on one CPU."""
    wave = sound(samples)
    expected, found = exact_features(wave, bands), log_mel(wave, bands)
    assert found.shape == (bands, samples // HOP)
    extractor = WhisperFeatureExtractor(feature_size=bands)
    usual = extractor(wave, sampling_rate=RATE, return_tensors="np", padding="longest", truncation=False)
    theirs = np.abs(usual.input_features[0] - expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=theirs)


@settings(max_examples=25, deadline=None)
@given(st.integers(201, 5000), st.lists(st.integers(1, 900), min_size=1, max_size=30), st.integers(0, 40))
def test_audio_in_pieces_has_the_same_features(samples, sizes, most_held):
    wave = sound(samples, seed=samples)
    whole = log_mel(wave, 80)
    reads = []

    def blocks():
        reads.append(0)
        first = 0
        for size in sizes * (samples // sum(sizes) + 1):
            yield wave[first : first + size]
            first += size

    stream = FeatureStream(blocks, 80, most_held)
    assert (stream.frames, stream.samples) == (samples // HOP, samples)
    found = np.concatenate([stream.window(first, 7) for first in range(0, stream.frames, 7)], axis=1)
    np.testing.assert_allclose(found[:, : stream.frames], whole, rtol=0, atol=nearness(wave, 80))
    assert not found[:, stream.frames :].any()  # zeros behind the end
    assert len(reads) == (1 if stream.frames <= most_held else 2)


def test_windows_may_overlap_and_hold_little():
    wave = sound(8 * RATE)
    stream = FeatureStream(lambda: (wave[first : first + 1600] for first in range(0, len(wave), 1600)), 80, most_held=0)
    whole, near = log_mel(wave, 80), nearness(wave, 80)
    for first in (0, 10, 10, 250, 700):
        np.testing.assert_allclose(
            stream.window(first, 300)[:, : 800 - first], whole[:, first : first + 300], rtol=0, atol=near
        )
        assert len(stream.held) <= 300 + 11


def test_silence_is_seen():
    wave = np.concatenate([sound(RATE), np.zeros(2 * RATE, dtype=np.float32)])
    stream = FeatureStream(lambda: [wave], 80)
    stream.window(0, 100)
    assert not stream.silent()
    stream.window(102, 100)  # the frame at 1 s still hears a little of what is before
    assert stream.silent()


def test_audio_that_is_too_short_has_no_features():
    assert log_mel(np.zeros(200, dtype=np.float32), 80).shape == (80, 0)
    assert log_mel(np.zeros(201, dtype=np.float32), 80).shape == (80, 1)

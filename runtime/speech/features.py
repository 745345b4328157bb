"""Log-mel features of audio, as OpenAI's Whisper computes them: 16 kHz, frames of 25 ms every 10 ms, 80 or 128 bands.

    samples -> frames of 400 (Hann window) -> power spectrum [N,201] -> mel bands -> log10 -> at most 8 below the
    loudest value of the whole audio -> (x + 4) / 4

All frames of an audio depend on each other only by that loudest value. So audio of any length is read twice, and only a
part of it is held: the first time to find the loudest value, the second time for the frames themselves. Short audio is
held as a whole and read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache

import numpy as np

RATE = 16000  # samples a second
HOP, WIDTH = 160, 400  # samples from one frame to the next, and of each
FRAMES_PER_SECOND = RATE // HOP
BINS = WIDTH // 2 + 1
QUIETEST, RANGE = 1e-10, 8.0  # smallest power; dynamic range below the loudest value, in log10
SILENCE = np.float32(np.log10(QUIETEST))
HELD = 30_000  # frames of an audio, 5 minutes, that are held rather than computed twice: 10 MB for 80 bands
BLOCK = 1000  # frames computed at once: what fits a core's cache

Blocks = Iterable[np.ndarray]  # samples of one audio in pieces of any length, float32


@cache
def mel_filters(bands: int) -> np.ndarray:
    """[201, bands] in fp64: triangles that are equally wide in mels and have equal areas, from 0 to 8 kHz (Slaney)."""
    edges = hertz_from_mels(np.linspace(0.0, mels_from_hertz(np.array(RATE / 2)), bands + 2))
    bins = np.linspace(0.0, RATE / 2, BINS)
    rising = (bins[:, None] - edges[:-2]) / np.diff(edges)[:-1]
    falling = (edges[2:] - bins[:, None]) / np.diff(edges)[1:]
    return np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (edges[2:] - edges[:-2]))


KNEE, STEP = 1000.0, 200.0 / 3.0  # mels are linear in hertz up to the knee, logarithmic above
GROWTH = np.log(6.4) / 27.0


def mels_from_hertz(hertz: np.ndarray) -> np.ndarray:
    above = KNEE / STEP + np.log(np.maximum(hertz, KNEE) / KNEE) / GROWTH
    return np.where(hertz < KNEE, hertz / STEP, above)


def hertz_from_mels(mels: np.ndarray) -> np.ndarray:
    above = KNEE * np.exp(GROWTH * (mels - KNEE / STEP))
    return np.where(mels < KNEE / STEP, mels * STEP, above)


@cache
def float32_filters(bands: int) -> np.ndarray:
    return np.ascontiguousarray(mel_filters(bands), dtype=np.float32)


@cache
def hann_window() -> np.ndarray:
    """The periodic one."""
    return (0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(WIDTH) / WIDTH)).astype(np.float32)


def log_powers(samples: np.ndarray, bands: int) -> np.ndarray:
    """The 160 (N - 1) + 400 samples that N frames lie in -> log10 of the power in every band, float32 [N,bands]."""
    frames = np.lib.stride_tricks.sliding_window_view(samples, WIDTH)[::HOP]
    result = np.empty((len(frames), bands), dtype=np.float32)
    if not samples.any():  # hours of silence take no time
        result.fill(SILENCE)
        return result
    for first in range(0, len(frames), BLOCK):
        spectrum = np.fft.rfft(frames[first : first + BLOCK] * hann_window(), axis=1)
        power = (spectrum.real**2 + spectrum.imag**2).astype(np.float32, copy=False)
        found = result[first : first + BLOCK]
        np.matmul(power, float32_filters(bands), out=found)
        np.log10(np.maximum(found, QUIETEST, out=found), out=found)
    return result


def log_power_blocks(blocks: Blocks, bands: int) -> Iterator[np.ndarray]:
    """The same for a whole audio, in blocks: one frame for every 160 samples; the audio is mirrored at its ends.

    Audio that is too short to be mirrored, 200 samples or fewer, has no frame.
    """
    half = WIDTH // 2
    held = np.zeros(0, dtype=np.float32)  # samples of the next frames
    begun = False
    for block in blocks:
        held = np.concatenate([held, block])
        if not begun:
            if len(held) <= half:
                continue
            held = np.concatenate([held[half:0:-1], held])
            begun = True
        count = (len(held) - WIDTH) // HOP + 1
        if count > 0:
            yield log_powers(held[: (count - 1) * HOP + WIDTH], bands)
            held = held[count * HOP :]
    count = (len(held) - half) // HOP
    if begun and count > 0:
        held = np.concatenate([held, held[-2 : -half - 2 : -1]])
        yield log_powers(held[: (count - 1) * HOP + WIDTH], bands)


def scaled(log_power: np.ndarray, loudest: float) -> np.ndarray:
    """Log-powers [N,bands] -> features [bands,N], where nothing is quieter than 8 below the loudest value."""
    floor = np.float32(loudest) - np.float32(RANGE)
    return np.ascontiguousarray(((np.maximum(log_power, floor) + np.float32(4.0)) / np.float32(4.0)).T)


def log_mel(samples: np.ndarray, bands: int) -> np.ndarray:
    """Samples at 16 kHz -> features float32 [bands, samples // 160], of all of them at once."""
    found = [*log_power_blocks([np.asarray(samples, dtype=np.float32)], bands)]
    whole = np.concatenate(found) if found else np.zeros((0, bands), dtype=np.float32)
    return scaled(whole, float(whole.max(initial=SILENCE)))


class FeatureStream:
    """Features of an audio of any length, window by window, forwards; only a little more than a window is held.

    `blocks` is called once for each time that the audio is read: twice if it has more than `most_held` frames. Frames
    after the end are zeros.
    """

    def __init__(self, blocks: Callable[[], Blocks], bands: int, most_held: int = HELD):
        self.bands, self.samples = bands, 0
        self.frames, loudest = 0, float(SILENCE)
        found: list[np.ndarray] = []
        for one in log_power_blocks(self.counted(blocks()), bands):
            self.frames += len(one)
            loudest = max(loudest, float(one.max()))
            if self.frames <= most_held:
                found.append(one)
            else:
                found.clear()
        self.loudest = loudest
        self.coming = iter(found) if self.frames <= most_held else log_power_blocks(blocks(), bands)
        self.first = 0  # frame that `held` begins with
        self.held = self.seen = np.zeros((0, bands), dtype=np.float32)

    def counted(self, blocks: Blocks) -> Iterator[np.ndarray]:
        for block in blocks:
            self.samples += len(block)
            yield block

    def window(self, first: int, count: int) -> np.ndarray:
        """Features [bands, count] from a frame on that is not before that of the last call."""
        self.drop(first)
        while self.first + len(self.held) < min(first + count, self.frames):
            self.held = np.concatenate([self.held, next(self.coming)])
            self.drop(first)
        found = np.zeros((self.bands, count), dtype=np.float32)
        self.seen = self.held[:count]
        found[:, : len(self.seen)] = scaled(self.seen, self.loudest)
        return found

    def silent(self) -> bool:
        """Whether every sample of the latest window is 0, as far as there is audio."""
        return bool(self.seen.max(initial=SILENCE) <= SILENCE)

    def drop(self, first: int) -> None:
        gone = min(first - self.first, len(self.held))
        assert gone >= 0, "windows go forwards"
        self.held = self.held[gone:]
        self.first += gone

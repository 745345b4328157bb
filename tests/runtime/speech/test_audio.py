"""Audio files of every kind, and what is no audio: samples at 16 kHz, or one line with the reason."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from seq2engine.errors import MissingPackageError, RequestError
from seq2engine.runtime.speech.audio import PIECE, audio_from, speech_from
from seq2engine.runtime.speech.features import RATE


def tone(rate: int, seconds: float = 1.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * 440 * np.arange(round(rate * seconds)) / rate)).astype(np.float32)


def samples_of(source: object, rate: int = RATE) -> np.ndarray:
    return np.concatenate([*audio_from(source, rate).blocks(), np.zeros(0, dtype=np.float32)])


@pytest.mark.parametrize(
    ("name", "subtype", "steps"),
    [
        ("a.wav", "PCM_U8", 2**7),
        ("a.wav", "PCM_16", 2**15),
        ("a.wav", "PCM_24", 2**23),
        ("a.wav", "FLOAT", 2**24),
        ("a.flac", "PCM_16", 2**15),
    ],
)
def test_depths_and_formats(tmp_path, name, subtype, steps):
    soundfile.write(tmp_path / name, tone(RATE), RATE, subtype=subtype)
    found = samples_of(tmp_path / name)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, tone(RATE), rtol=0, atol=1 / steps + 2.0**-24)


@pytest.mark.parametrize("channels", [2, 6])
def test_channels_are_mixed(tmp_path, channels):
    path = tmp_path / "many.wav"
    parts = np.stack([tone(RATE) * (number + 1) / channels for number in range(channels)], axis=1)
    soundfile.write(path, parts, RATE, subtype="FLOAT")
    np.testing.assert_allclose(samples_of(path), parts.mean(axis=1), rtol=0, atol=2.0**-22)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_other_rates_are_resampled(tmp_path, rate):
    path = tmp_path / "other.wav"
    soundfile.write(path, tone(rate, 2.0), rate, subtype="FLOAT")
    found, expected = samples_of(path), tone(RATE, 2.0)
    assert abs(len(found) - len(expected)) <= 1
    # Away from the ends, where the resampling filter sees silence. soxr's HQ filter has 20 bits: its pass band is flat,
    # and images are suppressed, to 2^-20 of the amplitude, which is 0.5, each.
    middle = slice(RATE // 2, 3 * RATE // 2)
    np.testing.assert_allclose(found[middle], expected[middle], rtol=0, atol=2 * 0.5 * 2.0**-20)


def test_a_long_file_comes_in_pieces(tmp_path):
    path = tmp_path / "long.wav"
    soundfile.write(path, np.zeros(2 * PIECE + 5, dtype=np.float32), RATE)
    assert [len(block) for block in audio_from(path).blocks()] == [PIECE, PIECE, 5]


@pytest.mark.parametrize("dtype", ["int16", "int32", "uint8", "float64"])
def test_arrays_of_integers_are_scaled(dtype):
    kind = np.dtype(dtype)
    wave = tone(RATE, 0.1)
    if kind.kind == "f":
        given = wave.astype(kind)
    else:
        top = np.iinfo(kind).max // (2 if kind.kind == "u" else 1)
        given = (wave.astype(np.float64) * top + (128 if kind.kind == "u" else 0)).astype(kind)
    np.testing.assert_allclose(samples_of(given), wave, rtol=0, atol=2 / 2**7 if kind.kind == "u" else 2 / 2**15)


def test_arrays_have_rates_and_channels():
    assert len(samples_of(tone(8000), 8000)) == pytest.approx(RATE, abs=1)
    assert samples_of(np.stack([tone(RATE), -tone(RATE)], axis=1)).max() == 0.0


@pytest.mark.parametrize("wrong", [np.zeros((2, 2, 2)), np.zeros(3, dtype=bool), np.array("text")])
def test_an_array_that_is_no_audio(wrong):
    with pytest.raises(RequestError, match="expected samples"):
        audio_from(wrong)


def test_files_that_are_no_audio(tmp_path):
    text = tmp_path / "text.wav"
    text.write_text("this is no audio\n" * 100)
    raw = tmp_path / "samples.raw"
    raw.write_bytes(bytes(100))
    empty = tmp_path / "empty.wav"
    empty.touch()
    for path in (text, raw, empty):
        with pytest.raises(RequestError, match=r"not audio that libsndfile reads.*ffmpeg") as refused:
            samples_of(path)
        *_, given, made = str(refused.value).split()
        assert (given, made) == (str(path), {".wav": f"{path.stem}.flac", ".raw": f"{path.stem}.wav"}[path.suffix])
    with pytest.raises(RequestError, match="No such file"):
        samples_of(tmp_path / "missing.wav")
    with pytest.raises(RequestError, match="is not a regular file"):
        samples_of(tmp_path)


def test_a_truncated_file_gives_what_is_there(tmp_path):
    path = tmp_path / "cut.wav"
    soundfile.write(path, tone(RATE, 2.0), RATE, subtype="PCM_16")
    path.write_bytes(path.read_bytes()[: 44 + 2 * RATE])
    np.testing.assert_allclose(samples_of(path), tone(RATE), rtol=0, atol=2.0**-15)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_samples_that_are_not_numbers(tmp_path, value):
    wave = tone(RATE)
    wave[100] = value
    soundfile.write(tmp_path / "nan.wav", wave, RATE, subtype="FLOAT")
    for source in (wave, tmp_path / "nan.wav"):
        with pytest.raises(RequestError, match="not finite"):
            samples_of(source)


def test_short_audio_is_padded_and_long_audio_is_not():
    short = speech_from(audio_from(tone(RATE, 0.5)), 80, RATE)
    assert (short.short, short.seconds, short.features.frames) == (True, 0.5, 100)
    long = speech_from(audio_from(tone(RATE, 1.5)), 80, RATE)
    assert (long.short, long.seconds, long.features.frames) == (False, 1.5, 150)
    nothing = speech_from(audio_from(np.zeros(0, dtype=np.float32)), 80, RATE)
    assert (nothing.short, nothing.seconds) == (True, 0.0)


@pytest.mark.parametrize("package", ["soundfile", "soxr"])
def test_a_missing_package_is_one_line(tmp_path, monkeypatch, package):
    soundfile.write(tmp_path / "a.wav", tone(8000), 8000)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=rf"needs {package}.*seq2engine\[audio\]"):
        samples_of(Path(tmp_path / "a.wav"))

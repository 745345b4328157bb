"""Tokenizers of fairseq models: a dictionary for each side, and merge codes that split words into its subwords.

Text is expected as the model was trained on it: words and punctuation separated by spaces.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seq2engine.common.json_files import read_text, typed_from_json

from .base import ABOUT, TwoSided, no_language
from .subwords import GOES_ON, MergeCodes

START, PAD, END, UNKNOWN = range(4)
SPECIALS = 4  # which fairseq puts before the words of a dictionary's file
OVERWRITE = "#fairseq:overwrite"  # on a line whose word gets a second id
CODES = "codes"
NAMES = ("<s>", "<pad>", "</s>", "<unk>")


@dataclass(frozen=True)
class Words:
    """A dictionary: its words in the order of their ids."""

    words: tuple[str, ...] = field(repr=False)
    ids: dict[str, int] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", {word: i for i, word in enumerate(self.words, SPECIALS)})

    def decode(self, ids: Sequence[int]) -> str:
        words = [self.words[i - SPECIALS] for i in ids if SPECIALS <= i < SPECIALS + len(self.words)]
        return f"{' '.join(words)} ".replace(f"{GOES_ON} ", "").rstrip(" ")

    def names(self, ids: Sequence[int]) -> list[str]:
        """The word of each id; a model may have more ids than there are words."""
        known = dict(enumerate((*NAMES, *self.words)))
        return [known.get(i, f"<{i}>") for i in ids]


@dataclass(frozen=True)
class FairseqTokenizer(TwoSided[Words]):
    codes: MergeCodes | None = None

    def encode_source(self, text: str, language: str | None = None) -> list[int]:
        no_language(language)
        return self.encode(text, self.source)

    def encode_target(self, text: str) -> list[int]:
        return self.encode(text, self.target)

    def unknown_source(self, text: str) -> list[str]:
        return self.unknown_parts(text, self.source)

    def unknown_target(self, text: str) -> list[str]:
        return self.unknown_parts(text, self.target)

    def encode(self, text: str, side: Words) -> list[int]:
        return [*(side.ids.get(part, UNKNOWN) for part in self.subwords(text)), END]

    def unknown_parts(self, text: str, side: Words) -> list[str]:
        unknown = (part.removesuffix(GOES_ON) or part for part in self.subwords(text) if part not in side.ids)
        return list(dict.fromkeys(unknown))

    def subwords(self, text: str) -> list[str]:
        words = text.split()
        return [part for word in words for part in self.codes.split(word)] if self.codes else words

    def write(self, folder: Path) -> None:
        about: dict[str, Any] = {"kind": "fairseq", "codes": self.codes is not None}
        for name, side in (("source", self.source), ("target", self.target)):
            lines = "".join(f"{word} 1 {OVERWRITE}\n" for word in side.words)  # counts are not used
            (folder / f"dict.{name}.txt").write_text(lines, encoding="utf-8", newline="")
        if self.codes is not None:
            (folder / CODES).write_text(self.codes.text, encoding="utf-8", newline="")
        (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def words_from_file(path: Path) -> Words:
    """The words of a dict.LANGUAGE.txt, a line of which is a word and how often it was seen."""
    words = []
    seen: set[str] = set()
    for number, line in enumerate(read_exactly(path).rstrip("\n").split("\n"), 1):
        overwrite = line.rstrip().endswith(f" {OVERWRITE}")
        word, _, count = line.rstrip().removesuffix(f" {OVERWRITE}").rpartition(" ")
        if not word or not count.isdigit():
            raise ValueError(f"line {number} of {path.name} is {line[:40]!r}, expected a word and its count")
        if word in seen and not overwrite:
            raise ValueError(f"line {number} of {path.name} gives the word {word!r} a second time")
        seen.add(word)
        words.append(word)
    return Words(tuple(words))


def read_exactly(path: Path) -> str:
    """A file's text with unchanged line ends: words may contain characters that other readers split at."""
    return read_text(path)


@dataclass(frozen=True)
class AboutFields:
    codes: bool


def fairseq_from_about(about: dict[str, Any], folder: Path) -> FairseqTokenizer:
    codes = MergeCodes(read_exactly(folder / CODES)) if typed_from_json(AboutFields, about).codes else None
    source, target = (words_from_file(folder / f"dict.{side}.txt") for side in ("source", "target"))
    return FairseqTokenizer(source, target, codes)

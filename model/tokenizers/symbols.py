"""Text to token ids and back, by a plain table of symbols: characters, or words between spaces."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .base import ABOUT, no_language

SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")
PAD, START, END, UNKNOWN = range(4)
SPLITS = ("characters", "words")


@dataclass(frozen=True)
class SymbolTable:
    """One side of a tokenizer: its symbols in the order of their ids, the specials first."""

    split: str
    symbols: tuple[str, ...]
    lower: bool = False  # text is lower-cased first

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", {symbol: i for i, symbol in enumerate(self.symbols)})

    def encode(self, text: str) -> list[int]:
        ids: dict[str, int] = self.ids  # type: ignore[attr-defined]
        return [ids.get(part, UNKNOWN) for part in parts_of(text.lower() if self.lower else text, self.split)]

    def decode(self, ids: Iterable[int]) -> str:
        glue = "" if self.split == "characters" else " "
        return glue.join(self.symbols[i] for i in ids if i >= len(SPECIALS))


@dataclass(frozen=True)
class SymbolTokenizer:
    """Source text is followed by the end token; target text by it too."""

    source: SymbolTable
    target: SymbolTable

    def encode_source(self, text: str, language: str | None = None) -> list[int]:
        no_language(language)
        return [*self.source.encode(text), END]

    def encode_target(self, text: str) -> list[int]:
        return [*self.target.encode(text), END]

    def decode_target(self, ids: Sequence[int]) -> str:
        return self.target.decode(ids)

    def language_id(self, language: str) -> int:
        no_language(language)
        raise AssertionError("no_language always refuses a language")

    def write(self, folder: Path) -> None:
        sides = {
            name: {"split": table.split, "lower": table.lower, "symbols": table.symbols[len(SPECIALS) :]}
            for name, table in (("source", self.source), ("target", self.target))
        }
        about = json.dumps({"kind": "symbols", **sides}, indent=1, ensure_ascii=False) + "\n"
        (folder / ABOUT).write_text(about, encoding="utf-8")


def parts_of(text: str, split: str) -> list[str]:
    return list(text) if split == "characters" else text.split()


def table_from_texts(texts: Iterable[str], split: str, lower: bool = False) -> SymbolTable:
    """A table of every symbol that occurs, in sorted order, so that the same texts give the same ids."""
    symbols = {symbol for text in texts for symbol in parts_of(text.lower() if lower else text, split)}
    return SymbolTable(split, (*SPECIALS, *sorted(symbols)), lower)


def symbols_from_about(about: dict[str, Any]) -> SymbolTokenizer:
    source, target = (
        SymbolTable(about[side]["split"], (*SPECIALS, *about[side]["symbols"]), about[side]["lower"])
        for side in ("source", "target")
    )
    if wrong := [table.split for table in (source, target) if table.split not in SPLITS]:
        raise ValueError(f"splits by {wrong[0]!r}, expected one of {', '.join(SPLITS)}")
    return SymbolTokenizer(source, target)

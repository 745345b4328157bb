"""Text to token ids and back, by a plain table of symbols: characters, or words between spaces."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .base import ABOUT, no_language

SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")
PAD, START, END, UNKNOWN = range(4)
SPLITS = ("characters", "words")


@dataclass(frozen=True)
class SymbolTable:
    """One side of a tokenizer: its symbols in the order of their ids."""

    split: str
    symbols: tuple[str, ...]
    lower: bool = False  # text is lower-cased first
    specials: tuple[str, ...] = SPECIALS  # the symbols that are no text; `<unk>` stands for every unknown one
    end: str | None = "</s>"  # the special that follows the text
    ids: dict[str, int] = field(init=False, compare=False, repr=False)  # of those that are text
    unknown: int = field(init=False, compare=False, repr=False)
    tail: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        ids = {symbol: i for i, symbol in enumerate(self.symbols)}
        special = {symbol: ids.pop(symbol) for symbol in self.specials if symbol in ids}
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "unknown", special["<unk>"])
        object.__setattr__(self, "tail", () if self.end is None else (special[self.end],))

    def encode(self, text: str) -> list[int]:
        parts = parts_of(text.lower() if self.lower else text, self.split)
        return [self.ids.get(part, self.unknown) for part in parts]

    def unknown_parts(self, text: str) -> list[str]:
        parts = parts_of(text.lower() if self.lower else text, self.split)
        return [part for part in dict.fromkeys(parts) if part not in self.ids]

    def decode(self, ids: Iterable[int]) -> str:
        glue = "" if self.split == "characters" else " "
        known = (self.symbols[i] for i in ids if 0 <= i < len(self.symbols))
        return glue.join(symbol for symbol in known if symbol in self.ids)


@dataclass(frozen=True)
class SymbolTokenizer:
    source: SymbolTable
    target: SymbolTable

    def encode_source(self, text: str, language: str | None = None) -> list[int]:
        no_language(language)
        return [*self.source.encode(text), *self.source.tail]

    def encode_target(self, text: str) -> list[int]:
        return [*self.target.encode(text), *self.target.tail]

    def unknown_source(self, text: str) -> list[str]:
        return self.source.unknown_parts(text)

    def unknown_target(self, text: str) -> list[str]:
        return self.target.unknown_parts(text)

    def decode_target(self, ids: Sequence[int]) -> str:
        return self.target.decode(ids)

    def source_tokens(self, ids: Sequence[int]) -> list[str]:
        return [self.source.symbols[i] for i in ids]

    def target_tokens(self, ids: Sequence[int]) -> list[str]:
        return [self.target.symbols[i] for i in ids]

    def language_id(self, language: str) -> int:
        no_language(language)
        raise AssertionError("no_language always refuses a language")

    def write(self, folder: Path) -> None:
        fields = ("split", "lower", "specials", "end", "symbols")
        sides = {name: {key: getattr(getattr(self, name), key) for key in fields} for name in ("source", "target")}
        about = json.dumps({"kind": "symbols", **sides}, indent=1, ensure_ascii=False) + "\n"
        (folder / ABOUT).write_text(about, encoding="utf-8")


def parts_of(text: str, split: str) -> list[str]:
    return list(text) if split == "characters" else text.split()


def table_from_texts(texts: Iterable[str], split: str, lower: bool = False) -> SymbolTable:
    """A table of every symbol that occurs, in sorted order, so that the same texts give the same ids."""
    symbols = {symbol for text in texts for symbol in parts_of(text.lower() if lower else text, split)}
    return SymbolTable(split, (*SPECIALS, *sorted(symbols - set(SPECIALS))), lower)


def symbols_from_about(about: dict[str, Any]) -> SymbolTokenizer:
    source, target = (
        SymbolTable(
            about[side]["split"],
            tuple(about[side]["symbols"]),
            about[side]["lower"],
            tuple(about[side]["specials"]),
            about[side]["end"],
        )
        for side in ("source", "target")
    )
    if wrong := [table.split for table in (source, target) if table.split not in SPLITS]:
        raise ValueError(f"splits by {wrong[0]!r}, expected one of {', '.join(SPLITS)}")
    return SymbolTokenizer(source, target)

"""Text to token ids and back, by a plain table of symbols: characters, or words between spaces."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seq2engine.common.json_files import shortened, typed_from_json

from .base import ABOUT, TwoSided, no_language

SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")
PAD, START, END, UNKNOWN = range(4)
SPLITS = ("characters", "words")


@dataclass(frozen=True)
class SymbolTable:
    """One side of a tokenizer: its symbols in the order of their ids."""

    split: str
    symbols: tuple[str, ...]
    lower: bool = False  # text is lower-cased first
    specials: tuple[str, ...] = SPECIALS  # the symbols that are not text; `<unk>` stands for every unknown one
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

    def names(self, ids: Iterable[int]) -> list[str]:
        """The symbol of each id; a model may have more ids than there are symbols."""
        return [self.symbols[i] if 0 <= i < len(self.symbols) else f"<{i}>" for i in ids]

    def decode(self, ids: Iterable[int]) -> str:
        glue = "" if self.split == "characters" else " "
        known = (self.symbols[i] for i in ids if 0 <= i < len(self.symbols))
        return glue.join(symbol for symbol in known if symbol in self.ids)


@dataclass(frozen=True)
class SymbolTokenizer(TwoSided[SymbolTable]):
    def encode_source(self, text: str, language: str | None = None) -> list[int]:
        no_language(language)
        return [*self.source.encode(text), *self.source.tail]

    def encode_target(self, text: str) -> list[int]:
        return [*self.target.encode(text), *self.target.tail]

    def unknown_source(self, text: str) -> list[str]:
        return self.source.unknown_parts(text)

    def unknown_target(self, text: str) -> list[str]:
        return self.target.unknown_parts(text)

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


@dataclass(frozen=True)
class SideFields:
    """One side as about.json has it."""

    split: str
    lower: bool
    specials: tuple[str, ...]
    end: str | None
    symbols: tuple[str, ...]


@dataclass(frozen=True)
class AboutFields:
    source: SideFields
    target: SideFields


def symbols_from_about(about: dict[str, Any]) -> SymbolTokenizer:
    fields = typed_from_json(AboutFields, about)
    return SymbolTokenizer(*(table_from_fields(name, getattr(fields, name)) for name in ("source", "target")))


def table_from_fields(name: str, side: SideFields) -> SymbolTable:
    if side.split not in SPLITS:
        raise ValueError(f"splits by {shortened(side.split)}, expected one of {', '.join(SPLITS)}")
    special = [symbol for symbol in ("<unk>", side.end) if symbol is not None]
    if lost := [symbol for symbol in special if symbol not in side.symbols or symbol not in side.specials]:
        raise ValueError(f"{name} has no symbol {shortened(lost[0])}, expected it among symbols and specials")
    return SymbolTable(side.split, side.symbols, side.lower, side.specials, side.end)

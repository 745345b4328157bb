"""Text to token ids and back, by a plain table of symbols: characters, or words between spaces."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError

SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")
PAD, START, END, UNKNOWN = range(4)
SPLITS = ("characters", "words")
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class SymbolTable:
    """One side of a tokenizer: its symbols in the order of their ids, the specials first."""

    split: str
    symbols: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", {symbol: i for i, symbol in enumerate(self.symbols)})

    def encode(self, text: str) -> list[int]:
        parts = list(text) if self.split == "characters" else text.split()
        ids: dict[str, int] = self.ids  # type: ignore[attr-defined]
        return [ids.get(part, UNKNOWN) for part in parts]

    def decode(self, ids: Iterable[int]) -> str:
        glue = "" if self.split == "characters" else " "
        return glue.join(self.symbols[i] for i in ids if i >= len(SPECIALS))


@dataclass(frozen=True)
class SymbolTokenizer:
    """Source text is followed by the end token; target text by it too when it is a training target."""

    source: SymbolTable
    target: SymbolTable

    def encode_source(self, text: str) -> list[int]:
        return [*self.source.encode(text), END]

    def encode_target(self, text: str) -> list[int]:
        return [*self.target.encode(text), END]

    def decode_target(self, ids: Iterable[int]) -> str:
        return self.target.decode(ids)

    def to_json(self) -> str:
        sides = {
            name: {"split": table.split, "symbols": table.symbols[len(SPECIALS) :]}
            for name, table in (("source", self.source), ("target", self.target))
        }
        return json.dumps({"kind": "symbols", **sides}, indent=1, ensure_ascii=False) + "\n"


def table_from_texts(texts: Iterable[str], split: str) -> SymbolTable:
    """A table of every symbol that occurs, in sorted order, so that the same texts give the same ids."""
    symbols = {symbol for text in texts for symbol in (text if split == "characters" else text.split())}
    return SymbolTable(split, (*SPECIALS, *sorted(symbols)))


def read_tokenizer(folder: Path) -> SymbolTokenizer:
    path = folder / TOKENIZER
    try:
        values = json.loads(path.read_text())
        source, target = (
            SymbolTable(values[side]["split"], (*SPECIALS, *values[side]["symbols"])) for side in ("source", "target")
        )
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a symbol table ({error})") from error
    if problems := [table.split for table in (source, target) if table.split not in SPLITS]:
        raise CheckpointError(f"{path} splits by {problems[0]!r}, expected one of {', '.join(SPLITS)}")
    return SymbolTokenizer(source, target)

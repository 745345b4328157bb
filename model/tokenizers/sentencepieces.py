"""Tokenizers of SentencePiece models: Marian, M2M100, mBART, NLLB, Pegasus, T5, each with its own numbering of pieces.

Special tokens written out in a text are text like any other: writing `</s>` does not end a source early. Only
T5's sentinels (`<extra_id_0>`) are tokens in a text as well, as they are meant to be written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seq2engine.common.json_files import read_json, read_regular, shortened, typed_from_json
from seq2engine.errors import RequestError, missing_package

from .base import ABOUT
from .languages import language_among
from .vocabulary import Vocabulary

# Where a source's language token goes: before the text, after the end token, or before the text but naming the language
# to translate into, so that a user may also write it there as >>fra<< and the decoder needs none.
PLACES = ("first", "last", "written")
SENTINEL = re.compile(r"(<extra_id_[0-9]{1,4}>)")  # T5's sentinels: tokens that may occur in a text


@dataclass(frozen=True)
class PieceTable:
    """One side of a tokenizer: a SentencePiece model, and the ids of the pieces it cuts a text into."""

    model: bytes = field(repr=False)
    ids: Mapping[str, int] = field(repr=False)  # of text only; special tokens are not in it, so they decode to nothing
    unknown: int
    end: int
    processor: Any = field(init=False, compare=False, repr=False)
    vocabulary: Vocabulary = field(init=False, compare=False, repr=False)
    sentinels: frozenset[str] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "processor", processor_from_bytes(self.model))
        object.__setattr__(self, "sentinels", frozenset(sentinels_among(self.ids)))
        object.__setattr__(self, "vocabulary", Vocabulary(self.ids))
        object.__setattr__(self, "ids", self.vocabulary)

    def encode(self, text: str) -> list[int]:
        return [self.ids.get(piece, self.unknown) for piece in self.cut(text)]

    def cut(self, text: str) -> list[str]:
        """The pieces of a text; a sentinel is a piece of its own where the model has any."""
        if not self.sentinels:
            return list(self.processor.encode(text, out_type=str))
        parts = [part for part in SENTINEL.split(text) if part]
        return [
            piece
            for part in parts
            for piece in ([part] if part in self.sentinels else self.processor.encode(part, out_type=str))
        ]

    def unknown_parts(self, text: str) -> list[str]:
        """Characters that SentencePiece has no piece for, and pieces of its that have no id in this model."""
        found: list[str] = []
        for piece in self.cut(text):
            if piece not in self.ids:
                shown = piece.removeprefix("▁")
                found += shown if self.processor.piece_to_id(piece) == self.processor.unk_id() else [shown or piece]
        return list(dict.fromkeys(found))

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.processor.decode_pieces(
            [piece for piece in map(self.vocabulary.piece, ids) if piece is not None]
        )
        return text.replace("▁", " ").strip()  # pieces of the other side's model are returned unchanged


@dataclass(frozen=True)
class SentencePieceTokenizer:
    source: PieceTable
    target: PieceTable
    languages: dict[str, int] = field(default_factory=dict, repr=False)
    place: str = "first"
    language: str | None = None  # of a source, where none is asked for

    def encode_source(self, text: str, language: str | None = None) -> list[int]:
        named = self.language if language is None else language
        code, rest = (None, text) if named is not None else self.written_language(text)
        if named is not None:
            token = [language_among(named, self.languages)]
        else:
            token = [] if code is None else [self.languages.get(code, self.source.unknown)]
        ids = [*self.source.encode(rest), self.source.end]
        return [*ids, *token] if self.place == "last" else [*token, *ids]

    def encode_target(self, text: str) -> list[int]:
        return [*self.target.encode(text), self.target.end]

    def written_language(self, text: str) -> tuple[str | None, str]:
        """The language that is written before a text, where the model reads it there, and the text without it."""
        if self.place == "written" and text.startswith(">>") and "<<" in text:
            code, rest = text[2:].split("<<", 1)
            return code, rest
        return None, text

    def unknown_source(self, text: str) -> list[str]:
        code, rest = (None, text) if self.language is not None else self.written_language(text)
        language = [] if code is None or code in self.languages else [f">>{code}<<"]
        return [*language, *self.source.unknown_parts(rest)]

    def unknown_target(self, text: str) -> list[str]:
        return self.target.unknown_parts(text)

    def decode_target(self, ids: Sequence[int]) -> str:
        return self.target.decode(ids)

    def source_tokens(self, ids: Sequence[int]) -> list[str]:
        return self.names(self.source, ids)

    def target_tokens(self, ids: Sequence[int]) -> list[str]:
        return self.names(self.target, ids)

    def language_id(self, language: str) -> int:
        token = language_among(language, self.languages)
        if self.place == "written":
            raise RequestError(
                f"this model's decoder takes no language; write >>{language}<< at the start of the source instead"
            )
        return token

    def names(self, table: PieceTable, ids: Sequence[int]) -> list[str]:
        """Pieces, and what else has a name; other special tokens are shown by their number."""
        special = {table.unknown: "<unk>", table.end: "</s>", **{i: name for name, i in self.languages.items()}}
        return [table.vocabulary.piece(i) or special.get(i, f"<{i}>") for i in ids]

    def write(self, folder: Path) -> None:
        about: dict[str, Any] = {
            "kind": "sentencepiece",
            "place": self.place,
            "language": self.language,
            "languages": self.languages,
        }
        sides = {"source": self.source} | ({"target": self.target} if self.target != self.source else {})
        for name, table in sides.items():
            about[name] = {"unknown": table.unknown, "end": table.end}
            (folder / f"{name}.spm").write_bytes(table.model)
            (folder / f"{name}.json").write_text(
                json.dumps(dict(table.ids), ensure_ascii=False) + "\n", encoding="utf-8"
            )
        (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def sentinels_among(pieces: Iterable[str]) -> list[str]:
    return [piece for piece in pieces if piece.startswith("<extra_id_") and SENTINEL.fullmatch(piece)]


def processor_from_bytes(model: bytes) -> Any:
    try:
        from sentencepiece import SentencePieceProcessor
    except ModuleNotFoundError as error:
        if missing := missing_package(error, "this model's tokenizer"):
            raise missing from error
        raise
    processor = SentencePieceProcessor()
    processor.LoadFromSerializedProto(model)
    return processor


def table_from_file(path: Path, ids: Mapping[str, int], unknown: int, end: int) -> PieceTable:
    """A table of a SentencePiece model file; one that cannot be read is a ValueError that names it."""
    try:
        return PieceTable(read_regular(path), ids, unknown, end)
    except RuntimeError as error:
        raise ValueError(f"{path.name} is not a complete SentencePiece model") from error


@dataclass(frozen=True)
class SideFields:
    unknown: int
    end: int


@dataclass(frozen=True)
class AboutFields:
    """about.json; without a target both sides are the source's."""

    place: str
    language: str | None
    languages: dict[str, int]
    source: SideFields
    target: SideFields | None = None


def sentencepieces_from_about(about: dict[str, Any], folder: Path) -> SentencePieceTokenizer:
    fields = typed_from_json(AboutFields, about)
    if fields.place not in PLACES:
        raise ValueError(f"place {shortened(fields.place)}, expected one of {', '.join(PLACES)}")
    source, *others = (
        table_from_file(folder / f"{name}.spm", vocabulary_from_file(folder / f"{name}.json"), side.unknown, side.end)
        for name, side in (("source", fields.source), ("target", fields.target))
        if side is not None
    )
    target = others[0] if others else source
    return SentencePieceTokenizer(source, target, fields.languages, fields.place, fields.language)


def vocabulary_from_file(path: Path) -> dict[str, int]:
    """Pieces and their ids; a ValueError names a file that is anything else."""
    try:
        return typed_from_json(dict[str, int], read_json(path))
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error

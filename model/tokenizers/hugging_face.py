"""A `tokenizer.json` of the package `tokenizers`: it defines how text is cut and which special tokens frame it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seq2engine.common.json_files import parse_json, read_text, typed_from_json
from seq2engine.errors import RequestError, missing_package

from .base import ABOUT
from .languages import language_among, languages_of

FILE = "tokenizer.json"
PANIC = "PanicException"  # of Rust code; it cannot be imported


@dataclass(frozen=True)
class HuggingFaceTokenizer:
    text: str = field(repr=False)  # of tokenizer.json
    end: str  # the end token
    tokenizer: Any = field(init=False, compare=False, repr=False)
    languages: dict[str, int] = field(init=False, compare=False, repr=False)
    end_id: int = field(init=False, compare=False, repr=False)
    unknown_id: int | None = field(init=False, compare=False, repr=False)  # None: every text has tokens
    place: int | None = field(init=False, compare=False, repr=False)  # of the language among a source's ids: 0, -1

    def __post_init__(self) -> None:
        tokenizer = library_tokenizer(self.text)
        if tokenizer.token_to_id(self.end) is None:
            raise ValueError(f"{FILE} has no end token {self.end!r}")
        special = ((token.content, i) for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        languages = languages_of(special)
        with library_errors(ValueError, f"{FILE} cannot be used"):
            frame = tokenizer.encode("").ids
        places = [place for place in (0, -1) if frame and frame[place] in languages.values()]
        object.__setattr__(self, "tokenizer", tokenizer)
        object.__setattr__(self, "languages", languages)
        object.__setattr__(self, "end_id", tokenizer.token_to_id(self.end))
        object.__setattr__(self, "unknown_id", unknown_id_of(parse_json(self.text), tokenizer))
        object.__setattr__(self, "place", places[0] if places else None)

    def encode_source(self, text: str, language: str | None = None) -> list[int]:
        ids: list[int] = self.encoded(text, framed=True).ids
        if language is not None:
            token = language_among(language, self.languages)
            if self.place is None:
                raise RequestError(f"language {language!r} asked for, but this model's sources carry no language")
            ids[self.place] = token
        return ids

    def encode_target(self, text: str) -> list[int]:
        return [*self.encoded(text).ids, self.end_id]

    def encoded(self, text: str, framed: bool = False) -> Any:
        with library_errors(RequestError, f"{FILE} cannot encode this text"):
            return self.tokenizer.encode(text, add_special_tokens=framed)

    def unknown_source(self, text: str) -> list[str]:
        if self.unknown_id is None:
            return []
        encoding = self.encoded(text)
        places = zip(encoding.ids, encoding.offsets, strict=True)
        return list(dict.fromkeys(text[start:end] for i, (start, end) in places if i == self.unknown_id))

    def unknown_target(self, text: str) -> list[str]:
        return self.unknown_source(text)

    def decode_target(self, ids: Sequence[int]) -> str:
        with library_errors(RequestError, f"{FILE} cannot decode the output"):
            return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def source_tokens(self, ids: Sequence[int]) -> list[str]:
        return self.names(ids)

    def target_tokens(self, ids: Sequence[int]) -> list[str]:
        return self.names(ids)

    def language_id(self, language: str) -> int:
        return language_among(language, self.languages)

    def names(self, ids: Sequence[int]) -> list[str]:
        return [self.tokenizer.id_to_token(i) or f"<{i}>" for i in ids]

    def write(self, folder: Path) -> None:
        (folder / FILE).write_text(self.text, encoding="utf-8")
        about = json.dumps({"kind": "huggingface", "end": self.end}, indent=1, ensure_ascii=False) + "\n"
        (folder / ABOUT).write_text(about, encoding="utf-8")


def library_tokenizer(text: str) -> Any:
    """The library's tokenizer of a tokenizer.json's text, which gives every line whole and unpadded."""
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        if missing := missing_package(error, "this model's tokenizer"):
            raise missing from error
        raise
    with library_errors(ValueError, f"{FILE} cannot be read"):
        tokenizer = Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@contextmanager
def library_errors(kind: type[ValueError | RequestError], what: str) -> Iterator[None]:
    """What the library raises in the block becomes an error of that kind, in one line.

    Many problems of a file show only when a text needs the part that has them. The library raises nothing more exact
    than Exception, and its panics are not even that.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise  # an interrupt
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise kind(f"{what}: {reason}") from error


def unknown_id_of(values: dict[str, Any], tokenizer: Any) -> int | None:
    """The id of what a tokenizer.json's model makes of text it does not know; None where it has no such token."""
    model: dict[str, Any] = values["model"]  # the library has read it
    if model.get("byte_fallback"):
        return None
    if (name := model.get("unk_token")) is not None:
        found: int | None = tokenizer.token_to_id(name)
        return found
    place: int | None = model.get("unk_id")  # of Unigram: a place in its list of pieces, which are numbered in order
    return place


def framed_by_language(text: str, language: str, end: str, place: str) -> str:
    """A tokenizer.json whose sources carry a language, `first` or `last`.

    Files of such models often differ from how the models were trained, because the class that reads them overrides
    them; here the file alone has to be right.
    """
    return framed(text, [language, "$A", end] if place == "first" else ["$A", end, language])


def framed(text: str, frame: Sequence[str]) -> str:
    """A tokenizer.json whose sources are framed by special tokens; $A is the source in a frame."""
    tokenizer = library_tokenizer(text)
    from tokenizers.processors import TemplateProcessing

    tokens = [(name, tokenizer.token_to_id(name)) for name in frame if name != "$A"]
    if missing := [name for name, i in tokens if i is None]:
        raise ValueError(f"{FILE} has no token {missing[0]!r}")
    with library_errors(ValueError, f"{FILE} cannot be used"):
        tokenizer.post_processor = TemplateProcessing(single=list(frame), special_tokens=tokens)
        return str(tokenizer.to_str())


@dataclass(frozen=True)
class AboutFields:
    end: str


def hugging_face_from_about(about: dict[str, Any], folder: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(read_text(folder / FILE), typed_from_json(AboutFields, about).end)

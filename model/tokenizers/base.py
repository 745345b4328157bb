"""The tokenizer interface: text to ids and back, and the files that store it in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from seq2engine.errors import RequestError

FOLDER = "tokenizer"  # inside a checkpoint and inside a bundle
ABOUT = "about.json"  # inside that folder: {"kind": ..., and what else the kind needs}

LISTED = 10  # unknown characters that a message shows; it counts all


class Tokenizer(Protocol):
    """Both sides of a model. A language is the model's own name of one, such as `fra_Latn`; most models have none."""

    def encode_source(self, text: str, language: str | None = None) -> list[int]:
        """What the encoder is fed: the ids of a line of text with the special tokens the model was trained with."""

    def encode_target(self, text: str) -> list[int]:
        """The ids the decoder should emit: the text's tokens and the end token, without a start or language token."""

    def unknown_source(self, text: str) -> list[str]:
        """Characters or words of a source that the model has no token for, each once: what becomes <unk> in it."""

    def unknown_target(self, text: str) -> list[str]:
        """The same of a target."""

    def decode_target(self, ids: Sequence[int]) -> str:
        """The text of the ids the decoder emitted; special tokens have none."""

    def source_tokens(self, ids: Sequence[int]) -> list[str]:
        """The token of each id as the encoder knows it, for people to read; special ones too, such as </s>."""

    def target_tokens(self, ids: Sequence[int]) -> list[str]:
        """The same for the decoder."""

    def language_id(self, language: str) -> int:
        """The token that asks the decoder for a language; raises a RequestError that lists those there are."""

    def write(self, folder: Path) -> None:
        """Writes its files, about.json included, into a folder that is there."""


def unknown_text(unknown: Sequence[str]) -> str:
    """A message such as: 2 characters the model has no token for: 'a', 'b'."""
    what = "character" if all(len(part) == 1 for part in unknown) else "word"
    listed = ", ".join(map(repr, unknown[:LISTED])) + (", ..." if len(unknown) > LISTED else "")
    return f"{len(unknown)} {what}{'' if len(unknown) == 1 else 's'} the model has no token for: {listed}"


def no_language(language: str | None) -> None:
    """For tokenizers without languages: refuses one that was asked for."""
    if language is not None:
        raise without_languages(language)


def without_languages(language: str) -> RequestError:
    return RequestError(f"language {language!r} asked for, but this model's tokenizer has no languages")


class Side(Protocol):
    """One side of a tokenizer that has a table of tokens for each."""

    def decode(self, ids: Sequence[int]) -> str: ...

    def names(self, ids: Sequence[int]) -> list[str]: ...


SideKind = TypeVar("SideKind", bound=Side)


@dataclass(frozen=True)
class TwoSided(Generic[SideKind]):
    """What tokenizers with a table for each side, and without languages, have in common."""

    source: SideKind
    target: SideKind

    def decode_target(self, ids: Sequence[int]) -> str:
        return self.target.decode(ids)

    def source_tokens(self, ids: Sequence[int]) -> list[str]:
        return self.source.names(ids)

    def target_tokens(self, ids: Sequence[int]) -> list[str]:
        return self.target.names(ids)

    def language_id(self, language: str) -> int:
        raise without_languages(language)


class Coder(Protocol):
    """The part of the tokenizer interface that translation needs; see `model/tokenizers/base.py`."""

    def encode_source(self, text: str, language: str | None = None) -> list[int]: ...

    def encode_target(self, text: str) -> list[int]: ...

    def unknown_source(self, text: str) -> list[str]: ...

    def unknown_target(self, text: str) -> list[str]: ...

    def decode_target(self, ids: Sequence[int]) -> str: ...

    def target_tokens(self, ids: Sequence[int]) -> list[str]: ...

    def language_id(self, language: str) -> int: ...

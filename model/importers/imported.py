"""The result of every importer: a model of ours, its decoding defaults, and notes for the user."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from seq2engine.errors import CheckpointError

from ..images import ImageConfig
from ..speech import SpeechConfig
from ..tokenizers.base import Tokenizer
from ..transformer import Transformer


@dataclass(frozen=True)
class Imported:
    """A foreign checkpoint as one of ours.

    `generation` holds fields of the runtime's SearchOptions as JSON values; a field it does not name keeps its default.
    `notes` are one line each: settings that were not carried over, or tables that changed their form. `tokenizer` is
    None where it has no files, or unusable ones, which is then a note.
    """

    model: Transformer
    generation: dict[str, Any]
    notes: tuple[str, ...]
    kind: str
    tokenizer: Tokenizer | None
    speech: SpeechConfig | None = None  # of a model that takes audio
    images: ImageConfig | None = None  # of a model that takes images


def tokenizer_or_note(read: Callable[[], Tokenizer | None]) -> tuple[Tokenizer | None, tuple[str, ...]]:
    """What a reader of tokenizers finds. One that cannot be used leaves a model that takes token ids, and a note."""
    try:
        return read(), ()
    except CheckpointError as error:
        return None, (f"takes no text, because {error}",)

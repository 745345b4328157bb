"""Reads the tokenizer of a checkpoint or a bundle, whatever its kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from seq2engine.common.json_files import read_object, shortened
from seq2engine.errors import CheckpointError

from .base import ABOUT, FOLDER, Tokenizer
from .byt5 import bytes_from_about
from .fairseq import fairseq_from_about
from .hugging_face import hugging_face_from_about
from .sentencepieces import sentencepieces_from_about
from .symbols import symbols_from_about

# kind -> how to make it of about.json's other values and the folder its other files are in; a ValueError where it fails
KINDS: dict[str, Callable[[dict[str, Any], Path], Tokenizer]] = {
    "symbols": lambda about, folder: symbols_from_about(about),
    "sentencepiece": sentencepieces_from_about,
    "huggingface": hugging_face_from_about,
    "fairseq": fairseq_from_about,
    "bytes": lambda about, folder: bytes_from_about(about),
}


def read_tokenizer(root: Path) -> Tokenizer:
    """The tokenizer that travels in a checkpoint or bundle folder."""
    path = root / FOLDER / ABOUT
    if not path.is_file():
        raise CheckpointError(f"{root} has no tokenizer ({FOLDER}/{ABOUT}), so it takes no text, only token ids")
    try:
        about = read_object(path)
        kind = about.pop("kind", None)
        if not isinstance(kind, str) or kind not in KINDS:
            raise ValueError(f"kind {shortened(kind)}, expected one of {', '.join(KINDS)}")
        return KINDS[kind](about, path.parent)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be used ({error}); copy or import the checkpoint again") from error

"""Reads the tokenizer of a checkpoint or a bundle, whatever its kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seq2engine.errors import CheckpointError

from .base import ABOUT, FOLDER, Tokenizer
from .fairseq import fairseq_from_about
from .hugging_face import hugging_face_from_about
from .sentencepieces import sentencepieces_from_about
from .symbols import symbols_from_about

# kind -> how to make it of about.json's values and the folder its other files are in
KINDS: dict[str, Callable[[dict[str, Any], Path], Tokenizer]] = {
    "symbols": lambda about, folder: symbols_from_about(about),
    "sentencepiece": sentencepieces_from_about,
    "huggingface": hugging_face_from_about,
    "fairseq": fairseq_from_about,
}


def read_tokenizer(root: Path) -> Tokenizer:
    """The tokenizer that travels in a checkpoint or bundle folder."""
    path = root / FOLDER / ABOUT
    if not path.is_file():
        raise CheckpointError(f"{root} has no tokenizer ({FOLDER}/{ABOUT}), so it takes no text, only token ids")
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        kind = about["kind"]
        if kind not in KINDS:
            raise ValueError(f"kind {kind!r}, expected one of {', '.join(KINDS)}")
        return KINDS[kind](about, path.parent)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be used ({error}); copy or import the checkpoint again") from error

"""Selects the files of a checkpoint in a Hugging Face hub repository, and records where it comes from.

A repository may hold the same weights for five libraries; only the files that are read are downloaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from seq2engine.common.hub import SCHEME, Note, Snapshot, hub_name, is_hub_name, snapshot_of
from seq2engine.common.progress import Progress, silent
from seq2engine.errors import HubError

from .tokenizers.base import FOLDER as TOKENIZER
from .tokenizers.importing import FILES as TOKENIZER_FILES

# Of a Hugging Face folder, the best first: safetensors before pickles, whole files before shards.
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
SMALL = (
    *("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "target_vocab.json"),
    *TOKENIZER_FILES,
    *("generation.json", "speech.json", "image.json", "seq2engine.json"),  # of checkpoints of ours
    "README.md",  # for its licence
)
BUNDLE = "manifest.json"


@dataclass(frozen=True)
class Located:
    """A checkpoint's files, and what is known of where they come from: name, revision, commit, licence."""

    path: Path
    origin: dict[str, str] = field(default_factory=dict)


def located(name: str | os.PathLike[str], progress: Progress = silent, note: Note = lambda text: None) -> Located:
    """A path as it is; a model of the hub (hf:NAME) once it is in the hub's cache."""
    if not is_hub_name(name):
        return Located(Path(name))
    asked = hub_name(name)

    def choose(names: Sequence[str]) -> list[str]:
        return checkpoint_files(names, f"{asked}")

    snapshot = snapshot_of(asked, choose, progress, note)
    return Located(snapshot.folder, origin_of(snapshot))


def checkpoint_files(names: Sequence[str], where: str) -> list[str]:
    """The files that are read, the weights last; one kind of weights, the first there is."""
    if BUNDLE in names:
        raise HubError(f"{where} is a bundle, expected a checkpoint; use it where a bundle is: seq2engine run {where}")
    if "config.json" not in names:
        raise HubError(f"{where} has no config.json, so it is not a model that is understood; name another one")
    weights = [name for name in WEIGHTS if name in names]
    if not weights:
        raise HubError(f"{where} has no weights that are read; expected one of {', '.join(WEIGHTS)}")
    small = [name for name in names if name in SMALL or name.startswith(f"{TOKENIZER}/")]
    return [*small, weights[0]]


def origin_of(snapshot: Snapshot) -> dict[str, str]:
    origin = {
        "name": f"{SCHEME}{snapshot.name.repo}",
        "revision": snapshot.name.revision or "main",
        "commit": snapshot.commit,
    }
    licence = licence_of(snapshot.folder / "README.md")
    return {**origin, "license": licence} if licence else origin


def licence_of(card: Path) -> str:
    """The licence that a model card declares at its head; '' where it declares none."""
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    head = re.match(r"---\r?\n(.*?)\r?\n---", text, re.DOTALL)
    found = re.search(r"^license:[ \t]*[\"']?([\w.+-]+)", head[1], re.MULTILINE) if head else None
    return found[1] if found else ""

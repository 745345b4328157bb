"""Detects which library wrote a checkpoint from its files, and imports it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from seq2engine.common.atomic_folders import check_replaceable, new_folder
from seq2engine.common.hub import hub_hint
from seq2engine.common.json_files import read_object
from seq2engine.common.progress import Progress, silent
from seq2engine.errors import CheckpointError

from ..checkpoint import CONFIG, GENERATION, read_config, write_checkpoint, write_origin
from ..hub_files import Located, located
from ..images import IMAGES
from ..speech import SPEECH
from ..tokenizers.base import FOLDER as TOKENIZER
from .fairseq import FILES as FAIRSEQ_FILES
from .fairseq import checkpoint_from_fairseq
from .files.pickles import pickle_in, read_pickle
from .hugging_face import ELSEWHERE, checkpoint_from_hugging_face
from .imported import Imported
from .opennmt import checkpoint_from_opennmt
from .torch_transformer import DESCRIPTION, checkpoint_from_torch
from .trocr import checkpoint_from_trocr
from .whisper import checkpoint_from_openai, checkpoint_from_whisper

KNOWN = (
    "a Hugging Face folder (config.json and weights), a fairseq, OpenNMT-py or Whisper .pt file or a folder with one, "
    f"or a folder with {DESCRIPTION} and the state dict it describes"
)


@dataclass(frozen=True)
class Source:
    """One library's checkpoints, and how they are read."""

    name: str
    read: Callable[[Path], Imported]


SOURCES = {
    "hugging face": Source("Hugging Face", checkpoint_from_hugging_face),
    "fairseq": Source("fairseq", checkpoint_from_fairseq),
    "opennmt": Source("OpenNMT-py", checkpoint_from_opennmt),
    "whisper": Source("Hugging Face", checkpoint_from_whisper),
    "vision-encoder-decoder": Source("Hugging Face", checkpoint_from_trocr),
    "openai": Source("openai-whisper", checkpoint_from_openai),
    "torch": Source("torch.nn.Transformer", checkpoint_from_torch),
}


def source_of(path: Path) -> Source:
    """Which library wrote what is at this path; raises when it is none we know."""
    if not path.exists():
        raise CheckpointError(f"nothing at {path}; expected {KNOWN}{hub_hint(path)}")
    if (path / DESCRIPTION).is_file():
        return SOURCES["torch"]
    if (path / CONFIG).is_file():
        if is_ours(path):
            read_config(path / CONFIG)  # raises if it is damaged
            raise CheckpointError(
                f"{path} is a seq2engine checkpoint already; export it with: seq2engine export {path} DIR"
            )
        kind = model_type_of(path)
        return SOURCES[kind if kind in ELSEWHERE else "hugging face"]
    if path.is_dir() and not any(path.glob("*.pt")):
        raise CheckpointError(f"{path} holds no checkpoint that is understood; expected {KNOWN}")
    file = pickle_in(path, FAIRSEQ_FILES)
    content = read_pickle(file)
    keys = content.keys() if isinstance(content, dict) else set()
    if {"dims", "model_state_dict"} <= keys:
        return SOURCES["openai"]
    if {"generator", "vocab", "opt"} <= keys:
        return SOURCES["opennmt"]
    if "model" in keys and ("args" in keys or "cfg" in keys):
        return SOURCES["fairseq"]
    held = ", ".join(sorted(map(str, keys))[:6]) or type(content).__name__
    raise CheckpointError(f"{file} holds {held}, which is not understood; expected {KNOWN}")


def is_ours(folder: Path) -> bool:
    """Whether a folder's config.json is one of ours; a damaged one counts as ours, and its reader reports why."""
    try:
        values = read_object(folder / CONFIG)
    except (OSError, ValueError):
        return True
    return not ("model_type" in values or "architectures" in values)


def model_type_of(folder: Path) -> str:
    """What a Hugging Face config.json calls its model."""
    return str(read_object(folder / CONFIG).get("model_type", ""))


def is_foreign(path: Path) -> bool:
    """Whether a path looks like a checkpoint to be imported rather than one of ours."""
    if path.is_file() or (path / DESCRIPTION).is_file():
        return True
    return not is_ours(path) if (path / CONFIG).is_file() else any(path.glob("*.pt"))


@dataclass(frozen=True)
class ImportResult:
    """The result of an import."""

    checkpoint: Path
    source: str
    kind: str
    parameters: int
    takes_text: bool
    generation: dict[str, object]
    notes: tuple[str, ...]

    def to_json(self) -> str:
        return json.dumps({**dataclasses.asdict(self), "checkpoint": str(self.checkpoint)}, indent=2)


def import_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    force: bool = False,
    progress: Progress = silent,
    note: Callable[[str], None] = lambda text: None,
) -> ImportResult:
    """Writes another library's checkpoint as one of ours, with its decoding defaults and its tokenizer.

    `source` is a folder, a file, or a model of the hub, hf:NAME or hf:NAME@REVISION, which is downloaded unless it is
    cached. `note` is called with what there is to know about that.
    """
    check_replaceable(Path(target), force, CONFIG)
    return import_located(located(source, progress, note), Path(target), force, progress)


def import_located(source: Located, target: Path, force: bool, progress: Progress) -> ImportResult:
    check_replaceable(target, force, CONFIG)
    found = source_of(source.path)
    progress(f"import: {found.name} weights", 0.0)
    imported = found.read(source.path)
    progress(f"import: {found.name} weights", 1.0)
    progress("import: writing", 0.0)
    with new_folder(target, force, marker=CONFIG) as beside:
        write_checkpoint(imported.model, beside)
        write_origin(source.origin, beside)
        if imported.generation:
            (beside / GENERATION).write_text(json.dumps(imported.generation, indent=2) + "\n")
        if imported.speech is not None:
            (beside / SPEECH).write_text(imported.speech.to_json())
        if imported.images is not None:
            (beside / IMAGES).write_text(imported.images.to_json())
        if imported.tokenizer is not None:
            (beside / TOKENIZER).mkdir()
            imported.tokenizer.write(beside / TOKENIZER)
    progress("import: writing", 1.0)
    return ImportResult(
        checkpoint=target,
        source=found.name,
        kind=imported.kind,
        parameters=sum(parameter.numel() for parameter in imported.model.parameters()),
        takes_text=imported.tokenizer is not None,
        generation=imported.generation,
        notes=imported.notes,
    )

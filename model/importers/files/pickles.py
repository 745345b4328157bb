"""Reads .pt files without executing their pickles: tensors, plain values and argparse.Namespace only."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from seq2engine.common.json_files import is_text, shortened
from seq2engine.errors import CheckpointError

BEGINNINGS = (b"PK", b"\x80")
KEPT = ("args", "cfg", "model", "generator", "vocab", "opt")  # what importers read; optimizers may hold anything


def read_pickle(path: Path, advice: str | None = None) -> Any:
    """The content of a .pt file; `advice` is what to do about a class that is not allowed, if not to re-save it."""
    if not path.is_file():
        raise CheckpointError(f"no file at {path}; expected a .pt file")
    check_beginning(path)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can raise anything at all, as the pickle documentation states
        foreign = re.search(r"GLOBAL (\S+)", str(error))
        if foreign is not None:
            todo = advice or resaving(path, foreign[1])
            raise CheckpointError(f"{path} holds a {foreign[1]}, and code is never unpickled here; {todo}") from error
        raise CheckpointError(f"{path} cannot be read ({reason_of(error)}); copy the checkpoint again") from error


def check_beginning(path: Path) -> None:
    """Refuses what torch.save cannot have written: its files are zip archives, or pickles of protocol 2."""
    with path.open("rb") as file:
        begin = file.read(16)
    if not begin.startswith(BEGINNINGS):
        found = f"it begins with {begin!r}" if begin else "it is empty"
        raise CheckpointError(f"{path} cannot be read ({found}); expected a file that torch.save wrote")


def reason_of(error: Exception) -> str:
    """Why torch could not read a file, in few words: the text of a damaged pickle's error is no help."""
    if not isinstance(error, RuntimeError | EOFError | OSError | UnpicklingError):
        return f"it is damaged: {type(error).__name__}"
    # torch's first line advises weights_only=False; the reason follows it
    text = str(error).rpartition("WeightsUnpickler error: ")[2].strip().partition("\n")[0]
    return text or type(error).__name__


def pickle_in(source: Path, preferred: tuple[str, ...] = ()) -> Path:
    """The .pt file: the source itself, or in a folder a preferred one or the only one."""
    if not source.is_dir():
        return source
    found = sorted(source.glob("*.pt"))
    for name in preferred:
        if source / name in found:
            return source / name
    if len(found) != 1:
        have = ", ".join(path.name for path in found[:6]) or "no .pt file"
        raise CheckpointError(f"{source} has {have}; expected {' or '.join((*preferred, 'one .pt file'))}: name it")
    return found[0]


def resaving(path: Path, foreign: str) -> str:
    """How to write a checkpoint again without a class, where its library is installed."""
    if foreign.startswith("torchtext."):
        return "it is of OpenNMT-py 2: convert it with OpenNMT-py 3's tools/convertv2_v3.py"
    plain = "from omegaconf import OmegaConf; c['cfg'] = OmegaConf.to_container(c['cfg'], resolve=True); "
    code = (
        f"import torch; c = torch.load({str(path)!r}, weights_only=False); "
        f"{plain if foreign.startswith('omegaconf.') else ''}"
        f"torch.save({{k: c[k] for k in {KEPT!r} if k in c}}, {str(path.with_name('plain.pt'))!r})"
    )
    return f'if you trust it, re-save it where it was trained and import plain.pt: python -c "{code}"'


def entry(content: Any, name: str, path: Path, kind: str) -> Any:
    """One entry of a checkpoint, which must be there."""
    if not isinstance(content, Mapping) or content.get(name) is None:
        have = ", ".join(sorted(map(str, content))[:6]) if isinstance(content, Mapping) else type(content).__name__
        raise CheckpointError(f"{path} has no {name!r}, so it is not a checkpoint of {kind}; it holds: {have}")
    return content[name]


def tensors(values: Any, path: Path) -> dict[str, Tensor]:
    """A state dict, checked to be one."""
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{path} holds a {type(values).__name__}; expected names and tensors of a state dict")
    odd = [f"{shortened(name)} {problem}" for name, value in values.items() if (problem := problem_with(name, value))]
    if odd or not values:
        found = odd[0] if odd else "nothing is in it"
        raise CheckpointError(f"{path} does not hold a state dict ({found}); expected names and tensors")
    return dict(values)


def problem_with(name: Any, value: Any) -> str:
    """What is wrong with an entry of a state dict: only plain tensors in memory can become ours."""
    if not isinstance(name, str) or not is_text(name):
        return "is no name"
    if not isinstance(value, Tensor):
        return f"is not a tensor but a {type(value).__name__}"
    if value.device.type != "cpu":
        return f"is a tensor on {value.device.type}, without numbers"
    if value.is_quantized or value.layout != torch.strided or value.is_complex():
        return f"is a tensor of {value.dtype} in {value.layout}, expected plain numbers"
    return ""


def settings_of(values: Any, name: str, path: Path) -> dict[str, Any]:
    """Options as a dict, whether they were saved as one or as an argparse.Namespace."""
    if isinstance(values, argparse.Namespace):
        return vars(values)
    if isinstance(values, Mapping):
        return dict(values)
    raise CheckpointError(f"{path}: {name!r} is a {type(values).__name__}; expected options by name")

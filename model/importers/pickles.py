"""Reads .pt files without running what is in them: tensors, plain values and argparse.Namespace, nothing else."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError


def read_pickle(path: Path, resave: Callable[[str], str]) -> Any:
    """The content of a .pt file. `resave` says, for a class that is not allowed, how to write the file without it."""
    if not path.is_file():
        raise CheckpointError(f"no file at {path}; expected a .pt file")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can raise anything at all, as the pickle documentation says
        foreign = re.search(r"GLOBAL (\S+)", str(error))
        if foreign is not None:
            raise CheckpointError(
                f"{path} holds a {foreign[1]}, and code is never unpickled here; {resave(foreign[1])}"
            ) from error
        # torch's first line advises to read the file without care; its reason comes after that
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].strip().partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{path} cannot be read ({reason}); copy the checkpoint again") from error


def resave_command(path: Path, names: tuple[str, ...], where: str) -> str:
    """The command that keeps only these entries of a .pt file; it runs `where` the file can be trusted and read."""
    code = (
        f"import torch; c = torch.load({str(path)!r}, weights_only=False); "
        f"torch.save({{k: c.get(k) for k in {names!r}}}, 'plain.pt')"
    )
    return f'{where}, re-save it as plain.pt: python -c "{code}"'


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
    odd = [str(name) for name, value in values.items() if not (isinstance(name, str) and isinstance(value, Tensor))]
    if odd or not values:
        found = f"{odd[0]} is not a tensor" if odd else "nothing is in it"
        raise CheckpointError(f"{path} does not hold a state dict ({found}); expected names and tensors")
    return dict(values)


def settings_of(values: Any, name: str, path: Path) -> dict[str, Any]:
    """Options as a dict, whether they were saved as one or as an argparse.Namespace."""
    if isinstance(values, argparse.Namespace):
        return vars(values)
    if isinstance(values, Mapping):
        return dict(values)
    raise CheckpointError(f"{path}: {name!r} is a {type(values).__name__}; expected options by name")

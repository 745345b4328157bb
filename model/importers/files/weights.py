"""The weights of a Hugging Face folder as named tensors, from any of four kinds of files.

safetensors before pickles, whole files before shards. A pickle is read for tensors only (`weights_only`): nothing in a
file is ever run.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from seq2engine.common.inner_paths import problem_with_path
from seq2engine.common.json_files import read_object, shortened, typed_from_json
from seq2engine.errors import CheckpointError

from ...hub_files import WEIGHTS as FILES
from .pickles import check_beginning, reason_of, tensors


def read_weights(source: Path) -> dict[str, Tensor]:
    """All weights of a folder, in the precision they are stored in."""
    found = [source / name for name in FILES if (source / name).is_file()]
    if not found:
        raise CheckpointError(f"{source} has no weights; expected one of {', '.join(FILES)}")
    if found[0].suffix == ".json":
        return weights_from_shards(found[0])
    return weights_from_file(found[0])


def weights_from_shards(index: Path) -> dict[str, Tensor]:
    """The weights of all files that an index names, each from the file that the index names."""
    try:
        places = typed_from_json(dict[str, str], read_object(index).get("weight_map"), "weight_map")
        files = sorted(set(places.values()))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{index} is not an index of shards ({error}); copy the model again") from error
    for name in files:
        if problem_with_path(name) or Path(name).name != name:
            wanted = "expected a file in its own folder; copy the model again"
            raise CheckpointError(f"{index} names {shortened(name)}, {wanted}")
        if not (index.parent / name).is_file():
            raise CheckpointError(f"{index} names {name}, which is not in the folder; copy the model again")
    weights: dict[str, Tensor] = {}
    for name in files:
        shard = weights_from_file(index.parent / name)
        if lacking := sorted(key for key, place in places.items() if place == name and key not in shard):
            raise CheckpointError(f"{index} lists {lacking[0]} in {name}, but it is not there; copy the model again")
        weights.update(shard)
    return weights


def weights_from_file(path: Path) -> dict[str, Tensor]:
    return weights_from_safetensors(path) if path.suffix == ".safetensors" else weights_from_pickle(path)


def weights_from_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({first_line(error)}); copy the model again") from error


def weights_from_pickle(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by torch.save; a file with anything else in it is refused."""
    check_beginning(path)
    try:
        values: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can raise anything at all, as the pickle documentation states
        if refused := re.search(r"GLOBAL (\S+)", str(error)):
            raise CheckpointError(
                f"{path} holds a {refused[1]}, and nothing but tensors is ever unpickled; save the model as safetensors"
            ) from error
        raise CheckpointError(f"{path} cannot be read ({reason_of(error)}); copy the model again") from error
    return tensors(values, path)


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

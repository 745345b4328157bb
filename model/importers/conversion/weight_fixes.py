"""Weight fixes before a rename table: split stacked projections, add absent biases, check tied tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from seq2engine.errors import CheckpointError

from .renames import Renames


def with_parts(modules: Renames) -> dict[str, tuple[str, ...]]:
    """A table of weights and biases from one of modules."""
    return {
        f"{ours}.{part}": tuple(f"{name}.{part}" for name in theirs)
        for ours, theirs in modules.items()
        for part in ("weight", "bias")
    }


def split_projections(weights: Mapping[str, Tensor], names: str) -> dict[str, Tensor]:
    """Every `in_proj_weight` and `in_proj_bias` [3D, ...] as three, under `names` with {kind} and {part} filled in."""
    split: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        owner, joined, kind = name.rpartition("in_proj_")
        if joined and kind in ("weight", "bias") and tensor.ndim and len(tensor) % 3 == 0:
            thirds = zip("qkv", tensor.chunk(3), strict=True)
            split |= {owner + names.format(kind=kind, part=part): rows for part, rows in thirds}
        else:
            split[name] = tensor
    return split


def zero_biases(
    weights: Mapping[str, Tensor], biases: Iterable[str], stated: bool | None, option: str, where: str
) -> dict[str, Tensor]:
    """The weights with zeros for a group of biases that is absent as a whole; a single missing one is not filled.

    `stated` is what the settings claim about the group (None: nothing); they must not contradict the file.
    """
    group = list(biases)
    found = [name for name in group if name in weights]
    if stated is not None and bool(found) != stated:
        example = found[0] if found else group[0]
        raise CheckpointError(f"{where}: {option} is {stated}, but there is {'a' if found else 'no'} {example}")
    if found:
        return dict(weights)
    partners = {name: "weight".join(name.rsplit("bias", 1)) for name in group}
    zeros = {name: torch.zeros(weights[other].shape[:1]) for name, other in partners.items() if other in weights}
    return {**weights, **zeros}


def check_same(weights: Mapping[str, Tensor], one: str, other: str, option: str, where: str) -> None:
    """A table that a model has once may be saved under two names, but only with the same numbers."""
    if one in weights and other in weights and not torch.equal(weights[one], weights[other]):
        raise CheckpointError(f"{where}: {option} claims that {other} is {one}, but their numbers differ")


def shape_of(weights: Mapping[str, Tensor], name: str, where: str) -> tuple[int, int]:
    """The shape of a table from which config sizes are read."""
    if name not in weights:
        names = ", ".join(sorted(weights)[:4])
        raise CheckpointError(f"{where} has no {name}; its weights are {names}, ...")
    if weights[name].ndim != 2:
        raise CheckpointError(f"{where}: {name} is {list(weights[name].shape)}, expected rows and columns")
    rows, columns = weights[name].shape
    return rows, columns


def first_rows(table: Tensor, length: int) -> Tensor:
    """[L, D], [L, 1, D] or [1, L, D] -> the first rows [length, D]; other shapes are left for later checks to name."""
    axes = [size for size in table.shape if size != 1]
    return table.reshape(axes)[:length] if len(axes) == 2 else table

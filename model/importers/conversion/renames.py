"""Renames weights by literal tables from another library's names to ours; nothing is guessed.

A line of a table is our name and, in order, the names it is put together from: several are stacked along the first
axis, as q, k and v are. `{i}` stands for a layer's number, in both names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from seq2engine.errors import CheckpointError

Renames = Mapping[str, tuple[str, ...]]  # our name -> theirs
SHOWN = 8  # names listed in an error


def layer_renames(template: Renames, layers: int) -> dict[str, tuple[str, ...]]:
    """The table of a stack from that of one layer."""
    return {
        ours.replace("{i}", str(i)): tuple(name.replace("{i}", str(i)) for name in theirs)
        for i in range(layers)
        for ours, theirs in template.items()
    }


def renamed_weights(
    weights: Mapping[str, Tensor], renames: Renames, ignored: Iterable[str], where: str
) -> dict[str, Tensor]:
    """Our weights from theirs, in fp32. Each of theirs must be used or in `ignored`; all missing ones are listed."""
    needed = {name for theirs in renames.values() for name in theirs}
    missing = sorted(needed - weights.keys())
    unused = sorted(weights.keys() - needed - set(ignored))
    problems = [f"missing {name}" for name in missing] + [f"not understood {name}" for name in unused]
    for theirs in renames.values():
        shapes = [list(weights[name].shape) for name in theirs if name in weights]
        if any(not shape or shape[1:] != shapes[0][1:] for shape in shapes):
            problems.append(f"{' and '.join(theirs)} cannot be stacked, being {' and '.join(map(str, shapes))}")
    if problems:
        shown = "; ".join(problems[:SHOWN]) + (f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else "")
        raise CheckpointError(f"{where} does not have the weights its config asks for: {shown}")
    return {ours: torch.cat([weights[name].float() for name in theirs]) for ours, theirs in renames.items()}

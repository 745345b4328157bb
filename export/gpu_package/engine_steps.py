"""Encoder and decoder steps of one batch over the engines: what greedy and beam search share.

All beams of a source share one cache, in which every step writes a slot for each beam; a mask selects the slots
that a beam descends from. Shapes: B sources, K beams, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from model_engines import Cache, ModelEngines
from package_files import PackageError

# Logits [N,K,V] of the real sources, or their best tokens [N,K,C], and the number of the step, from 1 -> tokens and the
# beams they continue, [N,K]
Choose = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]


def room_for(package: Any, beams: int) -> int:
    """The longest output in tokens, with this many beams. Spare beams of an engine need slots of their own."""
    widest = package["ranges"][0]
    if package["cache_form"] != "static":
        return int(widest["target"]["max"])
    spare = max(0, widest["beam"]["min"] - beams)
    return int(min(widest["target"]["max"], (package["slots"] - spare) // beams))


def run(
    model: ModelEngines,
    sources: Sequence[Sequence[int]],
    beams: int,
    start: int,
    steps: int,
    choose: Choose,
    finished: Callable[[], bool] = lambda: False,
    best: bool = False,
) -> None:
    """Steps until `finished`, or as many as `steps`. With `best`, only the best tokens leave the GPU.

    Engines that take no single source, or more beams, get copies of the last source and of the first beam. Copies of a
    beam see what that beam sees; what they write into a static cache the next step overwrites.
    """
    widest = model.package["ranges"][0]
    count, width = len(sources), max(beams, widest["beam"]["min"])
    rows = [*sources, *[sources[-1]] * (widest["batch"]["min"] - count)]
    ids, mask = padded(rows, model.package["model"]["pad_id"], widest["source"]["min"])
    encoded = model.encode(ids, mask)
    cache = Cache(model, len(rows), width, steps)
    stride = beams if cache.static else width  # slots from one step to the next
    copied = np.where(np.arange(width) < beams, np.arange(width), 0)  # the beam that each is, or is a copy of
    places = np.minimum(np.arange(len(rows)), count - 1)  # the source that each row is, or is a copy of
    tokens = np.full((len(rows), width), start, dtype=np.int64)
    seen = np.zeros((len(rows), width, cache.length), dtype=bool)
    slot_position = np.minimum(np.arange(cache.length) // stride, steps)[None].repeat(len(rows), axis=0)
    for step in range(steps):
        seen[:, np.arange(width), stride * step + copied] = True
        given = {
            "tokens": tokens,
            "position": np.full(len(rows), step, dtype=np.int64),
            "write_index": np.full(len(rows), stride * step, dtype=np.int64),
            "self_mask": np.ascontiguousarray(seen[:, :, : cache.attended]),
            "slot_position": np.ascontiguousarray(slot_position[:, : cache.attended]),  # unless positions are absolute
        }
        if best:
            tokens, logits = model.best(encoded, cache, given)
        else:
            logits = model.step(encoded, cache, given)
        logits = logits[:count, :beams]
        if not np.isfinite(logits.max(axis=-1)).all():
            raise PackageError(f"the engines' logits of step {step + 1} are not finite; see: python verify.py")
        chosen, parents = choose(tokens[:count, :beams] if best else logits, step + 1)
        if finished():
            return
        tokens = np.ascontiguousarray(chosen[places][:, copied])
        seen = seen[np.arange(len(rows))[:, None], parents[places][:, copied]]


def padded(sources: Sequence[Sequence[int]], pad: int, least: int) -> tuple[np.ndarray, np.ndarray]:
    """Ragged sources -> ids int64 and mask bool, both [B, longest, but at least `least`]."""
    lengths = np.array([len(source) for source in sources])
    mask = np.arange(max(int(lengths.max()), least)) < lengths[:, None]
    ids = np.full(mask.shape, pad, dtype=np.int64)
    ids[mask] = np.concatenate([np.asarray(source, dtype=np.int64) for source in sources])
    return ids, mask

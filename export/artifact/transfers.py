"""Bytes that one token moves between host and GPU, for each reduction of the logits; derived from the passport.

The stand-in of the tests counts the same numbers while sessions decode. A mask is sent whole only in a first step and
after rows or slots have moved, a plan of greedy search in its first; neither is in here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .passport import EngineTensor, Passport

ALIGNMENT = 256  # bytes: TensorRT's rule for the address of every input and output
TOKENS_PER_WAIT = 8  # of greedy search that runs ahead of the host
RECORDED = ("target", "top_logits", "chosen_logits", "exp_sums")  # by next_greedy, read a column for each token


@dataclass(frozen=True)
class Transfers:
    """For one token of a whole batch: bytes to the GPU and to the host, waits and allocations of the host."""

    sent: int
    received: int
    waits: float
    allocations: int = 0


def aligned(size: int) -> int:
    """Bytes rounded up to the alignment of tensors; at least one unit, so that an empty tensor has an address, too."""
    return max(-(-size // ALIGNMENT), 1) * ALIGNMENT


def itemsize_of(dtype: str) -> int:
    return {"bool": 1, "float16": 2, "bfloat16": 2, "int32": 4, "float32": 4, "int64": 8}[dtype]


def transfers_of_token(
    passport: Passport, reduction: str, batch: int, beams: int, tokens_per_wait: int = TOKENS_PER_WAIT
) -> Transfers:
    """`reduction` is a key of `Passport.reductions`. A growing cache is taken at its longest."""
    engines, static = passport.engines, passport.cache_form == "static"
    beams = max(beams, passport.ranges.beam.min)
    longest = passport.slots if static else passport.ranges.beam.max * passport.ranges.target.max
    source = passport.ranges.source.max
    sizes = {"B": batch, "R": batch, "K": beams, "M": longest, "L": longest, "T": longest, "S": source, "F": 2 * source}

    def parcel(tensors: list[EngineTensor]) -> int:
        shapes = [[axis if isinstance(axis, int) else sizes[axis] for axis in tensor.axes] for tensor in tensors]
        return sum(aligned(math.prod(s) * itemsize_of(t.dtype)) for s, t in zip(shapes, tensors, strict=True))

    if reduction == "next_greedy":
        recorded = [t for t in engines[reduction].inputs if t.name in RECORDED]
        return Transfers(0, batch * sum(itemsize_of(t.dtype) for t in recorded), 1 / tokens_per_wait)
    names = ("tokens", "position", "write_index", *(() if static else ("self_mask", "slot_position")))
    sent = [t for t in engines["decoder_step"].inputs if t.name in names]
    sent += [t for t in engines["tree_mask"].inputs if t.name == "parents"] if static else []
    read = [t for t in engines["decoder_step"].outputs if t.name == "logits"]
    return Transfers(parcel(sent), parcel(list(engines[reduction].outputs) if reduction != "logits" else read), 1)

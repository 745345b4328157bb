"""What the machine could do at best, measured in the same run, and how near to that an arm comes.

A decoder step must read every weight once, whatever the batch, and multiply it with every row; it takes at least as
long as the slower of the two:

    bytes   weights of the decoder's layers and of the output projection as they are stored, and the caches in fp32:
            cross K/V once per source, self K/V once per beam, half full on average
    flops   two for every weight and row, and attention's products

An encoder is counted in the same way. The bound end to end is the encoder's and `target` times the step's. The peak of
fp32 products is the measure for all precisions, so a narrower one may come out above it where the rows are many.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from .cases import Case

BUFFER = 256 * 1024 * 1024  # bytes; more than any cache holds
SIZES = (512, 1024)  # of square products; one of them suits every machine
TRIES = 5
WIDTHS = {
    "fp32": 4.0,
    "fp16": 2.0,
    "bf16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5,
    "w8a8": 1.0,
}  # bytes of a stored weight


@dataclass(frozen=True)
class Ceiling:
    """The best that was seen of this machine, with the threads an arm gets."""

    read_bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True)
class Work:
    """What a computation cannot do without."""

    bytes: float
    flops: float

    def least_ms(self, ceiling: Ceiling) -> float:
        return 1000 * max(self.bytes / ceiling.read_bytes_per_second, self.flops / ceiling.flops_per_second)


def ceiling_of(threads: int, buffer: int = BUFFER, sizes: tuple[int, ...] = SIZES) -> Ceiling:
    """Reads a buffer with all threads, and multiplies square matrices in fp32; the best of a few tries."""
    import torch

    parts = np.array_split(np.ones(buffer // 4, dtype=np.float32), threads)
    with ThreadPoolExecutor(threads) as pool:
        read = sum(part.nbytes for part in parts) / best_seconds(lambda: list(pool.map(np.max, parts)))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        flops = max(2 * size**3 / best_seconds(square_product(size)) for size in sizes)
    finally:
        torch.set_num_threads(before)
    return Ceiling(read, flops)


def square_product(size: int) -> Callable[[], object]:
    import torch

    left, right, out = (torch.ones(size, size) for _ in range(3))
    return lambda: torch.mm(left, right, out=out)


def best_seconds(call: Callable[[], object]) -> float:
    call()
    seconds = []
    for _ in range(TRIES):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def least_ms(case: Case, model: dict[str, Any], precision: str, part: str, ceiling: Ceiling) -> float:
    """The shortest time that a part of a case can take; `model` are the fields of its config."""
    width = WIDTHS[precision]
    encoder, step = (work(case, model, width).least_ms(ceiling) for work in (encoder_work, step_work))
    return {"encoder": encoder, "step": step, "end_to_end": encoder + case.target * step}[part]


def encoder_work(case: Case, model: dict[str, Any], width: float) -> Work:
    """Layers, and the cross K/V of every decoder layer."""
    d, f = model["d_model"], model["d_ff"]
    weights = model["encoder_layers"] * (4 * d * d + 2 * d * f) + model["decoder_layers"] * 2 * d * d
    tokens = case.batch * case.source
    attention = model["encoder_layers"] * 4 * d * case.source * tokens
    return Work(width * weights, 2 * weights * tokens + attention)


def step_work(case: Case, model: dict[str, Any], width: float) -> Work:
    d, f, layers = model["d_model"], model["d_ff"], model["decoder_layers"]
    weights = layers * (6 * d * d + 2 * d * f) + d * model["target_vocab"]
    rows, filled = case.batch * case.beam, case.target / 2
    caches = 4 * 2 * d * layers * (case.batch * case.source + rows * filled)
    attention = layers * 4 * d * rows * (case.source + filled)
    return Work(width * weights + caches, 2 * weights * rows + attention)

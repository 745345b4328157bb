"""Whether a tensor is another one rounded to fewer bits: to a type, a shorter mantissa, or evenly spaced steps."""

from __future__ import annotations

import numpy as np
import torch

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
MANTISSA = 23  # bits of fp32
MOST_STEPS = 1 << 16
EVEN = 1e-3  # of a step: what its multiples may be off by, computed in fp32


def rounding_fault(ours: np.ndarray, theirs: np.ndarray, what: str) -> tuple[str, str] | None:
    if not np.issubdtype(ours.dtype, np.floating) or not np.isfinite(theirs.astype(np.float64)).all() or ours.size < 2:
        return None
    exact, found = ours.astype(np.float32), theirs.astype(np.float32)
    for name, dtype in HALF.items():
        if np.array_equal(found, torch.from_numpy(exact.copy()).to(dtype).float().numpy()):
            return "precision", f"the {what} was rounded to {name}"
    for bits in range(MANTISSA - 1, 0, -1):
        for way, number in (("rounded", in_mantissa(exact, bits)), ("cut", cut_mantissa(exact, bits))):
            if np.array_equal(found, number):
                return "precision", f"the {what} was {way} to a mantissa of {bits} bits"
    for axis, where in ((None, ""), (1, " of its row"), (0, " of its column")):
        if axis is not None and ours.ndim < 2:
            continue
        steps = even_steps(exact.astype(np.float64), found.astype(np.float64), axis)
        if steps is not None:
            bits, step = steps
            return "precision", f"the {what} was rounded to {bits} bits: multiples of {step:.3g}{where}"
    return None


def in_mantissa(array: np.ndarray, bits: int) -> np.ndarray:
    """fp32 numbers to the nearest with that many bits after the first, halves to even."""
    parts, exponents = np.frexp(array)
    return np.ldexp(np.rint(np.ldexp(parts, bits + 1)), exponents - bits - 1).astype(np.float32)


def cut_mantissa(array: np.ndarray, bits: int) -> np.ndarray:
    mask = np.uint32((0xFFFFFFFF << (MANTISSA - bits)) & 0xFFFFFFFF)
    return (np.ascontiguousarray(array).view(np.uint32) & mask).view(np.float32)


def even_steps(ours: np.ndarray, theirs: np.ndarray, axis: int | None) -> tuple[int, float] | None:
    """Bits and the size of the first step, if the numbers found are the nearest multiples of evenly spaced steps: of
    one size, or of one for every line along the axis."""
    lines = [(ours.ravel(), theirs.ravel())]
    if axis is not None:
        lines = list(zip(np.moveaxis(ours, axis, -1), np.moveaxis(theirs, axis, -1), strict=True))
    first: tuple[int, float] | None = None
    for exact, found in lines:
        levels = np.unique(found)
        if len(levels) > MOST_STEPS or len(levels) * 2 > len(found) or len(levels) < 2:
            return None  # hardly a number repeats: these are not quantisation steps
        gaps = np.diff(levels)
        step = gaps[gaps > gaps.max() * 1e-4].min()
        if np.abs(np.rint(gaps / step) - gaps / step).max() > EVEN * len(levels):
            return None
        if np.abs(exact - found).max() > step * (0.5 + EVEN * len(levels)):
            return None
        if first is None:
            first = int(np.ceil(np.log2((levels[-1] - levels[0]) / step + 1))), float(step)
    return first

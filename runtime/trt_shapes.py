"""Whether a call fits an engine: its inputs against each other, and against the ranges of the passport.

TensorRT neither notices that two inputs disagree in their batch, nor looks where an index leads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..errors import RequestError
from ..export.passport import EngineEntry, EngineTensor, Passport
from ..export.profiles import Range
from .trt_choice import mend
from .trt_memory import Shape

RANGE_OF_AXIS = {"B": "batch", "K": "beam", "S": "source", "L": "target", "M": "target"}


def call_sizes(folder: Path, passport: Passport, graph: str, shapes: Mapping[str, Shape]) -> dict[str, int]:
    """The size of every letter of the contract in a call, after its inputs' shapes were checked."""
    entry = passport.engines[graph]
    sizes = agreed_sizes(graph, entry, shapes)
    check_ranges(folder, passport, graph, shapes)
    if "M" in sizes and sizes["M"] != sizes["L"] + sizes["K"]:
        raise RequestError(
            f"{graph} input self_mask has shape {list(shapes['self_mask'])}, expected its last axis to count "
            f"{sizes['L']} cached slots and {sizes['K']} new ones"
        )
    return sizes


def agreed_sizes(graph: str, entry: EngineEntry, shapes: Mapping[str, Shape]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for tensor in entry.inputs:
        shape = shapes[tensor.name]
        expected = [sizes.get(axis, axis) if isinstance(axis, str) else axis for axis in tensor.axes]
        fits = len(shape) == len(expected) and all(
            isinstance(known, str) or known == size for known, size in zip(expected, shape, strict=True)
        )
        if not fits:
            wanted = ", ".join(map(str, expected))
            raise RequestError(f"{graph} input {tensor.name} has shape {list(shape)}, expected [{wanted}] in this call")
        sizes.update((axis, size) for axis, size in zip(tensor.axes, shape, strict=True) if isinstance(axis, str))
    return sizes


def check_ranges(folder: Path, passport: Passport, graph: str, shapes: Mapping[str, Shape]) -> None:
    """Refuses shapes outside the engine's ranges: names the first such input and the build that would take them all."""
    first = ""
    wrong: dict[str, int] = {}
    for tensor in passport.engines[graph].inputs:
        shape, least, most = shapes[tensor.name], tensor.shapes[0], tensor.shapes[-1]
        for axis, size, low, high in zip(tensor.axes, shape, least, most, strict=True):
            if not low <= size <= high:
                wrong[str(axis)] = size
                first = first or (
                    f"{graph} input {tensor.name} has shape {list(shape)}, "
                    f"this engine takes {list(least)} to {list(most)}"
                )
    if first:
        options = dict(mending_option(passport, axis, size) for axis, size in wrong.items())
        raise RequestError(f"{first}; {mend(folder, passport, **options)}")


def check_reserved(folder: Path, passport: Passport, cache: EngineTensor, slots: int) -> None:
    """Refuses a cache length that the engine does not have."""
    slot_axis = cache.axes.index("L")
    least, most = cache.shapes[0][slot_axis], cache.shapes[-1][slot_axis]
    if not least <= slots <= most:
        takes = f"has {most}" if least == most else f"takes {least} to {most}"
        option, value = mending_option(passport, "L", slots)
        raise RequestError(
            f"a cache of {slots} slots was asked for, this engine {takes}; {mend(folder, passport, **{option: value})}"
        )


def mending_option(passport: Passport, axis: str, size: int) -> tuple[str, Range | int]:
    """The build option, and its value, of an engine that takes this size too."""
    if axis == "L" and passport.cache_form == "static":
        return "slots", size
    if axis in "LM":  # a growing cache is as long as all beams of all steps
        size = math.ceil(size / passport.ranges.beam.max) + (axis == "L")
    name = RANGE_OF_AXIS[axis]
    r: Range = getattr(passport.ranges, name)
    return name, Range(min(r.min, size), r.opt, max(r.max, size))


def check_dtypes(graph: str, entry: EngineEntry, values: Mapping[str, np.ndarray]) -> None:
    for tensor in entry.inputs:
        if tensor.name in values and not np.can_cast(values[tensor.name].dtype, tensor.dtype, "same_kind"):
            given = values[tensor.name].dtype
            raise RequestError(f"{graph} input {tensor.name} is {given}, expected {tensor.dtype}")


def check_places(name: str, places: np.ndarray, end: int) -> None:
    """Refuses indices below 0 or from `end` on: the GPU would read or write whatever lies there."""
    if places.size and (places.min() < 0 or places.max() >= end):
        raise RequestError(f"{name} holds {places.min()} to {places.max()}, expected 0 to {end - 1}")

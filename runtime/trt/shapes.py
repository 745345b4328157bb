"""Shapes of an engine: its profiles, which of them serves a call, and checks of a call's inputs.

An engine may have several profiles, say one for single short sources and one for large batches; TensorRT tunes its
kernels for each. A call runs in the smallest that takes it. TensorRT checks neither that the batches of two inputs
agree nor that indices are in range, so both are checked here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from seq2engine.errors import RequestError
from seq2engine.export.artifact.passport import EngineEntry, EngineTensor, Passport
from seq2engine.export.artifact.profiles import Range, ShapeRanges, sizes_from_ranges

from .memory import Shape, Sizes, shape_of
from .selection import fix

RANGE_OF_AXIS = {"B": "batch", "K": "beam", "S": "source", "L": "target", "M": "target"}


@dataclass(frozen=True)
class Profile:
    """One profile, by its number in the engine; `sizes` are those of the contract's letters at min, opt and max."""

    index: int
    ranges: ShapeRanges
    sizes: tuple[Sizes, ...]

    @property
    def most(self) -> Sizes:
        return self.sizes[-1]

    def takes(self, sizes: Sizes) -> bool:
        least, most = self.sizes[0], self.sizes[-1]
        return all(least[letter] <= size <= most[letter] for letter, size in sizes.items())

    def shapes(self, tensor: EngineTensor) -> tuple[Shape, ...]:
        return tuple(shape_of(tensor, sizes) for sizes in self.sizes)

    @property
    def volume(self) -> int:
        return self.most["B"] * self.most["K"] * self.most["S"] * self.most["M"]


def profiles_of(passport: Passport) -> tuple[Profile, ...]:
    return tuple(
        Profile(index, ranges, sizes_from_ranges(ranges, passport.cache_form, passport.slots))
        for index, ranges in enumerate(passport.profiles)
    )


def profile_for(profiles: Sequence[Profile], sizes: Sizes) -> Profile | None:
    """The smallest that takes these sizes."""
    return min((p for p in profiles if p.takes(sizes)), key=lambda p: (p.volume, p.index), default=None)


def call_sizes(
    folder: Path, passport: Passport, graph: str, shapes: Mapping[str, Shape], rows: int | None = None
) -> tuple[dict[str, int], Profile]:
    """The size of every letter of the contract in a call, after its inputs' shapes were checked; and its profile.

    `rows` is how many the engine will run where that is more than the call has sources.
    """
    sizes = agreed_sizes(graph, passport.engines[graph], shapes)
    sizes["B"] = rows or sizes["B"]
    profile = checked_profile(folder, passport, graph, shapes, sizes)
    if "M" in sizes and sizes["M"] != sizes["L"] + sizes["K"]:
        raise RequestError(
            f"{graph} input self_mask has shape {list(shapes['self_mask'])}, expected its last axis to count "
            f"{sizes['L']} cached slots and {sizes['K']} new ones"
        )
    return sizes, profile


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


def checked_profile(folder: Path, passport: Passport, graph: str, shapes: Mapping[str, Shape], sizes: Sizes) -> Profile:
    """The profile that serves a call. Where none does, names the first input that the largest does not take, and the
    build that would take them all."""
    profiles = profiles_of(passport)
    if (chosen := profile_for(profiles, sizes)) is not None:
        return chosen
    largest = max(profiles, key=lambda profile: profile.volume)
    least, most = largest.sizes[0], largest.most
    wrong = {letter: size for letter, size in sizes.items() if not least[letter] <= size <= most[letter]}
    named = next(t for t in passport.engines[graph].inputs if any(axis in wrong for axis in t.axes))
    taken = [profile.shapes(named) for profile in profiles]
    takes = " or ".join(dict.fromkeys(f"{list(shapes[0])} to {list(shapes[-1])}" for shapes in taken))
    options = dict(fixing_option(largest.ranges, passport, letter, size) for letter, size in wrong.items())
    raise RequestError(
        f"{graph} input {named.name} has shape {list(shapes[named.name])}, this engine takes {takes}; "
        f"{fix(folder, passport, **options)}"
    )


def check_reserved(folder: Path, passport: Passport, slots: int) -> None:
    """Refuses a cache length that the engine does not have."""
    profiles = profiles_of(passport)
    least, most = min(p.sizes[0]["L"] for p in profiles), max(p.most["L"] for p in profiles)
    if not least <= slots <= most:
        takes = f"has {most}" if least == most else f"takes {least} to {most}"
        option, value = fixing_option(passport.ranges, passport, "L", slots)
        raise RequestError(
            f"a cache of {slots} slots was requested, this engine {takes}; {fix(folder, passport, **{option: value})}"
        )


def fixing_option(ranges: ShapeRanges, passport: Passport, axis: str, size: int) -> tuple[str, Range | int]:
    """The build option, and its value, of an engine that takes this size too."""
    if axis == "L" and passport.cache_form == "static":
        return "slots", size
    if axis in "LM":  # a growing cache is as long as all beams of all steps
        size = math.ceil(size / ranges.beam.max) + (axis == "L")
    name = RANGE_OF_AXIS[axis]
    r: Range = getattr(ranges, name)
    return name, Range(min(r.min, size), r.opt, max(r.max, size))


def check_dtypes(graph: str, entry: EngineEntry, values: Mapping[str, np.ndarray]) -> None:
    for tensor in entry.inputs:
        if tensor.name in values and not np.can_cast(values[tensor.name].dtype, tensor.dtype, "same_kind"):
            given = values[tensor.name].dtype
            raise RequestError(f"{graph} input {tensor.name} is {given}, expected {tensor.dtype}")


def check_places(name: str, places: np.ndarray, end: int) -> None:
    """Refuses indices below 0 or from `end` on: the GPU would read or write out of bounds."""
    if places.size and (places.min() < 0 or places.max() >= end):
        raise RequestError(f"{name} holds {places.min()} to {places.max()}, expected 0 to {end - 1}")

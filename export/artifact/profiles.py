"""Derives the shapes of every graph input from four ranges. Pure functions, independent of TensorRT.

TensorRT does not check that two inputs agree in their batch, so all shapes are derived from one set of numbers here
and checked before a build.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from seq2engine.errors import BuildError
from seq2engine.model.config import FRAMES, ModelConfig

from ..contract import GraphSpec

KINDS = ("min", "opt", "max")
FLAGS = {
    "batch": "batch",
    "beam": "beam",
    "source": "source-length",
    "target": "max-length",
}  # range -> flag of a build
NAMES = tuple(FLAGS)
MOST_SOURCES = 65_536  # sources of a batch at most; more is a typing error
Shapes = dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]  # input -> shape at min, opt, max


@dataclass(frozen=True)
class Range:
    """Least, usual and most."""

    min: int
    opt: int
    max: int

    def __str__(self) -> str:
        return f"{self.min}:{self.opt}:{self.max}"

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and self.min <= number <= self.max

    @property
    def fixed(self) -> bool:
        return self.min == self.max


@dataclass(frozen=True)
class ShapeRanges:
    """The four numbers a build is planned by: sources in a batch, beams, source length, generated tokens."""

    batch: Range
    beam: Range
    source: Range
    target: Range

    @property
    def slots(self) -> int:
        """Cache slots that always suffice: every beam of every step."""
        return self.beam.max * self.target.max

    def covers(self, other: ShapeRanges) -> bool:
        """Whether every request that fits the other fits here, too."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in NAMES)
        return all(mine.min <= theirs.min and theirs.max <= mine.max for mine, theirs in pairs)


@dataclass(frozen=True)
class Workload:
    """The largest request to come, as far as it is known: None is not known."""

    batch: int | None = None
    beam: int | None = None
    source: int | None = None
    target: int | None = None

    def fits(self, ranges: ShapeRanges) -> bool:
        """Whether ranges reach that far."""
        sizes = ((getattr(self, name), getattr(ranges, name)) for name in NAMES)
        return all(size is None or size <= taken.max for size, taken in sizes)

    def spare(self, ranges: ShapeRanges) -> tuple[int, int]:
        """The excess of ranges over this workload, to be minimised: small where a size is known, and large, so
        that every request fits, where it is not."""
        known = [getattr(ranges, name).max for name in NAMES if getattr(self, name) is not None]
        unknown = [getattr(ranges, name).max for name in NAMES if getattr(self, name) is None]
        return math.prod(known), -math.prod(unknown)


def short(value: Range | int) -> str:
    """The shortest text of a range as an option."""
    return str(value.max) if isinstance(value, Range) and value.fixed else str(value)


def range_from_text(text: str, name: str) -> Range:
    """`8` or `1:8:64` -> Range."""
    try:
        numbers = [int(part) for part in text.split(":")] if text.isascii() else []
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 3):
        raise BuildError(f"--{name} {text!r} is not a range; write one number, or min:opt:max such as 1:8:64")
    return Range(*(numbers * 3 if len(numbers) == 1 else numbers))


def rising_range(text: str, name: str) -> Range:
    """The same; raises if it cannot be a range of any model."""
    found = range_from_text(text, name)
    if not 1 <= found.min <= found.opt <= found.max:
        raise BuildError(f"{name} {text}, expected a number of at least 1, or rising numbers such as 1:8:64")
    return found


def check_ranges(ranges: ShapeRanges, config: ModelConfig) -> None:
    """Raises one error that lists everything wrong with the ranges."""
    problems = []
    for name in NAMES:
        r: Range = getattr(ranges, name)
        if not 1 <= r.min <= r.opt <= r.max:
            problems.append(f"{FLAGS[name].replace('-', ' ')} {r} must rise from at least 1")
    for name, limit, whose in (
        ("batch", MOST_SOURCES, "the most that is built,"),
        ("beam", config.target_vocab, "the model's vocabulary of"),
        ("source", config.max_source, "the model's maximum of"),
        ("target", config.max_target, "the model's maximum of"),
    ):
        r = getattr(ranges, name)
        if r.max > limit:
            problems.append(f"{FLAGS[name].replace('-', ' ')} {r} exceeds {whose} {limit}")
    if problems:
        raise BuildError("shape ranges: " + "; ".join(problems))


def check_profiles(profiles: Sequence[ShapeRanges], config: ModelConfig) -> tuple[ShapeRanges, ...]:
    """The profiles of one engine, checked, the widest first.

    The widest covers all others: so every request within the ranges of an engine fits one of its profiles, and no
    request falls between two.
    """
    for ranges in profiles:
        check_ranges(ranges, config)
    for i, ranges in enumerate(profiles):
        if all(ranges.covers(other) for other in profiles):
            return (ranges, *profiles[:i], *profiles[i + 1 :])
    widest = " ".join(
        f"{FLAGS[name].replace('-', ' ')} {min(r.min for r in given)} to {max(r.max for r in given)}"
        for name in NAMES
        if (given := [getattr(ranges, name) for ranges in profiles])
    )
    raise BuildError(
        f"profiles: none of {len(profiles)} covers the others, so requests would fall between them; "
        f"make one of them the widest: {widest}"
    )


def sizes_from_ranges(ranges: ShapeRanges, cache_form: str, slots: int) -> tuple[dict[str, int], ...]:
    """The size of every letter of the contract at min, opt and max. A static cache has one length for all three."""
    sizes = []
    for kind in KINDS:
        beam, target = getattr(ranges.beam, kind), getattr(ranges.target, kind)
        if cache_form == "static":
            cache = attended = slots
        else:
            cache = 0 if kind == "min" else beam * (target - 1)
            attended = cache + beam
        sizes.append(
            {
                "B": getattr(ranges.batch, kind),
                "K": beam,
                "S": getattr(ranges.source, kind),
                "F": FRAMES * getattr(ranges.source, kind),
                "L": cache,
                "M": attended,
                "R": getattr(ranges.batch, kind),  # rows and slots that a gather takes
                "T": cache,
            }
        )
    return tuple(sizes)


def shapes_from_ranges(spec: GraphSpec, ranges: ShapeRanges, cache_form: str, slots: int) -> Shapes:
    """The min, opt and max shape of every input of a graph."""
    least, usual, most = sizes_from_ranges(ranges, cache_form, slots)
    return {t.name: (t.shape(least), t.shape(usual), t.shape(most)) for t in spec.inputs}

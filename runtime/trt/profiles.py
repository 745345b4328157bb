"""The profiles of an engine: which sizes each takes, and which of them serves a call.

An engine may have several, say one for single short sources and one for large batches; TensorRT has its kernels tuned
for each. A call runs in the smallest that takes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from seq2engine.export.artifact.passport import EngineTensor, Passport
from seq2engine.export.artifact.profiles import ShapeRanges, sizes_from_ranges

from .memory import Shape, Sizes, shape_of


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

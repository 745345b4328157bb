"""Options of `engines_from_onnx`: all but the bundle, the targets, the shapes and the precision."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..artifact.build_flags import PLAIN, BuildFlags
from ..artifact.profiles import ShapeRanges


@dataclass(frozen=True)
class BuildOptions:
    """The optional settings of a build."""

    flavour: str | None = None  # tensorrt or tensorrt_rtx; by default the one that is installed
    slots: int | None = None  # length of a static cache; by default one that always suffices
    narrower: tuple[ShapeRanges, ...] = ()  # ranges within the widest that get profiles of their own
    flags: BuildFlags = PLAIN
    name: str | None = None  # of the engine's folder; by default its precision, beams and key: builds never collide
    force: bool = False  # replace the engine of that name
    cache: str | os.PathLike[str] | None = None  # folder of engines built before; none: only the bundle's own
    rebuild: bool = False  # build again though the same engine was built before
    workers: int = 1  # graphs built at once, each in a process of its own


DEFAULT_OPTIONS = BuildOptions()

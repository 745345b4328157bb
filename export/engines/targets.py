"""GPUs that engines are built for: which are known, which can run a graph, and which share an engine."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seq2engine.errors import BuildError, UsageError

from ..artifact.gpu_support import NEAREST, PORTABLE, unknown_target, unsupported
from ..contract import Census

APART = ("sm75",)  # targets that share an engine with no other


def check_targets(
    trt: Any, targets: Sequence[str], precision: str, root: Path, censuses: Sequence[Census] = ()
) -> None:
    """Refuses targets that are unknown, or that cannot run the graphs, before anything is built."""
    if not hasattr(trt, "ComputeCapability"):
        if targets:
            raise BuildError(f"{trt.__name__} builds for the GPU of this machine only; leave --gpu out")
        return
    known = [f"sm{name[2:]}" for name in trt.ComputeCapability.__members__ if name.startswith("SM")]
    problems = [unknown_target(target, known) for target in targets if target not in known]
    command = f"seq2engine build {shlex.quote(str(root))} --gpu"
    reasons = {target: unsupported(target, precision, censuses) for target in targets or PORTABLE}
    able = [target for target, reason in reasons.items() if reason is None]
    for target, reason in reasons.items():
        if reason is None:
            continue
        if not targets and able:  # no GPU was named: those that can are the nearest
            repair = f"{command} {' '.join(able)} --precision {precision}"
            problems.append(
                f"portable engines run on {target} too, which cannot run {precision} ({reason}); build with: {repair}"
            )
            break
        repair = f"{command} {target} --precision {NEAREST.get(precision, precision)}"
        problems.append(f"{target} cannot run {precision} ({reason}); build with: {repair}")
        if not targets:  # none can, for the same reason
            break
    if problems:
        unnamed = any(not re.fullmatch(r"sm\d+", target) for target in targets)  # no GPU has such a name
        raise (UsageError if unnamed else BuildError)("; ".join(problems))


def target_groups(targets: Sequence[str]) -> list[list[str]]:
    """Targets by the engine they share. Turing gets one of its own: it lacks types that all others have, and an engine
    for several GPUs can have only what every one of them has."""
    once = list(dict.fromkeys(targets))
    groups = [[t for t in once if t not in APART], *([t] for t in once if t in APART)]
    return [group for group in groups if group] or [[]]

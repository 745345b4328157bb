"""The check of a GPU machine on the stand-in, killed half way the first time: python rehearsed_check.py FOLDER"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from seq2engine.commands.pipeline import gpu_check as check
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.artifact.passport import PASSPORT, Passport, read_passport
from seq2engine.export.artifact.profiles import ShapeRanges
from support.host_device import HostDevice
from support.stand_in_engines import put_engines
from support.tensorrt_stand_in import tensorrt_stand_in


def main(folder: Path) -> int:
    before = folder / "began"

    def build(bundle: Bundle, targets: Sequence[str], ranges: ShapeRanges, precision: str, flavour: str) -> Passport:
        shutil.rmtree(bundle.root / "engines" / f"sm86-sm89-{precision}", ignore_errors=True)  # as a build does
        engines = put_engines(bundle, ranges, precision, flavour, targets=tuple(targets))
        if precision == "fp16" and not before.exists():
            before.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return read_passport(engines / PASSPORT)

    for name in ("parity_stage", "steps_stage", "bench_stage"):  # which take their time; other tests run them
        setattr(check, name, lambda *given: check.Stage("", True, "quick"))
    check.load_tensorrt = tensorrt_stand_in
    wanted = {"tests": None, "precisions": ("fp32", "fp16"), "rehearsal": True}
    stages = check.gpu_check(folder / "out", HostDevice(), ["tensorrt_rtx"], build, **wanted)
    return 0 if all(stage.passed for stage in stages) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

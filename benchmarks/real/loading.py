"""From `load()` to the first token, and peak memory, of OPUS-MT beside CTranslate2:
`python -m seq2engine.benchmarks.real.loading FOLDER [ROUNDS]` writes FOLDER/loading.json and prints a table.

FOLDER holds what `make measure-real` makes: `hf`, `bundle` and `pairs.tsv`. Every load is a process of its own
(loading_process.py), and arms take turns. Conditions:

first    nothing of the bundle is in the user's cache folder
warm     it is, and the model's files are in the page cache
cold     the model's files are not in the page cache; libraries are; no batch is decoded
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import rmtree
from statistics import median
from typing import Any

from seq2engine.common.tables import text_table
from seq2engine.errors import SessionError, UsageError
from seq2engine.runtime.threads import usable_cores

from ..machine import environment, load_of_others
from .loading_process import MARKS
from .scripts import exit_code_of

PROCESS = Path(__file__).with_name("loading_process.py")
CACHE, RESULT = "cache", "loading.json"
CONVERTED = "ctranslate2-{}"


@dataclass(frozen=True)
class Arm:
    """A library in a precision; its process reads `model`."""

    name: str
    library: str
    precision: str
    model: Path

    @property
    def conditions(self) -> tuple[str, ...]:
        return ("first", "warm", "cold") if self.library == "seq2engine" else ("warm", "cold")


@dataclass(frozen=True)
class Load:
    """One process: seconds by the clock, CPU seconds and peak bytes at every mark, all since the process began."""

    arm: str
    condition: str
    seconds: Mapping[str, float]
    cpu: Mapping[str, float]
    peak: Mapping[str, int]
    text: str  # of the first sentence

    def since_import(self, mark: str) -> tuple[float, float]:
        """Seconds by the clock and of the CPU from `load()` to a mark."""
        return self.seconds[mark] - self.seconds["import"], self.cpu[mark] - self.cpu["import"]


def arms_of(folder: Path) -> list[Arm]:
    for needed in ("hf", "bundle", "pairs.tsv"):
        if not (folder / needed).exists():
            raise UsageError(f"{folder} has no {needed}; make it with: make measure-real")
    return [
        *(Arm(f"onnxruntime {name}", "seq2engine", name, folder / "bundle") for name in ("fp32", "w8a8")),
        *(
            Arm(f"ctranslate2 {name}", "ctranslate2", name, folder / CONVERTED.format(name))
            for name in ("float32", "int8")
        ),
    ]


def convert(arm: Arm, folder: Path) -> None:
    """Writes CTranslate2's model, if it is not there."""
    if arm.library == "ctranslate2" and not (arm.model / "model.bin").is_file():
        run(arm, {"do": "convert", "hf": str(folder / "hf")}, folder)


def run(arm: Arm, request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The answer of a new process of an arm."""
    asked = {"library": arm.library, "precision": arm.precision, "model": str(arm.model), **request}
    asked["started"] = time.perf_counter()  # the clock of the machine: both processes read the same
    done = subprocess.run(
        [sys.executable, PROCESS, json.dumps(asked)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XDG_CACHE_HOME": str(cache_of(arm, folder))},
    )
    if done.returncode:
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise SessionError(f"{arm.name} failed in its process: {reason}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def measured_load(arm: Arm, condition: str, folder: Path, threads: int) -> Load:
    if condition == "first":
        rmtree(cache_of(arm, folder), ignore_errors=True)
    if condition == "cold":
        forget_pages(arm.model)
        forget_pages(cache_of(arm, folder))
    request = {"do": "load", "pairs": str(folder / "pairs.tsv"), "spm": str(folder / "hf" / "source.spm")}
    return Load(arm.name, condition, **run(arm, {**request, "threads": threads, "batch": condition != "cold"}, folder))


def cache_of(arm: Arm, folder: Path) -> Path:
    """The user's cache folder of an arm."""
    return folder / CACHE / arm.precision


def forget_pages(folder: Path) -> None:
    """Drops the files of a folder from the page cache, unless another process maps them."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)  # only clean pages are dropped
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)


def measured(arms: Sequence[Arm], folder: Path, rounds: int, threads: int) -> Iterator[Load]:
    for arm in arms:
        convert(arm, folder)
    for _ in range(rounds):
        for condition in ("first", "warm", "cold"):
            for arm in arms:
                if condition in arm.conditions:
                    yield measured_load(arm, condition, folder, threads)


def table(loads: Sequence[Load]) -> str:
    """Medians of every arm and condition."""
    rows = []
    for arm, condition in dict.fromkeys((load.arm, load.condition) for load in loads):
        found = [load for load in loads if (load.arm, load.condition) == (arm, condition)]
        seconds, cpu = (median(load.since_import("first token")[way] for load in found) for way in (0, 1))
        whole = median(load.seconds["first token"] for load in found)
        peaks = [
            f"{median(load.peak[mark] for load in found) / 1e6:.0f}" if mark in found[0].peak else ""
            for mark in MARKS[1:]
        ]
        rows.append([arm, condition, f"{seconds:.2f}", f"{cpu:.2f}", f"{whole:.2f}", *peaks])
    header = ["arm", "condition", "load to token, s", "CPU s", "with import, s", *(f"MB, {mark}" for mark in MARKS[1:])]
    return text_table(header, rows)


def measure(arguments: list[str]) -> None:
    folder, rounds = Path(arguments[0]), int(arguments[1]) if len(arguments) > 1 else 5
    threads, before = usable_cores(), load_of_others()
    loads = list(measured(arms_of(folder), folder, rounds, threads))
    result = {
        "environment": asdict(environment(threads, before)),
        "rounds": rounds,
        "loads": [asdict(load) for load in loads],
    }
    (folder / RESULT).write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(table(loads))


if __name__ == "__main__":
    sys.exit(exit_code_of(measure, "python -m seq2engine.benchmarks.real.loading FOLDER [ROUNDS]"))

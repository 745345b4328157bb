"""What a report is about: the model, the date, the versions, the machine and the command, as rows of a small table.

A report travels without its bundle; these rows identify it.
"""

from __future__ import annotations

import os
import platform
import re
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = {  # what is shown -> the distributions it may come from
    "seq2engine": ("seq2engine",),
    "torch": ("torch",),
    "onnx": ("onnx",),
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
    "tensorrt_rtx": ("tensorrt-rtx", "tensorrt-rtx-cu13", "tensorrt-rtx-cu12"),
}
HASH_LENGTH = 12  # characters of a hash in reports
CPUINFO = Path("/proc/cpuinfo")


def about_rows(
    model: str, shape: str = "", checkpoint: str = "", command: str = "", now: datetime | None = None
) -> list[tuple[str, str]]:
    """(name, value) rows; what is empty is left out.

    `model` is the name people know it by, `shape` its config in a few words (`ModelConfig.shape`), `checkpoint` the
    hash of its weights, `command` the command line that made the report.
    """
    rows = [
        ("model", ", ".join(filter(None, (model, shape)))),
        ("checkpoint", checkpoint[:HASH_LENGTH]),
        ("date", f"{now or datetime.now():%Y-%m-%d %H:%M}"),
        ("versions", ", ".join(f"{name} {number}" for name, number in installed_versions().items())),
        ("machine", machine_text()),
        ("command", command),
    ]
    return [(name, value) for name, value in rows if value]


def installed_versions() -> dict[str, str]:
    """Versions of the installed packages that affect results; nothing is imported."""
    found = {name: first_version(distributions) for name, distributions in PACKAGES.items()}
    return {name: number for name, number in found.items() if number}


def first_version(distributions: tuple[str, ...]) -> str:
    for distribution in distributions:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return ""


def machine_text(cpuinfo: Path = CPUINFO) -> str:
    """Processor, usable cores, system and Python."""
    named = re.search(r"^model name\s*: *(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.is_file() else None
    cpu = named[1].strip() if named else platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    counted = f"{cores} core{'' if cores == 1 else 's'}"
    return f"{cpu}, {counted}, {platform.system()} {platform.machine()}, Python {platform.python_version()}"

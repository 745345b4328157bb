"""Measurements of this machine, kept in the user's cache folder.

Each measurement is one file, named by a hash of all that it depends on: processor and its instructions, cores, versions
of libraries, and what the caller adds, such as the model. A file holds these as well and is used only if they are the
same. A damaged file counts as missing; files are replaced atomically, so the last writer wins. A folder that
cannot be written to keeps nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from .atomic_folders import new_file
from .json_files import read_json

LIBRARIES = ("seq2engine", "onnxruntime", "onnxruntime-gpu", "torch", "numpy")
LISTING = Path("/proc/cpuinfo")
VERSION = re.compile("^Version: (.+)$", re.MULTILINE)
OF_CPU = ("model name", "flags", "Features", "cache size")

Value = dict[str, Any]


def user_cache() -> Path:
    """The folder for what is kept on this machine for the user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seq2engine"


@dataclass(frozen=True)
class Measured:
    """Measurements of one thing, such as the precisions of a bundle. `folder` None: none are kept."""

    folder: Path | None
    about: Mapping[str, Any]  # all that the measurement depends on beside the machine

    @property
    def key(self) -> Value:
        return {"machine": machine_facts(), **self.about}

    @property
    def path(self) -> Path | None:
        name = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()[:32]
        return None if self.folder is None else self.folder / f"{name}.json"

    def value(self) -> Value | None:
        """What was measured before; None: nothing, or of something else."""
        if self.path is None:
            return None
        try:
            found = read_json(self.path)
        except (OSError, ValueError):
            return None
        same = isinstance(found, dict) and found.get("key") == json.loads(json.dumps(self.key))
        value = found.get("value") if same else None
        return value if isinstance(value, dict) else None

    def keep(self, value: Value) -> None:
        if self.path is None:
            return
        with suppress(OSError), new_file(self.path) as file:  # it is measured again next time
            file.write_text(json.dumps({"key": self.key, "value": value}, indent=1) + "\n", encoding="utf-8")


def machine_facts() -> Value:
    """The facts that performance depends on: the processor as this process sees it, and the libraries."""
    fields: dict[str, str] = {}
    if LISTING.is_file():
        for line in LISTING.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in OF_CPU:
                fields.setdefault(name.strip(), value.strip())  # all processors are alike
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": fields or platform.processor(), "cores": cores, "libraries": versions()}


def versions(names: Sequence[str] = LIBRARIES) -> dict[str, str]:
    """Of the libraries that are installed. Their metadata are not parsed as a whole, which takes 20 ms."""
    found = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found_in = distribution(name)  # an .egg-info, as in a clone's own folder, has another name for it
            named = VERSION.search(found_in.read_text("METADATA") or found_in.read_text("PKG-INFO") or "")
            found[name] = named[1] if named else ""
    return found

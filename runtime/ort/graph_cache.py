"""Graphs in the form that ONNX Runtime runs, kept in the user's cache folder: making one can take longer than opening.

A file is the SHA-256 of its key and its graph, followed by the graph. The key is all that the graph depends on: the
bundle's graph and weights by their hashes, the form, and the code and libraries that make it. A file that is damaged,
of another key, or one that somebody else could have written, is made again. Files are replaced atomically, so processes
may write at the same time; those that were not used for longest are removed when all of them take more than
`MOST_BYTES`. Where nothing can be written, graphs are made every time. To clear it, remove the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from seq2engine.common.atomic_folders import new_file
from seq2engine.common.measured import versions
from seq2engine.export import ort_forms

MOST_BYTES = 1 << 30  # of all graphs: some 30 of a large vocabulary
DIGEST = hashlib.sha256().digest_size
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True)
class GraphCache:
    folder: Path

    def graph(self, about: Mapping[str, Any], make: Callable[[], bytes]) -> bytes:
        """The graph that `about` describes, from its file or made."""
        found = self.found(about)
        if found is None:
            found = make()
            self.keep(about, found)
        return found

    def found(self, about: Mapping[str, Any]) -> bytes | None:
        """The graph that `about` describes, from its file; None where there is none."""
        key, path = self.place(about)
        graph = graph_in(path, key)
        if graph is not None:
            with suppress(OSError):
                os.utime(path)  # it was used now
        return graph

    def keep(self, about: Mapping[str, Any], graph: bytes) -> None:
        key, path = self.place(about)
        with suppress(OSError):  # it is made again next time
            with new_file(path) as file, file.open("wb") as written:
                written.write(digest_of(key, graph))
                written.write(graph)
            self.remove_oldest(path)

    def place(self, about: Mapping[str, Any]) -> tuple[bytes, Path]:
        """The key of a graph, and its file."""
        key = json.dumps({**about, "code": code_of_forms(), "libraries": libraries()}, sort_keys=True).encode()
        return key, self.folder / f"{hashlib.sha256(key).hexdigest()[:32]}.onnx"

    def remove_oldest(self, newest: Path) -> None:
        """Keeps the size of all files below the limit; the newest stays, whatever its size."""
        files = [(path, path.stat()) for path in self.folder.glob("*.onnx") if path != newest]
        free = MOST_BYTES - newest.stat().st_size
        for path, about in sorted(files, key=lambda file: -file[1].st_mtime_ns):
            free -= about.st_size
            if free < 0:
                path.unlink(missing_ok=True)


def graph_in(path: Path, key: bytes) -> bytes | None:
    """The graph of a file; None where there is none, or not the one that was written for this key."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    about = os.fstat(handle)
    if not stat.S_ISREG(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & OTHERS_WRITE:
        os.close(handle)
        return None
    with open(handle, "rb", buffering=0) as file:
        digest, graph = file.read(DIGEST), file.readall()
    return graph if digest == digest_of(key, graph) else None


def digest_of(key: bytes, graph: bytes) -> bytes:
    digest = hashlib.sha256(hashlib.sha256(key).digest())
    digest.update(graph)
    return digest.digest()


@cache
def libraries() -> dict[str, str]:
    """Those that graphs depend on, and their versions; onnx is not imported for that."""
    return {**versions(["onnx"]), "onnxruntime": ort.__version__, "numpy": np.__version__}


@cache
def code_of_forms() -> str:
    """A hash of the modules that make forms: a graph of an older version of them is of no use."""
    digest = hashlib.sha256()
    folder = Path(ort_forms.__path__[0]).parent
    inner = ("artifact", "device_graphs", "kernel_forms", "ort_forms", "precision")
    folders = (folder, *(folder / name for name in inner), Path(__file__).parent)
    for path in (path for each in folders for path in sorted(each.glob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()

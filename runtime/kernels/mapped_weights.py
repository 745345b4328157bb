"""Weights that our kernels read, mapped once for all sessions of a process.

The library packs a tensor when a step first needs it, and keeps one packed copy for all sessions that give it the same
memory: a session of all threads, its workers and the one that drafts. So files are mapped here, not by ONNX Runtime.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
import threading
from collections.abc import Iterable
from pathlib import Path
from weakref import WeakValueDictionary, finalize

import numpy as np
import onnxruntime as ort

from seq2engine.export.ort_form import FileWeight

from .library import note_mapped


class MappedFile:
    """A file in memory, read-only; its pages are read when they are first used. It stays open for as long."""

    def __init__(self, path: Path):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.pages = mmap.mmap(file, 0, access=mmap.ACCESS_READ)
        except BaseException:
            os.close(file)
            raise
        if hasattr(mmap, "MADV_NOHUGEPAGE"):  # else the system maps 2 MB around a row that is read
            self.pages.madvise(mmap.MADV_NOHUGEPAGE)
        self.bytes = np.frombuffer(self.pages, dtype=np.uint8)
        place = self.bytes.ctypes.data, len(self.bytes)
        note_mapped(*place, file)
        finalize(self, forget, *place, file)

    def array(self, weight: FileWeight) -> np.ndarray | None:
        """A weight of the file; None where it is not in it, or not aligned."""
        kind, offset = np.dtype(weight.dtype), weight.offset
        size = math.prod(weight.dims) * kind.itemsize
        if offset < 0 or offset % kind.itemsize or offset + size > len(self.bytes):
            return None
        return self.bytes[offset : offset + size].view(kind).reshape(weight.dims)


def forget(address: int, size: int, file: int) -> None:
    note_mapped(address, size, -1)
    os.close(file)


FILES: WeakValueDictionary[tuple[str, int, int, int], MappedFile] = WeakValueDictionary()
MAPPING = threading.Lock()


def mapped(path: Path) -> MappedFile | None:
    """The file in memory: the same as before, while it is in use and has not changed. None: it is no file that can be,
    which ONNX Runtime says in its own words."""
    try:
        about = os.stat(path)
    except OSError:
        return None
    if not stat.S_ISREG(about.st_mode) or not about.st_size:
        return None
    key = str(path.resolve()), about.st_ino, about.st_mtime_ns, about.st_size
    with MAPPING:
        found = FILES.get(key)
        if found is None:
            found = FILES[key] = MappedFile(path)
        return found


def share_weights(options: ort.SessionOptions, weights: Iterable[FileWeight], folder: Path) -> list[object]:
    """Has a session read these weights from mapped files. What is returned must live as long as it."""
    held: list[object] = []
    for weight in weights:
        beside = Path(weight.file).name == weight.file  # the graph; ONNX Runtime refuses others
        file = mapped(folder / weight.file) if beside else None
        array = None if file is None else file.array(weight)
        if array is not None:
            value = ort.OrtValue.ortvalue_from_numpy(array)
            options.add_initializer(weight.name, value)
            held += [file, value]
    return held

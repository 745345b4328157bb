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
from pathlib import Path
from weakref import WeakValueDictionary, finalize

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from seq2engine.export.artifact.graph_files import external_of
from seq2engine.export.kernel_forms.ops import DOMAIN

from .library import note_mapped


class MappedFile:
    """A file in memory, read-only; its pages are read when they are first used."""

    def __init__(self, path: Path):
        with path.open("rb") as file:
            self.pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.bytes = np.frombuffer(self.pages, dtype=np.uint8)
        place = self.bytes.ctypes.data, len(self.bytes)
        note_mapped(*place, True)
        finalize(self, note_mapped, *place, False)

    def array(self, tensor: TensorProto) -> np.ndarray | None:
        """An external tensor of the file; None where it is not in it, or not aligned."""
        kind = helper.tensor_dtype_to_np_dtype(tensor.data_type)
        _, offset, _ = external_of(tensor)
        size = math.prod(tensor.dims) * kind.itemsize
        if offset < 0 or offset % kind.itemsize or offset + size > len(self.bytes):
            return None
        return self.bytes[offset : offset + size].view(kind).reshape(tuple(tensor.dims))


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


def share_weights(options: ort.SessionOptions, graph: bytes, folder: Path) -> list[object]:
    """Has a session read the weights of our operators from mapped files. What is returned must live as long as it."""
    model = onnx.load_from_string(graph)
    read = {node.input[1] for node in model.graph.node if node.domain == DOMAIN and len(node.input) > 1}
    held: list[object] = []
    for tensor in model.graph.initializer:
        if tensor.name not in read or tensor.data_location != TensorProto.EXTERNAL:
            continue
        location, _, _ = external_of(tensor)
        file = mapped(folder / location) if Path(location).name == location else None  # next to the graph, or refused
        array = None if file is None else file.array(tensor)
        if array is not None:
            value = ort.OrtValue.ortvalue_from_numpy(array)
            options.add_initializer(tensor.name, value)
            held += [file, value]
    return held

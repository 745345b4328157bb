"""The compiled library of fused operators, where there is one.

It is compiled when the package is built (pyproject.toml), for x86 processors with AVX2 or AVX-512. Without a C
compiler, or on another processor, sessions run the forms of export/ort_forms, which need only ONNX Runtime.
"""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from pathlib import Path

MODULE = "seq2engine.runtime.kernels._library"
AVX2, AVX512 = 0, 1  # of `seq2engine_choose`
WIDTHS = {8: "AVX2", 16: "AVX-512"}  # numbers in a vector


@cache
def library() -> Path | None:
    """The library's file; None where it was not built, or this processor cannot run it."""
    found = importlib.util.find_spec(MODULE)
    if found is None or found.origin is None:
        return None
    return Path(found.origin) if choose(Path(found.origin), AVX512) else None


def instructions() -> str:
    """The instructions that fused operators use here; "none" where there are none of them."""
    path = library()
    return "none" if path is None else WIDTHS[choose(path, AVX512)]


def choose(path: Path, most: int) -> int:
    """Has the library use the best kernels of this processor, up to `most`; returns the numbers in a vector, or 0."""
    return int(loaded(path).seq2engine_choose(most))


@cache
def loaded(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


def note_mapped(address: int, size: int, file: int) -> None:
    """Tells the library that memory is that of an open file, which it then reads instead; -1: it no longer is."""
    path = library()
    assert path is not None
    loaded(path).seq2engine_mapped(ctypes.c_void_p(address), ctypes.c_size_t(size), file)

"""Memory of ONNX Runtime sessions: one arena for all of a process, and what nobody uses goes back to the system.

An arena keeps what it once had, so with one for each session a process holds the most that each of them ever needed,
though they work in turn. And `malloc` keeps freed pieces of some megabytes, which the next, longer cache does not fit
into. Both are given back when a batch is encoded that is large, or unlike those before: what they had is free by then.
Otherwise it is not worth it, as fresh pages are cleared by the system, one by one, when they are first written to.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

SAME_AS_REQUESTED = 1  # grow by what is asked for; else by twice as much every time
LARGE = 1 << 19  # numbers of one tensor inside an encoder: 256 tokens of `base`
OWN_PAGES = 1 << 20  # bytes from which on an array has pages of its own
REGISTERING = threading.Lock()  # two threads may open sessions at once


def share_arena(options: ort.SessionOptions) -> None:
    """Has a session take its memory from the arena of the process, which is made when the first one asks."""
    with REGISTERING:
        register_arena()
    options.add_session_config_entry("session.use_env_allocators", "1")
    # A pattern is one block for all tensors of a step, beside those that its first step had one by one.
    options.enable_mem_pattern = False


@cache
def register_arena() -> None:
    """Once: ONNX Runtime takes a second one without a word, and which of them a session shares would depend on when."""
    place = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    settings = ort_state.OrtArenaCfg({"arena_extend_strategy": SAME_AS_REQUESTED})
    ort_state.create_and_register_allocator(place, settings)


def trim() -> None:
    """Has `malloc` give back what is free in it, where it can (glibc); some tens of microseconds."""
    given = malloc_trim()
    if given is not None:
        given(0)


@cache
def malloc_trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


class Holding:
    """What batches the process holds memory for: one for all sessions, as the arena and `malloc` are."""

    def __init__(self) -> None:
        self.numbers = 0

    def fits(self, numbers: int) -> bool:
        """Whether a batch with so many to a tensor needs about as much as those before: then it can have what they had.

        If it does not, what is held is no good to it, or it is too much for it, and had better be given back. A large
        one needs the memory most, and what it is given afresh costs it a few percent of its time.
        """
        fits = numbers <= LARGE and self.numbers / 2 <= numbers <= self.numbers
        if not fits:
            self.numbers = numbers
        return fits

    def forget(self) -> None:
        """Something else was done, like opening a session: whatever comes next, first give back what that has left."""
        self.numbers = 0


HELD = Holding()


def giving_back() -> ort.RunOptions:
    """For a run after which the arena gives back what nobody uses then."""
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


def zeros(shape: Sequence[int], dtype: Any, room: int = 1) -> np.ndarray:
    """As numpy's; a large one goes back to the system as soon as it is dropped.

    It has room to become so many times as large where it is (`resized`). What is never used of that is never there.
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    if size < OWN_PAGES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return np.zeros(shape, dtype)
    pages = mmap.mmap(-1, room * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, dtype, math.prod(shape)).reshape(shape)


def resized(array: np.ndarray, shape: Sequence[int]) -> np.ndarray | None:
    """An array of another shape that begins where this one does, in the same memory; None where that has no room."""
    pages: Any = array
    while isinstance(pages, np.ndarray | memoryview):
        pages = pages.base if isinstance(pages, np.ndarray) else pages.obj
    count = math.prod(shape)
    if not isinstance(pages, mmap.mmap) or count * array.itemsize > len(pages):
        return None
    return np.frombuffer(pages, array.dtype, count).reshape(shape)


def rows_of(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """array[rows]; in the same memory, if most rows stay and in their order: then no new pages have to be cleared."""
    kept = resized(array, (len(rows), *array.shape[1:]))
    if kept is None or 2 * len(rows) < len(array) or (np.diff(rows) <= 0).any():
        return array[rows]
    for new, old in enumerate(rows.tolist()):
        if new != old:
            kept[new] = array[old]
    return kept

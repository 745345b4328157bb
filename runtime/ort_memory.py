"""Memory of ONNX Runtime sessions: one arena for all of a process, and what nobody uses goes back to the system.

An arena keeps what it once had, so with one for each session a process holds the most that each of them ever needed,
though they work in turn. And `malloc` keeps freed pieces of some megabytes, which the next, longer cache does not fit
into. Both are given back once for a batch, when it is encoded: what the batches before had is free by then.
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


def giving_back() -> ort.RunOptions:
    """For a run after which the arena gives back what nobody uses then."""
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


def zeros(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """As numpy's; a large one goes back to the system as soon as it is dropped."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    if size < OWN_PAGES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return np.zeros(shape, dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, dtype).reshape(shape)

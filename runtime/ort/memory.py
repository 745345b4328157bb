"""Memory of ONNX Runtime sessions: one arena for the process; unused memory is returned to the system.

An arena keeps all memory it ever allocated, so one per session would add up their maxima. And `malloc`
keeps freed blocks of some megabytes, which are too small for the next, longer cache. Both are returned when a batch is
encoded that is large, or of another number of sources than those before. For other batches it does not pay: the system
clears new pages one by one when they are first written to, which takes a third of a step that verifies drafts. Pages of
large arrays (keys, values and caches) are kept for the next batch, unless it has far fewer sources.
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

SAME_AS_REQUESTED = 1  # the arena grows by the size requested, not by powers of two
LARGE = 1 << 19  # numbers of one tensor inside an encoder: 256 tokens of `base`
FEWER = 8  # times fewer sources may keep the memory of a batch: as workers get, or a server between two rushes
OVER_ALLOCATION = 4  # what grows has so many times its first size reserved; unused pages cost nothing
OWN_PAGES = 1 << 20  # bytes from which on an array has pages of its own
ROOMY = 4  # times as many bytes as an array needs are not too many for it
REGISTERING = threading.Lock()  # two threads may open sessions at once


def share_arena(options: ort.SessionOptions) -> None:
    """Has a session allocate from the arena of the process, which is made for the first session."""
    with REGISTERING:
        register_arena()
    options.add_session_config_entry("session.use_env_allocators", "1")
    # A memory pattern would be one more block for all tensors of a step, in addition to those of the first step.
    options.enable_mem_pattern = False


@cache
def register_arena() -> None:
    """Once: ONNX Runtime accepts a second arena without an error; which one a session shares depends on the order."""
    place = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    settings = ort_state.OrtArenaCfg({"arena_extend_strategy": SAME_AS_REQUESTED})
    ort_state.create_and_register_allocator(place, settings)


def trim() -> None:
    """Has `malloc` return its free memory, where it can (glibc); takes some tens of microseconds."""
    given = malloc_trim()
    if given is not None:
        given(0)


@cache
def malloc_trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


class HeldMemory:
    """The batch that the process holds memory for, shared by all sessions like the arena and `malloc`."""

    def __init__(self) -> None:
        self.sources, self.numbers = 0, 0
        self.most = 0  # sources of a batch since pages of arrays were returned

    def fits(self, sources: int, numbers: int, most: int = LARGE) -> bool:
        """Whether a batch of so many sources, with that many numbers per tensor, can reuse the memory of those before.

        If not, the memory held is too little or too much for it, and is returned. That is by the number of sources: how
        long they are hardly matters, as steps hold more than the encoder. For a batch of more than `most` numbers the
        arena's and `malloc`'s is always returned, as it needs the memory most.
        """
        if sources < self.most / FEWER:
            PAGES.give_back()
            self.most = 0
        self.most = max(self.most, sources)
        fits = max(numbers, self.numbers) <= most and self.sources / FEWER <= sources <= self.sources
        self.numbers = numbers
        if not fits:
            self.sources = sources
        return fits

    def forget(self) -> None:
        """Called after other allocations, such as opening a session: the next batch first returns their memory."""
        self.sources = 0


HELD = HeldMemory()


def giving_back() -> ort.RunOptions:
    """Options of a run after which the arena returns its unused memory."""
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


def references(blocks: Sequence[tuple[Any, Any]]) -> list[int]:
    return [sys.getrefcount(block) for _, block in blocks]


UNUSED = references([(None, object())])[0]  # of a block that no array lies in


class Pages:
    """Pages of large arrays, kept for those of the next batches: the system clears new pages one by one.

    A block is free once no array is left that lies in it. It keeps its type: numbers of another one may be none.
    """

    def __init__(self) -> None:
        self.blocks: list[tuple[np.dtype, mmap.mmap]] = []
        self.lock = threading.Lock()

    def take(self, dtype: np.dtype, size: int, reserved: int) -> mmap.mmap:
        """A free block of `reserved` bytes or some more, or a new one; `size` of them will be used at once."""
        with self.lock:
            free = sorted(self.free(dtype), key=len)
            for block in free:
                if reserved <= len(block) <= ROOMY * reserved:
                    return block
            smaller = [block for block in free if len(block) < reserved]
            if smaller:  # in its place, so that no more is kept than was needed at a time
                self.blocks = [(kind, block) for kind, block in self.blocks if block is not smaller[-1]]
            del free, smaller
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            if size == reserved:  # all pages will be used: cleared together, they take little more than half the time
                flags |= getattr(mmap, "MAP_POPULATE", 0)
            made = mmap.mmap(-1, reserved, flags=flags)
            self.blocks.append((dtype, made))
            return made

    def free(self, dtype: np.dtype | None = None) -> list[mmap.mmap]:
        """Blocks that only this list refers to, of a type or of all."""
        counts = references(self.blocks)
        return [
            block
            for (kind, block), count in zip(self.blocks, counts, strict=True)
            if count == UNUSED and dtype in (None, kind)
        ]

    def give_back(self) -> None:
        """Has the system take all free pages."""
        with self.lock:
            free = {id(block) for block in self.free()}
            self.blocks = [(kind, block) for kind, block in self.blocks if id(block) not in free]


PAGES = Pages()


def finite(shape: Sequence[int], dtype: Any, over_allocation: int = 1) -> np.ndarray:
    """An array of finite numbers: zeros, or what an array of an earlier batch held.

    `over_allocation` is the factor by which it can grow in place (`resized`). Pages that are never used cost nothing.
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    if size < OWN_PAGES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return np.zeros(shape, dtype)
    return np.frombuffer(PAGES.take(dtype, size, over_allocation * size), dtype, math.prod(shape)).reshape(shape)


def resized(array: np.ndarray, shape: Sequence[int]) -> np.ndarray | None:
    """An array of another shape at the same address; None where its memory is too small."""
    pages: Any = array
    while isinstance(pages, np.ndarray | memoryview):
        pages = pages.base if isinstance(pages, np.ndarray) else pages.obj
    count = math.prod(shape)
    if not isinstance(pages, mmap.mmap) or count * array.itemsize > len(pages):
        return None
    return np.frombuffer(pages, array.dtype, count).reshape(shape)


def rows_of(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """array[rows]; in place if most rows stay, so that no new pages have to be cleared.

    In place, rows keep their order, or the last ones move to the places of those that left. More rows than before
    repeat some of the old ones: the batch grows. Its new array has room to grow again.
    """
    shape = (len(rows), *array.shape[1:])
    kept = resized(array, shape)
    if kept is None and len(rows) > len(array):
        return np.take(array, rows, axis=0, out=finite(shape, array.dtype, OVER_ALLOCATION), mode="clip")
    if kept is None or 2 * len(rows) < len(array) or not movable(rows, len(array)):
        return array[rows]
    for new, old in enumerate(rows.tolist()):
        if new != old:
            kept[new] = array[old]
    return kept


def movable(rows: np.ndarray, count: int) -> bool:
    """Whether rows of so many can be copied one after another to where they go, before any of them is overwritten."""
    old = rows[:count]
    moved = old[old != np.arange(len(old))]
    return bool((np.diff(old) > 0).all() or (moved >= len(rows)).all())

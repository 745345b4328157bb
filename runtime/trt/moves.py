"""Moves of a batch's rows inside device memory: sources that leave, sources that take their place, longer sources.

All are copies on the device that are only queued: nothing is sent, and the host does not wait. A row of all tensors of
a slab is one copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from seq2engine.export.artifact.transfers import itemsize_of

from .device import Device, Memory
from .memory import Shape, Slab

SPARE = -1  # in place of a row: spare memory outside all rows


def clear(device: Device, slab: Slab, shape: Shape) -> None:
    """Zeros in all tensors, each of that shape."""
    device.clear(slab.memory, shape[0] * slab.row_bytes(shape), len(slab.names), slab.distance)


def row_moves(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Copies (to, from), one after the other, after which row i holds what row rows[i] held before them all.

    A row is overwritten only when it is no longer needed. Rows in a circle go through SPARE.
    """
    waiting = {to: source for to, source in enumerate(rows) if to != source}
    readers: dict[int, set[int]] = {}
    for to, source in waiting.items():
        readers.setdefault(source, set()).add(to)
    free = [to for to in waiting if to not in readers]
    while waiting:
        if not free:  # only circles are left
            to = next(iter(waiting))
            yield SPARE, to
            for reader in readers.pop(to):
                waiting[reader] = SPARE
            free.append(to)
        to = free.pop()
        source = waiting.pop(to)
        yield to, source
        if source in readers:
            readers[source].remove(to)
            if not readers[source]:
                del readers[source]
                if source in waiting:
                    free.append(source)


def gather_rows(device: Device, slab: Slab, shape: Shape, rows: Sequence[int], spare: Memory) -> None:
    """array[rows] of every tensor of the slab, to the front of its place."""
    width, count = slab.row_bytes(shape), len(slab.names)

    def place(row: int) -> tuple[Memory, int]:
        return (spare, width) if row == SPARE else (slab.row(shape, row), slab.distance)

    for to, source in row_moves(rows):
        (target, target_pitch), (origin, pitch) = place(to), place(source)
        device.copy(target, origin, width, count, (target_pitch, pitch))


def put_rows(device: Device, slab: Slab, shape: Shape, rows: Sequence[int], coming: Slab, coming_shape: Shape) -> None:
    """array[rows] = coming of every tensor of the slab, padded with zeros to the slab's source length."""
    axis = slab.axes.index("S")
    width, count = slab.row_bytes(shape), len(slab.names)
    if shape[1:] == coming_shape[1:]:
        for place, row in enumerate(rows):
            pitches = (slab.distance, coming.distance)
            device.copy(slab.row(shape, row), coming.row(coming_shape, place), width, count, pitches)
        return
    for place, row in enumerate(rows):
        device.clear(slab.row(shape, row), width, count, slab.distance)
        for number in range(count):
            target = slab.row(shape, row).part(number * slab.distance, width)
            size = coming.row_bytes(coming_shape)
            origin = coming.row(coming_shape, place).part(number * coming.distance, size)
            copy_columns(device, slab.dtype, target, shape[1:], origin, coming_shape[1:], axis - 1)


def set_length(device: Device, slab: Slab, shape: Shape, length: int, spare: Memory) -> Shape:
    """Every tensor of the slab with sources of another length, padded with zeros; its shape afterwards."""
    axis = slab.axes.index("S")
    result = (*shape[:axis], length, *shape[axis + 1 :])
    size = math.prod(result) * itemsize_of(slab.dtype)
    for name in slab.names if result != shape else ():
        array = slab.array(name, shape)
        if length > shape[axis]:
            device.clear(spare, size)
        copy_columns(device, slab.dtype, spare, result, array.memory, shape, axis)
        device.copy(array.memory, spare, size)
    return result


def copy_columns(
    device: Device, dtype: str, target: Memory, target_shape: Shape, source: Memory, shape: Shape, axis: int
) -> None:
    """As many columns of that axis as both sides have."""
    inner = math.prod(shape[axis + 1 :]) * itemsize_of(dtype)
    pitches = (target_shape[axis] * inner, shape[axis] * inner)
    device.copy(target, source, min(pitches), math.prod(shape[:axis]), pitches)


def padded_slots(slots: np.ndarray, rows: int, length: int) -> np.ndarray:
    """Slots [B,L] -> [rows, length]: what is added repeats the last row and the last column."""
    return np.pad(slots, ((0, rows - len(slots)), (0, length - slots.shape[1])), mode="edge")


def rows_to_continue_with(staying: int, now: int, fewest: int) -> int:
    """The current ones until half of them are padding, so that the shapes of a decode, and with them its CUDA graph,
    change seldom while sources leave it."""
    while staying <= now // 2 and now // 2 >= fewest:
        now //= 2
    return max(now, staying)

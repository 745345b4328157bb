"""The device memory of a TensorRT session: allocated once, each piece at the largest shape it can ever have.

Addresses therefore never change while a batch is decoded, so one captured graph serves all its steps. Tensors of one
kind are one piece of memory, a `Slab`, so that one copy moves a row of all of them; small tensors that are copied to
the device together are one `Parcel`, so that one copy moves all of them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from seq2engine.export.artifact.passport import EngineTensor
from seq2engine.export.artifact.transfers import aligned, itemsize_of

from ..session import EVERYTHING
from .device import Device, Memory

Shape = tuple[int, ...]
Sizes = Mapping[str, int]  # of the contract's letters
SETS = {"static": 1, "growing": 2}  # of cache buffers: written in place, or one read while the other is written


@dataclass(frozen=True)
class DeviceArray:
    """The front of a block of device memory as a dense tensor. `dtype` is the passport's name for it."""

    memory: Memory
    dtype: str
    shape: Shape

    @property
    def address(self) -> int:
        return self.memory.address

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * itemsize_of(self.dtype)

    def reshaped(self, shape: Shape) -> DeviceArray:
        """Another shape at the same address; the content becomes meaningless."""
        return DeviceArray(self.memory, self.dtype, shape)


def typed_front(staging: np.ndarray, dtype: str, shape: Shape) -> np.ndarray:
    """The front of staging memory as an array; bfloat16 as its bits."""
    known = np.dtype(np.uint16 if dtype == "bfloat16" else dtype)
    return staging[: math.prod(shape) * known.itemsize].view(known).reshape(shape)


def read_values(staging: np.ndarray, dtype: str, shape: Shape) -> np.ndarray:
    """A copy of what staging memory holds; bfloat16 as fp32."""
    values = typed_front(staging, dtype, shape).copy()
    if dtype == "bfloat16":  # the upper half of an fp32
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values


def shape_of(tensor: EngineTensor, sizes: Sizes) -> Shape:
    """The tensor's shape for given sizes of the contract's letters."""
    return tuple(axis if isinstance(axis, int) else sizes[axis] for axis in tensor.axes)


def room_for(tensor: EngineTensor, most: Iterable[Sizes]) -> int:
    """Aligned bytes of a tensor at the largest of several sizes."""
    return aligned(max(math.prod(shape_of(tensor, sizes)) for sizes in most) * itemsize_of(tensor.dtype))


def room_for_moves(tensors: Sequence[EngineTensor], most: Sequence[Sizes]) -> int:
    """Bytes of the largest tensor, or of one source in all of them."""
    lengths = [{**sizes, "L": sizes["M"]} for sizes in most]
    alone = [{**sizes, "B": 1} for sizes in lengths]
    return max(max(room_for(t, lengths), len(tensors) * room_for(t, alone)) for t in tensors)


def allocate(device: Device, tensor: EngineTensor, most: Iterable[Sizes]) -> DeviceArray:
    """Memory for a tensor at its largest, still without elements."""
    return DeviceArray(device.allocate(room_for(tensor, most)), tensor.dtype, (0,))


class Parcel:
    """Small tensors that cross the bus as one copy. `values` are the host side, not to be touched while a copy is under
    way; `arrays` are the device side."""

    def __init__(
        self,
        device: Device,
        staging: np.ndarray,
        memory: Memory,
        tensors: Sequence[EngineTensor],
        shapes: Mapping[str, Shape],
    ):
        self.device = device
        self.values: dict[str, np.ndarray] = {}
        self.arrays: dict[str, DeviceArray] = {}
        end = 0
        for tensor in tensors:
            dtype, shape = tensor.dtype, shapes[tensor.name]
            size = aligned(math.prod(shape) * itemsize_of(dtype))
            self.arrays[tensor.name] = DeviceArray(memory.part(end, size), dtype, shape)
            self.values[tensor.name] = typed_front(staging[end : end + size], dtype, shape)
            end += size
        self.host, self.memory = staging[:end], memory.part(0, end)

    def to_device(self) -> None:
        self.device.upload(self.memory, self.host)

    def to_host(self) -> None:
        self.device.download(self.host, self.memory)


class ParcelMemory:
    """Memory on both sides for parcels of some tensors, whatever their shapes."""

    def __init__(self, device: Device, tensors: Sequence[EngineTensor], most: Sequence[Sizes]):
        size = sum(room_for(tensor, most) for tensor in tensors)
        self.device, self.tensors = device, tensors
        self.memory, self.staging = device.allocate(size), device.staging(size)

    def parcel(self, shapes: Mapping[str, Shape]) -> Parcel:
        return Parcel(self.device, self.staging, self.memory, self.tensors, shapes)


class Slab:
    """Tensors of one type and kind of shape in one piece of memory, equally far apart."""

    def __init__(self, device: Device, tensors: Sequence[EngineTensor], most: Sequence[Sizes]):
        self.names = tuple(tensor.name for tensor in tensors)
        self.axes, self.dtype = tensors[0].axes, tensors[0].dtype
        self.distance = room_for(tensors[0], most)
        self.memory = device.allocate(len(tensors) * self.distance)

    def array(self, name: str, shape: Shape) -> DeviceArray:
        first = self.names.index(name) * self.distance
        return DeviceArray(self.memory.part(first, self.distance), self.dtype, shape)

    def holds(self, array: DeviceArray) -> bool:
        return 0 <= array.address - self.memory.address < self.memory.size

    def arrays(self, sizes: Sizes) -> dict[str, DeviceArray]:
        """All tensors in the shape that these sizes give them."""
        shape = tuple(axis if isinstance(axis, int) else sizes[axis] for axis in self.axes)
        return {name: self.array(name, shape) for name in self.names}

    def row_bytes(self, shape: Shape) -> int:
        """Of one source in one tensor of that shape."""
        return math.prod(shape[1:]) * itemsize_of(self.dtype)

    def row(self, shape: Shape, row: int) -> Memory:
        """From that row of the first tensor on; the same row of the next one is `distance` further."""
        first = row * self.row_bytes(shape)
        return self.memory.part(first, self.memory.size - first)


def slabs(device: Device, tensors: Sequence[EngineTensor], most: Sequence[Sizes]) -> list[Slab]:
    """Memory for tensors, those of one kind together."""

    def kind(tensor: EngineTensor) -> tuple[str, str]:
        return tensor.dtype, str(tensor.axes)

    return [Slab(device, list(group), most) for _, group in groupby(sorted(tensors, key=kind), key=kind)]


class BatchMemory:
    """Everything one batch keeps on the device between calls: the encoder's outputs, the cache, and its mask with
    all else that goes along with it.

    `cache` is a list of SETS, each a list of slabs named by the decoder's inputs.
    """

    def __init__(
        self,
        device: Device,
        kept: Sequence[EngineTensor],
        cache: Sequence[EngineTensor],
        masks: Sequence[EngineTensor],
        most: Sequence[Sizes],
        cache_form: str,
    ):
        self.kept = slabs(device, kept, most)
        lengths = [{**sizes, "L": sizes["M"]} for sizes in most]  # a growing cache reads next what it writes now
        self.cache = [slabs(device, cache, lengths) for _ in range(SETS[cache_form])]
        # A static cache's mask stays on the device; the next one is written to a second buffer.
        size = sum(room_for(tensor, most) for tensor in masks)
        self.masks = [device.allocate(size) for _ in range(2 if cache_form == "static" else 1)]

    def holding(self, array: DeviceArray) -> list[Slab]:
        """The set that holds a tensor of the cache."""
        return next(slabs for slabs in self.cache if any(slab.holds(array) for slab in slabs))

    def beside(self, array: DeviceArray) -> list[Slab]:
        """The set that the next step writes while it reads this tensor; the same one for a cache written in place."""
        return next((slabs for slabs in self.cache if not any(slab.holds(array) for slab in slabs)), self.cache[0])


class TrtState(dict[str, DeviceArray]):
    """The named tensors of one batch, and the memory they live in, which goes back to its session when this dies.

    `rows` are its sources; its tensors may have more rows, which are padding. `plan` and `ahead` are the session's
    plans of single steps and of steps ahead of the host, valid while shapes stay; `form` is what is read of its steps.
    `parents` define the next step's mask from the current one.
    """

    def __init__(self, memory: BatchMemory, pool: list[BatchMemory], rows: int):
        super().__init__()
        self.memory = memory
        self.rows = rows
        self.plan: Any = None
        self.ahead: Any = None
        self.parents: np.ndarray | None = None
        self.mask_shape: Shape | None = None  # of the mask that is there
        self.steps = 0
        self.form = EVERYTHING
        weakref.finalize(self, pool.append, memory).atexit = False

    def moved(self, masks: bool = True) -> None:
        """Invalidates plans after rows, lengths or slots have changed; `masks`: the mask as well."""
        self.plan = self.ahead = None
        if masks:
            self.mask_shape = None

    def is_at(self, steps: int) -> bool:
        """Whether this many steps were done."""
        return self.steps == steps


def physical_rows(state: TrtState) -> int:
    """Rows of its tensors."""
    return state["source_mask"].shape[0]

"""The device memory of a TensorRT session: allocated once, each piece at the largest shape it can ever have.

Addresses therefore never change while a batch is decoded, so one captured graph serves all its steps. Tensors of one
kind are one piece of memory, a `Slab`, so that one gather moves all of them; small tensors that are copied to the
device together are one `Parcel`, so that one copy moves all of them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seq2engine.export.artifact.passport import EngineTensor

from ..fitting import fitted
from ..session import EVERYTHING
from .device import ALIGNMENT, Device

Shape = tuple[int, ...]
Sizes = Mapping[str, int]  # of the contract's letters
SETS = {"static": 1, "growing": 2}  # of cache buffers: written in place, or one read while the other is written


@dataclass(frozen=True)
class DeviceArray:
    """The front part of a piece of device memory, seen as a dense tensor.

    The address is the memory's own: torch gives a tensor without elements none, TensorRT wants one even there.
    """

    memory: Tensor  # uint8
    dtype: torch.dtype
    shape: Shape

    @property
    def address(self) -> int:
        return self.memory.data_ptr()

    @property
    def tensor(self) -> Tensor:
        return typed_front(self.memory, self.dtype, self.shape)

    def reshaped(self, shape: Shape) -> DeviceArray:
        """Another shape at the same address; the content becomes meaningless."""
        return DeviceArray(self.memory, self.dtype, shape)


def typed_front(memory: Tensor, dtype: torch.dtype, shape: Shape) -> Tensor:
    return memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def shape_of(tensor: EngineTensor, sizes: Sizes) -> Shape:
    """The tensor's shape for given sizes of the contract's letters."""
    return tuple(axis if isinstance(axis, int) else sizes[axis] for axis in tensor.axes)


def aligned(size: int) -> int:
    """Bytes rounded up to the alignment of tensors; at least one unit, so that an empty tensor has an address, too."""
    return max(-(-size // ALIGNMENT), 1) * ALIGNMENT


def room_for(tensor: EngineTensor, most: Iterable[Sizes]) -> int:
    """Aligned bytes of a tensor at the largest of several sizes."""
    itemsize = getattr(torch, tensor.dtype).itemsize
    return aligned(max(math.prod(shape_of(tensor, sizes)) for sizes in most) * itemsize)


def allocate(device: Device, tensor: EngineTensor, most: Iterable[Sizes]) -> DeviceArray:
    """Memory for a tensor at its largest, still without elements."""
    return DeviceArray(device.allocate(room_for(tensor, most)), getattr(torch, tensor.dtype), (0,))


class Transfer:
    """A tensor that is copied from the device to the host in every call. The host side must not be read before the
    device was synchronized."""

    def __init__(self, staging: Tensor, array: DeviceArray):
        self.host = typed_front(staging, array.dtype, array.shape)
        self.values: np.ndarray = self.host.numpy()
        self.device = array.tensor

    def to_host(self) -> None:
        self.host.copy_(self.device, non_blocking=True)


class Parcel:
    """Small tensors that go to the device as one copy. `values` are the host side, to be written to only while no copy
    is under way; `arrays` are the device side."""

    def __init__(self, staging: Tensor, memory: Tensor, tensors: Sequence[EngineTensor], shapes: Mapping[str, Shape]):
        self.values: dict[str, np.ndarray] = {}
        self.arrays: dict[str, DeviceArray] = {}
        end = 0
        for tensor in tensors:
            dtype, shape = getattr(torch, tensor.dtype), shapes[tensor.name]
            size = aligned(math.prod(shape) * dtype.itemsize)
            self.arrays[tensor.name] = DeviceArray(memory[end : end + size], dtype, shape)
            self.values[tensor.name] = typed_front(staging[end : end + size], dtype, shape).numpy()
            end += size
        self.host, self.device = staging[:end], memory[:end]

    def to_device(self) -> None:
        self.device.copy_(self.host, non_blocking=True)


class Post:
    """Memory on both sides for parcels of some tensors, whatever their shapes."""

    def __init__(self, device: Device, tensors: Sequence[EngineTensor], most: Sequence[Sizes]):
        size = sum(room_for(tensor, most) for tensor in tensors)
        self.tensors = tensors
        self.memory, self.staging = device.allocate(size), device.staging(size)

    def parcel(self, shapes: Mapping[str, Shape]) -> Parcel:
        return Parcel(self.staging, self.memory, self.tensors, shapes)


class Slab:
    """Tensors of one type and kind of shape in one piece of memory, equally far apart."""

    def __init__(self, device: Device, tensors: Sequence[EngineTensor], most: Sequence[Sizes]):
        self.names = tuple(tensor.name for tensor in tensors)
        self.axes = tensors[0].axes
        self.dtype: torch.dtype = getattr(torch, tensors[0].dtype)
        self.distance = room_for(tensors[0], most)
        self.memory = device.allocate(len(tensors) * self.distance)

    def array(self, name: str, shape: Shape) -> DeviceArray:
        first = self.names.index(name) * self.distance
        return DeviceArray(self.memory[first : first + self.distance], self.dtype, shape)

    def holds(self, array: DeviceArray) -> bool:
        return 0 <= array.address - self.memory.data_ptr() < self.memory.numel()

    def arrays(self, sizes: Sizes) -> dict[str, DeviceArray]:
        """All tensors in the shape that these sizes give them."""
        shape = tuple(axis if isinstance(axis, int) else sizes[axis] for axis in self.axes)
        return {name: self.array(name, shape) for name in self.names}

    def together(self, shape: Shape) -> Tensor:
        """All tensors, each in that shape, as one [N, *shape]."""
        steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        typed = self.memory.view(self.dtype)
        return typed.as_strided((len(self.names), *shape), (self.distance // self.dtype.itemsize, *steps))


def slabs(device: Device, tensors: Sequence[EngineTensor], most: Sequence[Sizes]) -> list[Slab]:
    """Memory for tensors, those of one kind together."""

    def kind(tensor: EngineTensor) -> tuple[str, str]:
        return tensor.dtype, str(tensor.axes)

    return [Slab(device, list(group), most) for _, group in groupby(sorted(tensors, key=kind), key=kind)]


class BatchMemory:
    """Everything one batch keeps on the device between calls: the encoder's outputs and the cache.

    `cache` is a list of SETS, each a list of slabs named by the decoder's inputs.
    """

    def __init__(
        self,
        device: Device,
        kept: Sequence[EngineTensor],
        cache: Sequence[EngineTensor],
        most: Sequence[Sizes],
        cache_form: str,
    ):
        self.kept = slabs(device, kept, most)
        lengths = [{**sizes, "L": sizes["M"]} for sizes in most]  # a growing cache reads next what it writes now
        self.cache = [slabs(device, cache, lengths) for _ in range(SETS[cache_form])]

    def holding(self, array: DeviceArray) -> list[Slab]:
        """The set that holds a tensor of the cache."""
        return next(slabs for slabs in self.cache if any(slab.holds(array) for slab in slabs))

    def beside(self, array: DeviceArray) -> list[Slab]:
        """The set that the next step writes while it reads this tensor; the same one for a cache written in place."""
        return next((slabs for slabs in self.cache if not any(slab.holds(array) for slab in slabs)), self.cache[0])


class TrtState(dict[str, DeviceArray]):
    """The named tensors of one batch, and the memory they live in, which goes back to its session when this dies.

    `rows` are its sources; its tensors may have more rows, which are padding. `plan` is the session's plan of the
    latest step, valid while shapes stay; `form` is what is read of its steps.
    """

    def __init__(self, memory: BatchMemory, pool: list[BatchMemory], rows: int):
        super().__init__()
        self.memory = memory
        self.rows = rows
        self.plan: Any = None
        self.form = EVERYTHING
        weakref.finalize(self, pool.append, memory).atexit = False


# Moves of whole slabs: rows and slots gathered to the front, rows replaced. All are only queued, and indices travel
# through staging memory, so that no move makes the host wait.


def staged(device: Device, index: np.ndarray) -> Tensor:
    """A copy of the caller's indices that the device can take without making the host wait."""
    host = device.staging(index.size * 8)[: index.size * 8].view(torch.int64).view(index.shape)
    host.copy_(torch.as_tensor(index))
    return host


def clear(device: Device, slab: Slab, shape: Shape) -> None:
    device.run(lambda: slab.together(shape).zero_())


def gather_rows(device: Device, slab: Slab, shape: Shape, rows: Tensor) -> Shape:
    """array[rows] of every tensor of the slab, to the front of its place; its shape afterwards."""
    result = (len(rows), *shape[1:])

    def work() -> None:
        old = slab.together(shape)
        slab.together(result).copy_(old.index_select(1, rows.to(old.device, non_blocking=True)))

    device.run(work)
    return result


def gather_slots(device: Device, slab: Slab, shape: Shape, rows: Tensor, slots: Tensor, length: int) -> Shape:
    """[B,H,L,E] -> [B',H,length,E] of every tensor of the slab in one gather, zero behind the chosen slots [B',L']."""
    chosen = slots.shape[1]
    result = (len(rows), shape[1], length, shape[3])

    def work() -> None:
        old, new = slab.together(shape), slab.together(result)
        row, slot = (index.to(old.device, non_blocking=True) for index in (rows, slots))
        head = torch.arange(shape[1], device=old.device)
        picked = old[:, row[:, None, None], head[:, None], slot[:, None, :]]  # the last three broadcast to [B', H, L']
        new[:, :, :, :chosen].copy_(picked)
        new[:, :, :, chosen:].zero_()

    device.run(work)
    return result


def put_rows(
    device: Device, slab: Slab, shape: Shape, rows: Tensor, coming: Slab, coming_shape: Shape, width: int
) -> Shape:
    """array[rows] = coming of every tensor of the slab, both with S made `width` long; its shape afterwards."""
    axis = slab.axes.index("S")
    result = (*shape[:axis], width, *shape[axis + 1 :])

    def work() -> None:
        old, new = slab.together(shape), slab.together(result)
        if shape != result:
            new.copy_(fitted(old, axis + 1, width, old.new_zeros))
        row = rows.to(old.device, non_blocking=True)
        given = coming.together(coming_shape)[:, : len(rows)]
        new.index_copy_(1, row, fitted(given, axis + 1, width, given.new_zeros))

    device.run(work)
    return result

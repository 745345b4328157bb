"""The device memory of a TensorRT session: allocated once, each piece at the largest shape it can ever have.

Addresses therefore never change while a batch is decoded, which is what lets one captured graph serve all its steps.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..export.passport import EngineTensor
from .trt_device import Device

Shape = tuple[int, ...]
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


def shape_of(tensor: EngineTensor, sizes: dict[str, int]) -> Shape:
    """The tensor's shape for given sizes of the contract's letters."""
    return tuple(axis if isinstance(axis, int) else sizes[axis] for axis in tensor.axes)


def allocate(device: Device, tensor: EngineTensor, most: dict[str, int]) -> DeviceArray:
    """Memory for a tensor at its largest."""
    shape, dtype = shape_of(tensor, most), getattr(torch, tensor.dtype)
    return DeviceArray(device.allocate(math.prod(shape) * dtype.itemsize), dtype, shape)


class Transfer:
    """A tensor that travels between host and device in every call, in one shape. The host side is the caller's window:
    what is written to or read from it must be left alone until the device has been waited for."""

    def __init__(self, staging: Tensor, array: DeviceArray):
        self.host = typed_front(staging, array.dtype, array.shape)
        self.values: np.ndarray = self.host.numpy()
        self.device = array.tensor

    def to_device(self) -> None:
        self.device.copy_(self.host, non_blocking=True)

    def to_host(self) -> None:
        self.host.copy_(self.device, non_blocking=True)


class SharedMemory:
    """What travels in every call and no state keeps: memory on both sides of each such tensor, by name."""

    def __init__(self, device: Device, tensors: list[EngineTensor], most: dict[str, int]):
        self.arrays = {t.name: allocate(device, t, most) for t in tensors}
        self.staging = {name: device.staging(array.memory.numel()) for name, array in self.arrays.items()}

    def release(self) -> None:
        self.arrays.clear()
        self.staging.clear()

    def transfer(self, name: str, shape: Shape) -> tuple[DeviceArray, Transfer]:
        array = self.arrays[name].reshaped(shape)
        return array, Transfer(self.staging[name], array)


class BatchMemory:
    """Everything one batch keeps on the device between calls: what the encoder made of it, and its cache.

    `kept` is by name; `cache` is a list of SETS, each by the decoder's input names.
    """

    def __init__(
        self, device: Device, kept: list[EngineTensor], cache: list[EngineTensor], most: dict[str, int], cache_form: str
    ):
        self.kept = {t.name: allocate(device, t, most) for t in kept}
        lengths = {**most, "L": most["M"]}  # what a growing cache writes now, it reads in the next step
        self.cache = [{t.name: allocate(device, t, lengths) for t in cache} for _ in range(SETS[cache_form])]

    @property
    def now(self) -> dict[str, DeviceArray]:
        """The set that holds the cache."""
        return self.cache[0]

    @property
    def next(self) -> dict[str, DeviceArray]:
        """The set that the next step writes; in place, it is the same."""
        return self.cache[-1]

    def swap(self) -> None:
        self.cache.reverse()


class TrtState(dict[str, DeviceArray]):
    """The named tensors of one batch, and the memory they live in, which goes back to its session when this dies.

    `plan` is what the session worked out for the latest step and may use again while shapes stay.
    """

    def __init__(self, memory: BatchMemory, pool: list[BatchMemory]):
        super().__init__()
        self.memory = memory
        self.plan: Any = None
        weakref.finalize(self, pool.append, memory).atexit = False

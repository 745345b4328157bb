"""The device memory of a TensorRT session: allocated once, each piece at the largest shape it can ever have.

Addresses therefore never change while a batch is decoded, which is what lets one captured graph serve all its steps.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass

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
        size = math.prod(self.shape) * self.dtype.itemsize
        return self.memory[:size].view(self.dtype).view(self.shape)

    def reshaped(self, shape: Shape) -> DeviceArray:
        """Another shape at the same address; the content becomes meaningless."""
        return DeviceArray(self.memory, self.dtype, shape)


def torch_dtype(tensor: EngineTensor) -> torch.dtype:
    dtype = getattr(torch, tensor.dtype)
    assert isinstance(dtype, torch.dtype), tensor
    return dtype


def largest_shape(tensor: EngineTensor, most: dict[str, int]) -> Shape:
    return tuple(axis if isinstance(axis, int) else most[axis] for axis in tensor.axes)


def allocate(device: Device, tensor: EngineTensor, shape: Shape) -> DeviceArray:
    dtype = torch_dtype(tensor)
    return DeviceArray(device.allocate(math.prod(shape) * dtype.itemsize), dtype, shape)


class HostBuffer:
    """Host memory beside one device tensor, through which its values are sent or fetched. One transfer at a time."""

    def __init__(self, device: Device, tensor: EngineTensor, most: dict[str, int]):
        self.device = device
        self.dtype = torch_dtype(tensor)
        self.memory = device.staging(math.prod(largest_shape(tensor, most)) * self.dtype.itemsize)

    def view(self, shape: Shape) -> Tensor:
        return DeviceArray(self.memory, self.dtype, shape).tensor

    def send(self, values: np.ndarray, array: DeviceArray) -> DeviceArray:
        """Queues the copy of the values to an array's place; returns it in their shape."""
        placed = array.reshaped(values.shape)
        staged = self.view(values.shape)
        np.copyto(staged.numpy(), values)
        self.device.run(lambda: placed.tensor.copy_(staged, non_blocking=True))
        return placed

    def fetch(self, array: DeviceArray) -> np.ndarray:
        """Queues the copy of an array to here; the values are there after the next synchronize."""
        staged = self.view(array.shape)
        self.device.run(lambda: staged.copy_(array.tensor, non_blocking=True))
        return staged.numpy()


class BatchMemory:
    """Everything one batch keeps on the device between calls: what the encoder made of it, and its cache.

    `kept` is by name; `cache` is a list of SETS, each by the decoder's input names.
    """

    def __init__(
        self, device: Device, kept: list[EngineTensor], cache: list[EngineTensor], most: dict[str, int], cache_form: str
    ):
        self.kept = {t.name: allocate(device, t, largest_shape(t, most)) for t in kept}
        lengths = {**most, "L": most["M"]}  # what a growing cache writes now, it reads in the next step
        self.cache = [
            {t.name: allocate(device, t, largest_shape(t, lengths)) for t in cache} for _ in range(SETS[cache_form])
        ]

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
    """The named tensors of one batch, and the memory they live in, which goes back to its session when this dies."""

    def __init__(self, memory: BatchMemory, pool: list[BatchMemory]):
        super().__init__()
        self.memory = memory
        weakref.finalize(self, pool.append, memory).atexit = False

"""The memory of a device that a provider of ONNX Runtime computes on: arrays, and what crosses to and from the host.

A device array is an OrtValue. Small arrays that cross in every step are one `Parcel`, so that one copy moves all of
them. All transfers are counted. The device `cpu` is treated like any other, so tests on it run the code of a
GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import onnxruntime as ort

from seq2engine.export.contract import TensorSpec

MOST_REPLAYS = 64
ALIGNMENT = 256  # bytes: of every array in a parcel, as CUDA aligns what it allocates


@dataclass(frozen=True)
class DeviceArray:
    """An array on a device, dense."""

    value: ort.OrtValue

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape())

    @cached_property
    def place(self) -> tuple[int, tuple[int, ...]]:
        """Its address and shape."""
        return self.value.data_ptr(), self.shape


class Replays:
    """CUDA graphs of one decoder step: a number for every set of arrays that it was bound to.

    A CUDA graph reads and writes the addresses, in the shapes, that it was captured with. So a step has one for every
    such set, which ONNX Runtime tells by number (`gpu_graph_id`) and captures when it first sees it; none is ever
    dropped, so from some number on steps run without. A step runs more than once where it is captured, which changes
    nothing: what it writes over its own inputs, the new slots of a cache, is the same again. A provider without CUDA
    graphs ignores the number.
    """

    def __init__(self, most: int = MOST_REPLAYS):
        self.most = most
        self.numbers: dict[tuple[Any, ...], int] = {}

    def options(self, arrays: tuple[Any, ...], waits: bool = True) -> ort.RunOptions:
        """Of a run that is bound to arrays at these addresses, in these shapes; `waits`: until the device is done."""
        if arrays not in self.numbers and len(self.numbers) < self.most:
            self.numbers[arrays] = len(self.numbers) + 1
        return run_options(self.numbers.get(arrays, -1), waits)


@cache
def run_options(replay: int, waits: bool) -> ort.RunOptions:
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(replay))
    if not waits:
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options


class DeferredLogits:
    """Logits on a device: most searches read only candidates. They are copied to the host when an item is read."""

    def __init__(self, device: Device, array: DeviceArray):
        self.device, self.array, self.shape = device, array, array.shape

    @cached_property
    def values(self) -> np.ndarray:
        return self.device.numpy(self.array)

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.values[index]


class Device:
    """A device by ONNX Runtime's name, and the bytes that crossed to it (`sent`) and from it (`read`)."""

    def __init__(self, name: str, number: int = 0):
        self.name, self.number = name, number
        self.sent = self.read = 0

    def empty(self, shape: Sequence[int], dtype: str) -> DeviceArray:
        """Uninitialised memory."""
        kind = np.dtype(dtype).type
        return DeviceArray(ort.OrtValue.ortvalue_from_shape_and_type(list(shape), kind, self.name, self.number))

    def put(self, values: np.ndarray) -> DeviceArray:
        array = self.empty(values.shape, values.dtype.name)
        self.write(array, values)
        return array

    def write(self, array: DeviceArray, values: np.ndarray) -> None:
        if values.size:
            array.value.update_inplace(np.ascontiguousarray(values))
            self.sent += values.nbytes

    def numpy(self, array: DeviceArray) -> np.ndarray:
        """A copy on the host."""
        values = np.array(array.value.numpy())  # on the device `cpu` ONNX Runtime returns the memory itself
        self.read += values.nbytes
        return values

    def parcel(self, tensors: Iterable[TensorSpec], sizes: dict[str, int]) -> Parcel:
        return Parcel(self, {tensor.name: (tensor.shape(sizes), np.dtype(tensor.dtype)) for tensor in tensors})

    def logits(self, shape: Sequence[int]) -> DeviceArray:
        return self.empty(shape, "float32")

    def read_logits(self, array: DeviceArray) -> DeferredLogits:
        return DeferredLogits(self, array)

    def bind_input(self, binding: ort.IOBinding, name: str, array: DeviceArray) -> None:
        binding.bind_ortvalue_input(name, array.value)

    def bind_output(self, binding: ort.IOBinding, name: str, array: DeviceArray) -> None:
        binding.bind_ortvalue_output(name, array.value)


class Parcel:
    """Small arrays that are copied together: `values` is the host side; the device side can be bound."""

    def __init__(self, device: Device, kinds: Mapping[str, tuple[tuple[int, ...], np.dtype]]):
        self.device = device
        self.shapes = {name: shape for name, (shape, _) in kinds.items()}
        self.types = {name: dtype for name, (_, dtype) in kinds.items()}
        self.places: dict[str, int] = {}
        end = 0
        for name, (shape, dtype) in kinds.items():
            self.places[name] = end
            end += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self.host = np.zeros(max(end, ALIGNMENT), dtype=np.uint8)
        self.array = device.put(self.host)
        self.values = {name: self.host_side(name) for name in kinds}

    def host_side(self, name: str) -> np.ndarray:
        shape, dtype, first = self.shapes[name], self.types[name], self.places[name]
        return self.host[first : first + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)

    def bind_inputs(self, binding: ort.IOBinding) -> None:
        for name in self.values:
            binding.bind_input(name, *self.where(name))

    def bind_outputs(self, binding: ort.IOBinding) -> None:
        for name in self.values:
            binding.bind_output(name, *self.where(name))

    def where(self, name: str) -> tuple[str, int, Any, list[int], int]:
        """Device, type, shape and address, as a binding takes them. The binding does not keep the memory alive."""
        address = self.array.value.data_ptr() + self.places[name]
        return self.device.name, self.device.number, self.types[name].type, list(self.shapes[name]), address

    def send(self) -> None:
        self.device.write(self.array, self.host)

    def fetch(self) -> None:
        self.host[...] = self.array.value.numpy()
        self.device.read += self.host.nbytes

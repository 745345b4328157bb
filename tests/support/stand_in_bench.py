"""A decoder step of the TensorRT stand-in, bound by hand the way our engine code does it, for a test to change."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

from seq2engine.export.artifact.passport import PASSPORT, EngineTensor, read_passport
from support.host_device import HostDevice
from support.stand_in_config import ILogger
from support.stand_in_engines import BEAMS
from support.tensorrt_stand_in import tensorrt_stand_in

SIZES = {"B": 2, "K": 3, "S": 5, "L": BEAMS.slots, "M": 6}


class Log(ILogger):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def log(self, severity: object, message: str) -> None:
        self.lines.append(message)


class Bench:
    """A decoder step of the stand-in with memory for every tensor, bound step by step."""

    def __init__(self, folder: Path, flavour: str):
        entry = read_passport(folder / PASSPORT).engines["decoder_step"]
        self.trt, self.device, self.log = tensorrt_stand_in(flavour), HostDevice(), Log()
        self.aliases = entry.aliases
        self.inputs, self.outputs = entry.inputs, entry.outputs
        self.runtime = self.trt.Runtime(self.log)
        self.engine = self.runtime.deserialize_cuda_engine((folder / entry.file).read_bytes())
        self.config = self.engine.create_runtime_config()
        self.cache = None
        if flavour == "tensorrt_rtx":
            self.cache = self.config.create_runtime_cache()
            self.config.set_runtime_cache(self.cache)
        self.context = self.engine.create_execution_context(self.config)
        self.shapes = {t.name: self.shape(t) for t in (*self.inputs, *self.outputs)}
        self.memory = {
            t.name: self.device.allocate(int(np.prod(self.shape(t))) * np.dtype(t.dtype).itemsize)
            for t in (*self.inputs, *self.outputs)
            if t.name not in self.aliases
        }
        for memory in self.memory.values():
            ctypes.memset(memory.address, 0, memory.size)

    def shape(self, tensor: EngineTensor) -> tuple[int, ...]:
        sizes = SIZES if self.aliases else {**SIZES, "L": SIZES["M"] - SIZES["K"]}
        return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in tensor.axes)

    def address(self, name: str) -> int:
        return self.memory[self.aliases.get(name, name)].address

    def values(self, name: str, dtype: str) -> np.ndarray:
        """The memory of a tensor, as it is now."""
        memory = self.memory[name]
        return np.frombuffer((ctypes.c_uint8 * memory.size).from_address(memory.address), dtype=dtype)

    def select_profile(self) -> None:
        assert self.context.set_optimization_profile_async(0, self.device.stream)

    def set_shapes(self) -> None:
        for tensor in self.inputs:
            assert self.context.set_input_shape(tensor.name, self.shapes[tensor.name])

    def set_addresses(self) -> None:
        for tensor in (*self.inputs, *self.outputs):
            assert self.context.set_tensor_address(tensor.name, self.address(tensor.name))

    def bind(self) -> None:
        self.select_profile()
        self.set_shapes()
        assert self.context.infer_shapes() == []
        self.set_addresses()

    def execute(self) -> bool:
        return self.context.execute_async_v3(self.device.stream)

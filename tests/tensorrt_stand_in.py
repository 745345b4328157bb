"""A strict stand-in for `tensorrt` and `tensorrt_rtx` on a machine without a GPU.

An engine file of the stand-in holds the ONNX graph that a build would have read, and a launch computes it with ONNX
Runtime on the raw addresses that were bound. Every rule that TensorRT has for its callers is enforced: what TensorRT
reports (by a False or None and a line to the logger) is reported in the same way; what TensorRT leaves undefined
raises `RuleBroken`. `HostDevice` is the memory and the stream: work is put off until somebody waits for it, as on a
GPU, so a missing wait or a buffer reused too early shows in the results.
"""

from __future__ import annotations

import ctypes
import enum
import hashlib
import json
import math
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import helper
from torch import Tensor

from seq2engine.export.profiles import Shapes

ALIGNMENT = 256
VERSIONS = {"tensorrt_rtx": "1.7.1.116", "tensorrt": "10.16.1.11"}
MAGIC = b"stand-in"

Shape = tuple[int, ...]


class RuleBroken(AssertionError):
    """Something a caller of TensorRT must not do, though TensorRT would not say so."""


class Launch:
    """One queued run of an engine. Addresses and shapes are those of the moment it was launched."""

    def __init__(self, context: ExecutionContext):
        self.context = weakref.ref(context)
        self.engine = context.engine
        self.places = {name: (context.addresses[name], context.shapes[name]) for name in context.engine.io}
        self.changes = context.changes

    def check_replay(self) -> None:
        context = self.context()
        if context is None or context.changes != self.changes:
            raise RuleBroken("a graph was replayed after the context it was captured from had changed")

    def __call__(self) -> None:
        feed = {name: self.view(name) for name in self.engine.inputs}
        results = self.engine.session.run(list(self.engine.outputs), feed)
        for name, result in zip(self.engine.outputs, results, strict=True):
            target = self.view(name)
            if target.shape != result.shape or target.dtype != result.dtype:
                raise RuleBroken(f"{name} came out as {result.dtype} {result.shape}, bound as {target.shape}")
            np.copyto(target, result)

    def view(self, name: str) -> np.ndarray:
        address, shape = self.places[name]
        dtype = self.engine.io[name].dtype
        size = math.prod(shape) * dtype.itemsize
        if size == 0:
            return np.empty(shape, dtype)
        return np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype).reshape(shape)


class HostDevice:
    """Host memory that behaves like a GPU's: what is queued runs when it is waited for, and new memory holds NaN."""

    streams: ClassVar[weakref.WeakValueDictionary[int, HostDevice]] = weakref.WeakValueDictionary()

    def __init__(self, capability: str = "sm89", name: str = "stand-in GPU"):
        self.capability, self.name = capability, name
        self.stream = id(self)
        HostDevice.streams[self.stream] = self
        self.live: dict[int, int] = {}  # address -> size of device memory
        self.queue: list[Callable[[], object]] = []
        self.recording: list[Callable[[], object]] | None = None
        self.waits = 0
        self.captures = 0
        self.replays = 0

    def allocate(self, size: int) -> Tensor:
        size = max(size, 1)
        room = np.full(size + ALIGNMENT, 0xFF, dtype=np.uint8)
        memory = room[-room.ctypes.data % ALIGNMENT :][:size]
        address = memory.ctypes.data
        self.live[address] = size
        weakref.finalize(memory, self.live.pop, address).atexit = False
        return torch.from_numpy(memory)

    def staging(self, size: int) -> Tensor:
        return torch.full((max(size, 1),), 0xFF, dtype=torch.uint8)

    def run(self, work: Callable[[], object]) -> None:
        (self.queue if self.recording is None else self.recording).append(work)

    def synchronize(self) -> None:
        if self.recording is not None:
            raise RuleBroken("waited for a stream that is being captured")
        self.waits += 1
        queue, self.queue = self.queue, []
        for work in queue:
            work()

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        self.captures += 1
        self.recording = recorded = []
        try:
            launch()
        finally:
            self.recording = None
        return partial(self.replay, recorded)

    def replay(self, recorded: list[Callable[[], object]]) -> None:
        self.replays += 1
        for work in recorded:
            if isinstance(work, Launch):
                work.check_replay()
            self.run(work)

    def check_place(self, name: str, address: int, size: int) -> None:
        base = max((start for start in self.live if start <= address), default=0)
        if not base or address >= base + self.live[base]:
            raise RuleBroken(f"{name} is bound to {address:#x}, which is not allocated device memory")
        if address + size > base + self.live[base]:
            raise RuleBroken(f"{name} needs {size} bytes, its memory has {base + self.live[base] - address}")


class Severity(enum.IntEnum):
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class ILogger:
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = Severity

    def __init__(self) -> None:
        self.ready = True  # a subclass must call this, as with the real bindings


DataType = enum.Enum("DataType", "FLOAT HALF BF16 INT64 INT32 BOOL")
TensorIOMode = enum.Enum("TensorIOMode", "NONE INPUT OUTPUT")
CudaGraphStrategy = enum.Enum("CudaGraphStrategy", "DISABLED WHOLE_GRAPH_CAPTURE")
KernelStrategy = enum.Enum("DynamicShapesKernelSpecializationStrategy", "LAZY EAGER NONE")
DTYPES = {
    "float32": DataType.FLOAT,
    "float16": DataType.HALF,
    "int64": DataType.INT64,
    "int32": DataType.INT32,
    "bool": DataType.BOOL,
}


def tensorrt_stand_in(flavour: str = "tensorrt_rtx", tells_aliases: bool = True) -> Any:
    """A module of that flavour. `broken` collects what was released in the wrong order; `compiled` the kernels that
    TensorRT-RTX had to compile; the other fields can be set to play a machine's part."""
    module = SimpleNamespace(
        __name__=flavour,
        __version__=VERSIONS[flavour],
        ILogger=ILogger,
        DataType=DataType,
        TensorIOMode=TensorIOMode,
        broken=[],
        compiled=[],
        contexts=weakref.WeakSet(),
        environment="sm89 driver 580",
        has_room=True,
        engine_class=AliasAwareEngine if tells_aliases else CudaEngine,
        config_class=RtxRuntimeConfig if flavour == "tensorrt_rtx" else RuntimeConfig,
    )
    module.Runtime = partial(Runtime, module)
    if flavour == "tensorrt_rtx":
        module.CudaGraphStrategy = CudaGraphStrategy
        module.DynamicShapesKernelSpecializationStrategy = KernelStrategy
    return module


def must_outlive(module: Any, owner: object, dependent: object, rule: str) -> None:
    """Notes a broken rule if `owner` is released while `dependent` still lives."""
    reference = weakref.ref(dependent)
    weakref.finalize(owner, lambda: module.broken.append(rule) if reference() is not None else None).atexit = False


def engine_bytes(model: onnx.ModelProto, shapes: Shapes, flavour: str = "tensorrt_rtx") -> bytes:
    """The engine file of a graph whose weights are in the message, with one profile."""
    header = json.dumps({"flavour": flavour, "version": VERSIONS[flavour], "shapes": shapes}).encode()
    content = len(header).to_bytes(8, "little") + header + model.SerializeToString()
    return MAGIC + len(content).to_bytes(8, "little") + content


class IoTensor:
    """One input or output as the engine knows it; `axes` are numbers, and letters where a size is open."""

    def __init__(self, value: onnx.ValueInfoProto, mode: TensorIOMode):
        self.mode = mode
        self.dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        self.axes = [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


class Runtime:
    def __init__(self, module: Any, logger: ILogger):
        if not (isinstance(logger, ILogger) and hasattr(logger, "ready")):
            raise RuleBroken("a logger must derive from ILogger and call its __init__")
        self.module, self.logger = module, logger

    def deserialize_cuda_engine(self, blob: bytes) -> CudaEngine | None:
        content = blob[16:]
        if blob[:8] != MAGIC or len(content) != int.from_bytes(blob[8:16], "little"):
            self.logger.log(Severity.ERROR, "Serialization assertion header.magicTag == kEXPECTED_MAGIC_TAG failed.")
            self.logger.log(Severity.ERROR, "[checkMacros.cpp::catchCudaError::250] an echo of the error above")
            return None
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        if (header["flavour"], header["version"]) != (self.module.__name__, self.module.__version__):
            self.logger.log(Severity.ERROR, "The engine plan file is not compatible with this version of TensorRT")
            return None
        model = onnx.load_from_string(content[end:])
        return self.module.engine_class(self, model, header["shapes"], hashlib.sha256(blob).hexdigest())


class CudaEngine:
    """An engine of a TensorRT that cannot be asked for aliases."""

    num_optimization_profiles = 1

    def __init__(self, runtime: Runtime, model: onnx.ModelProto, shapes: dict[str, Any], digest: str):
        self.module, self.logger, self.digest = runtime.module, runtime.logger, digest
        self.runtime = weakref.ref(runtime)
        must_outlive(self.module, runtime, self, "the runtime was released before its engine")
        options = ort.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 3, 1
        self.session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        self.inputs = {value.name: IoTensor(value, TensorIOMode.INPUT) for value in model.graph.input}
        self.outputs = {value.name: IoTensor(value, TensorIOMode.OUTPUT) for value in model.graph.output}
        self.io = {**self.inputs, **self.outputs}
        self.profile = {name: [tuple(shape) for shape in shapes[name]] for name in self.inputs}
        self.aliases = {
            node.output[0]: node.input[0]
            for node in model.graph.node
            if node.op_type == "TensorScatter" and node.input[0] in self.inputs
        }

    def check_alive(self) -> None:
        if self.runtime() is None:
            raise RuleBroken("an engine was used after its runtime had been released")

    @property
    def num_io_tensors(self) -> int:
        self.check_alive()
        return len(self.io)

    def get_tensor_name(self, index: int) -> str:
        return list(self.io)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return self.io[name].mode if name in self.io else TensorIOMode.NONE

    def get_tensor_dtype(self, name: str) -> DataType:
        return DTYPES[self.io[name].dtype.name]

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[Shape]:
        if name not in self.inputs or profile != 0:
            raise RuleBroken(f"{name} of profile {profile} has no shapes: only inputs of the profile 0 have")
        return self.profile[name]

    def create_runtime_config(self) -> RuntimeConfig:
        self.check_alive()
        return self.module.config_class(self.module)

    def create_execution_context(self, config: RuntimeConfig) -> ExecutionContext | None:
        self.check_alive()
        if not self.module.has_room:
            self.logger.log(Severity.ERROR, "IExecutionContext::IExecutionContext: Error Code 2: OutOfMemory")
            return None
        return ExecutionContext(self, config)


class AliasAwareEngine(CudaEngine):
    def get_aliased_input_tensor(self, name: str) -> str | None:
        self.check_alive()
        return self.aliases.get(name)


class RuntimeConfig:
    def __init__(self, module: Any):
        self.module = module

    def set_execution_context_allocation_strategy(self, strategy: object) -> None:
        pass


class RtxRuntimeConfig(RuntimeConfig):
    def __init__(self, module: Any):
        super().__init__(module)
        self.cache: Callable[[], RuntimeCache | None] = lambda: None
        self.cuda_graph_strategy = CudaGraphStrategy.DISABLED
        self.dynamic_shapes_kernel_specialization_strategy = KernelStrategy.LAZY

    def create_runtime_cache(self) -> RuntimeCache:
        return RuntimeCache(self.module)

    def set_runtime_cache(self, cache: RuntimeCache) -> bool:
        self.cache = weakref.ref(cache)  # whoever made the cache keeps it alive
        return True


class RuntimeCache:
    """Which kernels were compiled, for one environment."""

    def __init__(self, module: Any):
        self.module = module
        self.kernels: list[str] = []

    def deserialize(self, blob: bytes) -> bool:
        environment, _, kernels = blob.partition(b"\n")
        if environment != self.module.environment.encode():
            return False
        self.kernels = json.loads(kernels)
        return True

    def serialize(self) -> memoryview:
        return memoryview(self.module.environment.encode() + b"\n" + json.dumps(self.kernels).encode())

    def compile(self, kernel: str) -> None:
        if kernel not in self.kernels:
            self.kernels.append(kernel)
            self.module.compiled.append(kernel)


class ExecutionContext:
    def __init__(self, engine: CudaEngine, config: RuntimeConfig):
        self.module, self.logger = engine.module, engine.logger
        self.native_graphs = isinstance(config, RtxRuntimeConfig)
        self.captures_itself = self.specialises = False
        self.cache: Callable[[], RuntimeCache | None] | None = None
        self.engine_reference, self.engine = weakref.ref(engine), engine_parts(engine)
        self.module.contexts.add(self)
        must_outlive(self.module, engine, self, "the engine was released before its context")
        if isinstance(config, RtxRuntimeConfig):
            self.captures_itself = config.cuda_graph_strategy is CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
            self.specialises = config.dynamic_shapes_kernel_specialization_strategy is not KernelStrategy.NONE
            if (cache := config.cache()) is not None:
                self.cache = weakref.ref(cache)
                must_outlive(self.module, cache, self, "the runtime cache was released before its context")
                cache.compile(engine.digest)
        self.profile: int | None = None
        self.shapes: dict[str, Shape] = {}
        self.addresses: dict[str, int] = {}
        self.complete = self.settled = False
        self.changes = 0

    def check_alive(self) -> None:
        engine = self.engine_reference()
        if engine is None:
            raise RuleBroken("a context was used after its engine had been released")
        engine.check_alive()

    def refuse(self, reason: str) -> bool:
        self.logger.log(Severity.ERROR, reason)
        return False

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.check_alive()
        if index != 0:
            return self.refuse(f"Optimization profile index {index} is out of range [0, 0]")
        host_device(stream)
        self.profile = index
        self.shapes.clear()
        self.changed(shapes=True)
        return True

    def changed(self, shapes: bool) -> None:
        self.changes += 1
        if shapes:
            self.complete = self.settled = False

    def set_input_shape(self, name: str, shape: Shape) -> bool:
        self.check_alive()
        if self.profile is None:
            raise RuleBroken("no optimization profile was selected")
        if name not in self.engine.inputs:
            return self.refuse(f"{name} is not the name of an input tensor")
        least, _, most = self.engine.profile[name]
        if len(shape) != len(least):
            return self.refuse(f"{name} has {len(shape)} dimensions, expected {len(least)}")
        if not all(low <= size <= high for low, size, high in zip(least, shape, most, strict=True)):
            return self.refuse(f"{name} {tuple(shape)} does not satisfy the profile {least} to {most}")
        self.shapes[name] = tuple(shape)
        self.changed(shapes=True)
        return True

    def infer_shapes(self) -> list[str]:
        self.check_alive()
        missing = [name for name in self.engine.inputs if name not in self.shapes]
        if not missing:
            sizes: dict[str, int] = {}
            for name, tensor in self.engine.inputs.items():
                sizes.update({a: s for a, s in zip(tensor.axes, self.shapes[name], strict=True) if isinstance(a, str)})
            for name, tensor in self.engine.outputs.items():
                self.shapes[name] = tuple(sizes[axis] if isinstance(axis, str) else axis for axis in tensor.axes)
            self.complete = True
        return missing

    def get_tensor_shape(self, name: str) -> Shape:
        return self.shapes[name]

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.check_alive()
        if name not in self.engine.io:
            return self.refuse(f"{name} is not the name of an input or output tensor")
        if address % ALIGNMENT:
            raise RuleBroken(f"the address {address:#x} of {name} is not a multiple of {ALIGNMENT}")
        self.addresses[name] = address
        self.changed(shapes=False)
        return True

    def execute_async_v3(self, stream: int) -> bool:
        self.check_alive()
        device = host_device(stream)
        if missing := [name for name in self.engine.inputs if name not in self.shapes]:
            return self.refuse(f"the shape of {missing[0]} is not set")
        if not self.complete:
            raise RuleBroken("launched before infer_shapes had said that all shapes are known")
        if missing := [name for name in self.engine.io if not self.addresses.get(name)]:
            return self.refuse(f"Address is not set for tensor {missing[0]}")
        self.check_places(device)
        if device.recording is not None:
            if self.native_graphs:
                return self.refuse("this engine was not built with REQUIRE_USER_ALLOCATION, so it cannot be captured")
            if not self.settled:
                raise RuleBroken("the first launch after a change of shapes was captured")
        if self.cache is not None:
            cache = self.cache()
            if cache is None:
                raise RuleBroken("a context was used after its runtime cache had been released")
            if self.specialises:
                cache.compile(f"{self.engine.digest} {sorted(self.shapes.items())}")
        self.settled = True
        device.run(Launch(self))
        return True

    def check_places(self, device: HostDevice) -> None:
        spans = {}
        for name, tensor in self.engine.io.items():
            size = math.prod(self.shapes[name]) * tensor.dtype.itemsize
            device.check_place(name, self.addresses[name], size)
            spans[name] = (self.addresses[name], self.addresses[name] + size)
        for name in self.engine.outputs:
            alias = self.engine.aliases.get(name)
            if alias is not None and self.addresses[name] != self.addresses[alias]:
                raise RuleBroken(f"{name} is updated in place, so it must be bound to the address of {alias}")
            for other in spans.keys() - {name, alias}:
                if max(spans[name][0], spans[other][0]) < min(spans[name][1], spans[other][1]):
                    raise RuleBroken(f"{name} overlaps {other}")


def engine_parts(engine: CudaEngine) -> Any:
    """What a context and its launches compute with. Not the engine itself: that would keep it alive."""
    names = ("session", "inputs", "outputs", "io", "profile", "aliases", "digest")
    return SimpleNamespace(**{name: getattr(engine, name) for name in names})


def host_device(stream: int) -> HostDevice:
    if stream == 0:
        raise RuleBroken("the default stream was used")
    if stream not in HostDevice.streams:
        raise RuleBroken(f"{stream} is not a stream")
    return HostDevice.streams[stream]

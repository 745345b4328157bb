"""A strict stand-in for `tensorrt` and `tensorrt_rtx` on a machine without a GPU: the module and its engines.

An engine file of the stand-in holds the ONNX graph that a build would have read, and a launch computes it with ONNX
Runtime on the raw addresses that were bound. Every rule that TensorRT has for its callers is enforced: what TensorRT
reports (by a False or None and a line to the logger) is reported in the same way; what TensorRT leaves undefined
raises `RuleBroken`. `stand_in_context.py` has what happens to an opened engine, `host_device.py` the memory and stream.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import onnx
import onnxruntime as ort
from onnx import helper

from seq2engine.export.artifact.profiles import Shapes
from seq2engine.runtime.ort.providers import SLOWER
from support.host_device import RuleBroken
from support.stand_in_config import (
    DTYPES,
    CudaGraphStrategy,
    DataType,
    ILogger,
    KernelStrategy,
    RtxRuntimeConfig,
    RuntimeConfig,
    Severity,
    TensorIOMode,
    must_outlive,
)
from support.stand_in_context import ExecutionContext
from support.wide_bf16 import widened

VERSIONS = {"tensorrt_rtx": "1.7.1.116", "tensorrt": "10.16.1.11"}
MAGIC = b"stand-in"

Shape = tuple[int, ...]


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


def engine_bytes(model: onnx.ModelProto, profiles: Sequence[Shapes], flavour: str = "tensorrt_rtx") -> bytes:
    """The engine file of a graph whose weights are in the message, with the shapes of every profile."""
    header = json.dumps({"flavour": flavour, "version": VERSIONS[flavour], "profiles": profiles}).encode()
    content = len(header).to_bytes(8, "little") + header + model.SerializeToString()
    return MAGIC + len(content).to_bytes(8, "little") + content


class IoTensor:
    """One input or output as the engine knows it; `axes` are numbers, and letters where a size is open."""

    def __init__(self, value: onnx.ValueInfoProto, mode: TensorIOMode):
        self.mode = mode
        self.dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        known = value.type.tensor_type.HasField("shape")  # not of tensors that a debug build marks as outputs
        dims = value.type.tensor_type.shape.dim
        self.axes = [dim.dim_param or dim.dim_value for dim in dims] if known else None


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
        return self.module.engine_class(self, model, header["profiles"], hashlib.sha256(blob).hexdigest())


class CudaEngine:
    """An engine of a TensorRT that cannot be asked for aliases."""

    def __init__(self, runtime: Runtime, model: onnx.ModelProto, profiles: list[dict[str, Any]], digest: str):
        self.module, self.logger, self.digest = runtime.module, runtime.logger, digest
        self.runtime = weakref.ref(runtime)
        must_outlive(self.module, runtime, self, "the runtime was released before its engine")
        options = ort.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 3, 1
        # TensorRT restores weights and leaves activations alone; ONNX Runtime would round them to int8.
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        self.session = ort.InferenceSession(  # with the fusions that a session of ours has: the same bits
            widened(model).SerializeToString(), options, providers=["CPUExecutionProvider"], disabled_optimizers=SLOWER
        )
        self.inputs = {value.name: IoTensor(value, TensorIOMode.INPUT) for value in model.graph.input}
        self.outputs = {value.name: IoTensor(value, TensorIOMode.OUTPUT) for value in model.graph.output}
        self.io = {**self.inputs, **self.outputs}
        self.profiles = [
            {name: [tuple(shape) for shape in shapes[name]] for name in self.inputs} for shapes in profiles
        ]
        self.busy: dict[int, weakref.ref[Any]] = {}  # profile -> the context that uses it
        scatters = [n for n in model.graph.node if n.op_type == "TensorScatter" and n.input[0] in self.inputs]
        self.aliases = {node.output[0]: node.input[0] for node in scatters}
        self.write_indices = {node.input[0]: node.input[2] for node in scatters if node.input[2] in self.inputs}

    def check_alive(self) -> None:
        if self.runtime() is None:
            raise RuleBroken("an engine was used after its runtime had been released")

    @property
    def num_optimization_profiles(self) -> int:
        self.check_alive()
        return len(self.profiles)

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
        if name not in self.inputs or not 0 <= profile < len(self.profiles):
            last = len(self.profiles) - 1
            raise RuleBroken(f"{name} of profile {profile} has no shapes: only inputs of the profiles 0 to {last} have")
        return self.profiles[profile][name]

    def create_runtime_config(self) -> RuntimeConfig:
        self.check_alive()
        config: RuntimeConfig = self.module.config_class(self.module)
        config.engine = weakref.ref(self)
        return config

    def create_execution_context(self, config: RuntimeConfig) -> ExecutionContext | None:
        self.check_alive()
        if config.engine() is not self:
            raise RuleBroken("a context was made with the runtime config of another engine")
        if not self.module.has_room:
            self.logger.log(Severity.ERROR, "IExecutionContext::IExecutionContext: Error Code 2: OutOfMemory")
            return None
        return ExecutionContext(self, config)


class AliasAwareEngine(CudaEngine):
    def get_aliased_input_tensor(self, name: str) -> str | None:
        self.check_alive()
        return self.aliases.get(name)

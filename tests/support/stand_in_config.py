"""What the TensorRT stand-in is configured with: the logger, the choices of a runtime config, the runtime cache."""

from __future__ import annotations

import enum
import json
import weakref
from collections.abc import Callable
from typing import Any


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
    "bfloat16": DataType.BF16,
    "int64": DataType.INT64,
    "int32": DataType.INT32,
    "bool": DataType.BOOL,
}


def must_outlive(module: Any, owner: object, dependent: object, rule: str) -> None:
    """Notes a broken rule if `owner` is released while `dependent` still lives."""
    reference = weakref.ref(dependent)
    weakref.finalize(owner, lambda: module.broken.append(rule) if reference() is not None else None).atexit = False


class RuntimeConfig:
    engine: Callable[[], object | None]  # whose config this is

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
        if environment != self.module.environment.encode() or not kernels.endswith(b"]"):
            return False
        self.kernels = json.loads(kernels)
        return True

    def serialize(self) -> memoryview:
        return memoryview(self.module.environment.encode() + b"\n" + json.dumps(self.kernels).encode())

    def compile(self, kernel: str) -> None:
        if kernel not in self.kernels:
            self.kernels.append(kernel)
            self.module.compiled.append(kernel)

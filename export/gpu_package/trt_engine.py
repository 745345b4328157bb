"""Opens an engine and runs it on device addresses, for `tensorrt` and `tensorrt_rtx` alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cuda_memory import Cuda

ECHO = "catchCudaError"  # in a line that TensorRT-RTX adds to every other error


class EngineFailed(Exception):
    """Why an engine cannot be built or run, in one line."""


class Engine:
    """One engine: shapes and addresses in, outputs in place."""

    def __init__(self, trt: Any, cuda: Cuda, path: Path, graph: Any, mend: str):
        self.cuda, self.path, self.graph, self.mend = cuda, path, graph, mend
        self.logger = make_logger(trt)
        self.runtime = trt.Runtime(self.logger)  # must live longer than the engine
        self.engine = self.runtime.deserialize_cuda_engine(path.read_bytes())
        if self.engine is None:
            raise EngineFailed(f"{path} cannot be opened ({self.logger.reason()}); {mend}")
        self.config = self.engine.create_runtime_config()
        self.context = self.engine.create_execution_context(self.config)
        if self.context is None:
            raise EngineFailed(f"{path} cannot be run on this GPU ({self.logger.reason()}); {mend}")
        self.profile: int | None = None

    def run(self, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        """Queues one run; `shapes` of the inputs, `addresses` of the inputs and outputs."""
        self.select(shapes)
        for name, shape in shapes.items():
            self.require(self.context.set_input_shape(name, shape), f"take {name} {shape}")
        if missing := self.context.infer_shapes():
            raise EngineFailed(f"{self.path} does not know the shape of {', '.join(missing)}; {self.mend}")
        for name, address in addresses.items():
            self.require(self.context.set_tensor_address(name, address), f"bind {name}")
        self.require(self.context.execute_async_v3(self.cuda.stream), "run")

    def select(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """The narrowest profile that takes these shapes, on the stream that the launch follows on."""
        profiles = self.graph["profiles"]
        taking = [i for i, one in enumerate(profiles) if all(fits(shapes[name], one[name]) for name in shapes)]
        if not taking:
            shown = ", ".join(f"{name} {list(shape)}" for name, shape in list(shapes.items())[:2])
            raise EngineFailed(f"no profile of {self.path} takes {shown}, ...; package the model with wider ranges")
        index = min(taking, key=lambda i: widths(profiles[i]))
        if index != self.profile:
            selected = self.context.set_optimization_profile_async(index, self.cuda.stream)
            self.require(selected, f"select profile {index}")
            self.profile = index

    def require(self, done: bool, what: str) -> None:
        if not done:
            raise EngineFailed(f"{self.path} would not {what} ({self.logger.reason()}); {self.mend}")

    def close(self) -> None:
        """Releases everything, the context first and the runtime last."""
        self.context = self.config = None
        self.engine = None
        self.runtime = None


def fits(shape: Sequence[int], ranges: Sequence[Sequence[int]]) -> bool:
    return all(low <= size <= high for low, size, high in zip(ranges[0], shape, ranges[-1], strict=True))


def widths(profile: Mapping[str, Sequence[Sequence[int]]]) -> int:
    """How much a profile takes at most: elements of all inputs together."""
    return sum(math.prod(shapes[-1]) for shapes in profile.values())


def make_logger(trt: Any) -> Any:
    class Log(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.latest = "no reason given"

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR) and ECHO not in message:
                self.latest = " ".join(message.split())

        def reason(self) -> str:
            """The latest error; a second call has none."""
            reason, self.latest = self.latest, "no reason given"
            return reason

    return Log()

"""One TensorRT engine, opened: its execution context, what is bound to it, and the CUDA graph of its launches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seq2engine.folders import new_file

from ..errors import SessionError
from ..export.passport import EngineEntry
from ..export.trt_module import collector_held
from .trt_device import Device
from .trt_memory import DeviceArray, Shape

DTYPES = {  # TensorRT's name -> the passport's
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT64": "int64",
    "INT32": "int32",
    "BOOL": "bool",
}
PROFILE = 0  # the only one our builds make
ECHO = "catchCudaError"  # in a line that TensorRT-RTX adds to every other error
log = logging.getLogger("seq2engine")


@dataclass(frozen=True)
class Binding:
    """An array for every input and output in the passport's order, and the part of it that a CUDA graph bakes in."""

    arrays: tuple[DeviceArray, ...]
    key: tuple[tuple[int, Shape], ...]  # address and shape of each


class Engine:
    """An engine ready to run on one device and stream. It owns no tensor memory: what is bound belongs to the caller.

    `repeats` says that calls come in rows of equal shapes, which makes a CUDA graph worth its capture; `grows`, that
    every call brings new shapes, which makes kernels specialised to one of them a waste. `refused` ends the messages
    of errors that only another build mends.
    """

    @collector_held()
    def __init__(
        self, trt: Any, device: Device, path: Path, entry: EngineEntry, repeats: bool, grows: bool, refused: str
    ):
        self.device, self.path, self.entry, self.refused = device, path, entry, refused
        self.bound: tuple[tuple[int, Shape], ...] | None = None
        self.graph: Callable[[], None] | None = None
        self.context: Any = None
        self.config: Any = None
        self.runtime_cache: RuntimeCache | None = None
        self.engine: Any = None
        self.logger = make_logger(trt)
        self.runtime = trt.Runtime(self.logger)  # must live longer than the engine
        try:
            self.load(trt)
            self.configure(trt, repeats, grows)
            self.make_context()
        except BaseException:
            self.close()
            raise

    def load(self, trt: Any) -> None:
        self.engine = self.runtime.deserialize_cuda_engine(self.path.read_bytes())
        if self.engine is None:
            opener = f"{trt.__name__} {trt.__version__}"
            raise SessionError(f"{self.path} cannot be opened by {opener} ({self.logger.reason()}); {self.refused}")
        self.check_interface()
        self.aliases = {t.name: alias for t in self.entry.outputs if (alias := self.alias_of(t.name))}

    def configure(self, trt: Any, repeats: bool, grows: bool) -> None:
        """TensorRT-RTX captures graphs and keeps compiled kernels itself; for TensorRT we capture."""
        self.config = self.engine.create_runtime_config()
        native_graphs = hasattr(self.config, "cuda_graph_strategy")
        self.captures = repeats and not native_graphs
        if repeats and native_graphs:
            self.config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        if grows and hasattr(self.config, "dynamic_shapes_kernel_specialization_strategy"):
            strategies = trt.DynamicShapesKernelSpecializationStrategy
            self.config.dynamic_shapes_kernel_specialization_strategy = strategies.NONE
        if hasattr(self.config, "create_runtime_cache"):
            self.runtime_cache = RuntimeCache(self.config, self.path)

    def make_context(self) -> None:
        self.context = self.engine.create_execution_context(self.config)
        if self.context is None:
            raise SessionError(
                f"{self.path} was opened, but {self.device.name} cannot run it ({self.logger.reason()}); "
                f"free some GPU memory, or {self.refused}"
            )
        self.require(self.context.set_optimization_profile_async(PROFILE, self.device.stream), "select its profile")
        self.device.synchronize()
        if self.runtime_cache is not None:
            self.runtime_cache.save()  # kernels were compiled just now: kept even if this process is killed later

    def check_interface(self) -> None:
        """Holds the opened engine against its passport, from which all buffers and checks are derived."""
        found = set()
        for i in range(self.engine.num_io_tensors):
            name = self.engine.get_tensor_name(i)
            dtype = self.engine.get_tensor_dtype(name).name
            found.add((self.engine.get_tensor_mode(name).name, name, DTYPES.get(dtype, dtype), self.shapes_of(name)))
        expected = {("INPUT", t.name, t.dtype, t.shapes) for t in self.entry.inputs}
        expected |= {("OUTPUT", t.name, t.dtype, ()) for t in self.entry.outputs}
        if found != expected:
            differing = sorted({name for _, name, _, _ in found ^ expected})
            raise SessionError(f"{self.path} is not what its passport says ({', '.join(differing)}); {self.refused}")

    def shapes_of(self, name: str) -> tuple[Shape, ...]:
        """An input's shapes at min, opt and max; nothing for an output."""
        if self.engine.get_tensor_mode(name).name == "OUTPUT":
            return ()
        return tuple(tuple(shape) for shape in self.engine.get_tensor_profile_shape(name, PROFILE))

    def alias_of(self, output: str) -> str | None:
        """The input whose memory an output must share: by the engine where it can be asked, else by the passport."""
        recorded = self.entry.aliases.get(output)
        if not hasattr(self.engine, "get_aliased_input_tensor"):
            return recorded
        told = self.engine.get_aliased_input_tensor(output) or None
        if told != recorded:
            raise SessionError(
                f"{self.path} wants {output} in the memory of {told}, its passport says {recorded}; {self.refused}"
            )
        return told

    def binding(self, arrays: Mapping[str, DeviceArray]) -> Binding:
        """What to run on: takes an array for every input and output by name; an aliased output gets its input's."""
        placed = [arrays[t.name] for t in self.entry.inputs]
        placed += [arrays[self.aliases.get(t.name, t.name)] for t in self.entry.outputs]
        return Binding(tuple(placed), tuple((array.address, array.shape) for array in placed))

    def run(self, binding: Binding) -> None:
        """Queues one run."""
        if binding.key != self.bound:
            # A captured graph is tied to the state of the context it was captured from: it goes before that changes.
            self.graph = self.bound = None
            self.bind(binding)
            self.bound = binding.key
            self.launch()  # TensorRT finishes a change of shapes in the first launch, which must not be captured
            return
        if self.captures and self.graph is None:
            self.graph = self.capture()
        if self.graph is not None:
            self.graph()
        else:
            self.launch()

    def bind(self, binding: Binding) -> None:
        inputs, outputs = self.entry.inputs, self.entry.outputs
        for tensor, array in zip(inputs, binding.arrays[: len(inputs)], strict=True):
            self.require(self.context.set_input_shape(tensor.name, array.shape), f"take {tensor.name} {array.shape}")
        if missing := self.context.infer_shapes():
            raise SessionError(f"{self.path} does not know the shape of {', '.join(missing)}; {self.refused}")
        for tensor, array in zip(outputs, binding.arrays[len(inputs) :], strict=True):
            if (inferred := tuple(self.context.get_tensor_shape(tensor.name))) != array.shape:
                raise SessionError(
                    f"{self.path} makes {tensor.name} {inferred}, expected {array.shape}; {self.refused}"
                )
        for tensor, array in zip((*inputs, *outputs), binding.arrays, strict=True):
            self.require(self.context.set_tensor_address(tensor.name, array.address), f"bind {tensor.name}")

    def launch(self) -> None:
        self.require(self.context.execute_async_v3(self.device.stream), "run")

    def capture(self) -> Callable[[], None] | None:
        """The launches as a CUDA graph. Where that fails the engine goes on without: slower, but as correct."""
        try:
            return self.device.capture(self.launch)
        except (SessionError, RuntimeError) as error:  # ours for a refused launch, torch's for an invalid capture
            log.warning("%s runs without a CUDA graph, which could not be captured: %s", self.path, error)
            self.captures = False
            return None

    def require(self, done: bool, what: str) -> None:
        if not done:
            raise SessionError(f"{self.path} would not {what} ({self.logger.reason()}); {self.refused}")

    def close(self) -> None:
        """Saves the runtime cache and lets everything go, the context first and the runtime last."""
        if self.runtime_cache is not None and self.context is not None:
            self.runtime_cache.save()
        self.graph = None
        self.context = None
        self.config = None
        self.runtime_cache = None
        self.engine = None
        self.runtime = None


class RuntimeCache:
    """The kernels that TensorRT-RTX compiles for this GPU when an engine is opened, kept in a file beside it."""

    def __init__(self, config: Any, engine_path: Path):
        self.path = engine_path.with_suffix(".runtime_cache")
        self.cache = config.create_runtime_cache()
        self.saved = self.path.read_bytes() if self.path.is_file() else b""
        if self.saved and not self.cache.deserialize(self.saved):
            self.saved = b""  # made by another GPU or driver, or damaged: compiled and written anew
        config.set_runtime_cache(self.cache)

    def save(self) -> None:
        """Writes the file if there is anything new. A bundle that cannot be written to costs time, not the session."""
        content = self.cache.serialize()
        if content is None or bytes(content) == self.saved:
            return
        self.saved = bytes(content)
        try:
            with new_file(self.path) as beside:
                beside.write_bytes(self.saved)
        except OSError as error:
            log.warning("%s not written (%s): the next start compiles its kernels again", self.path, error.strerror)


def make_logger(trt: Any) -> Any:
    """A TensorRT logger that keeps the latest error for our own messages and prints nothing."""

    class ErrorKeeper(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.latest = "no reason given"

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR) and ECHO not in message:
                self.latest = " ".join(message.split())

        def reason(self) -> str:
            """The latest error, told once."""
            reason, self.latest = self.latest, "no reason given"
            return reason

    return ErrorKeeper()

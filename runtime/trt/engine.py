"""One opened TensorRT engine: its execution context and what is bound to it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from seq2engine.common.atomic_folders import new_file
from seq2engine.common.tensorrt_module import collector_held
from seq2engine.errors import GraphError, SessionError
from seq2engine.export.artifact.passport import EngineEntry, EngineTensor

from .device import Device
from .memory import DeviceArray, Shape
from .shapes import Profile

DTYPES = {  # TensorRT's name -> the passport's
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT64": "int64",
    "INT32": "int32",
    "BOOL": "bool",
}
ECHO = "catchCudaError"  # in a line that TensorRT-RTX adds to every other error
log = logging.getLogger("seq2engine")

Key = tuple[int, tuple[tuple[int, Shape], ...]]  # the profile; address and shape of every tensor


@dataclass(frozen=True)
class Binding:
    """An array for every input and output in the passport's order, and the part of it that a CUDA graph bakes in."""

    profile: int
    arrays: tuple[DeviceArray, ...]

    @cached_property
    def key(self) -> Key:
        return self.profile, tuple((array.address, array.shape) for array in self.arrays)


class Engine:
    """An engine ready to run on one device and stream. It owns no tensor memory: what is bound belongs to the caller.

    `repeats`: shapes stay the same for many calls, so capturing a CUDA graph pays. `grows`: every call has new shapes,
    so kernels specialised to one of them do not. `refused` ends the messages of errors that need another build.
    """

    @collector_held()
    def __init__(
        self,
        trt: Any,
        device: Device,
        path: Path,
        entry: EngineEntry,
        profiles: Sequence[Profile],
        repeats: bool,
        grows: bool,
        refused: str,
    ):
        self.device, self.path, self.entry, self.refused = device, path, entry, refused
        self.profiles = profiles
        self.profile: int | None = None
        self.bound: Key | None = None
        self.changes = 0  # changes of the binding: a CUDA graph is invalid after one
        self.settled = False  # TensorRT finishes a change of shapes in the first launch, which must not be captured
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
        self.select(self.profiles[0].index)
        self.device.synchronize()
        if self.runtime_cache is not None:
            self.runtime_cache.save()  # kernels were compiled just now: kept even if this process is killed later

    def check_interface(self) -> None:
        """Compares the opened engine with its passport, from which all buffers and checks are derived."""
        found = set()
        for i in range(self.engine.num_io_tensors):
            name = self.engine.get_tensor_name(i)
            dtype = self.engine.get_tensor_dtype(name).name
            found.add((self.engine.get_tensor_mode(name).name, name, DTYPES.get(dtype, dtype), self.shapes_of(name)))
        expected = {("INPUT", t.name, t.dtype, self.recorded_shapes(t)) for t in self.entry.inputs}
        expected |= {("OUTPUT", t.name, t.dtype, ()) for t in self.entry.outputs}
        if self.engine.num_optimization_profiles != len(self.profiles):
            has = f"it has {self.engine.num_optimization_profiles} profiles, not {len(self.profiles)}"
            raise SessionError(f"{self.path} is not what its passport records ({has}); {self.refused}")
        if found != expected:
            differing = sorted({name for _, name, _, _ in found ^ expected})
            raise SessionError(f"{self.path} is not what its passport records ({', '.join(differing)}); {self.refused}")

    def shapes_of(self, name: str) -> tuple[Shape, ...]:
        """An input's shapes at min, opt and max, profile after profile; nothing for an output."""
        if self.engine.get_tensor_mode(name).name == "OUTPUT":
            return ()
        by_profile = (self.engine.get_tensor_profile_shape(name, p) for p in range(len(self.profiles)))
        return tuple(tuple(shape) for shapes in by_profile for shape in shapes)

    def recorded_shapes(self, tensor: EngineTensor) -> tuple[Shape, ...]:
        """The same by the passport, which spells out the first profile's."""
        return (*tensor.shapes, *(shape for profile in self.profiles[1:] for shape in profile.shapes(tensor)))

    def alias_of(self, output: str) -> str | None:
        """The input whose memory an output must share: by the engine where it reports it, else by the passport."""
        recorded = self.entry.aliases.get(output)
        if not hasattr(self.engine, "get_aliased_input_tensor"):
            return recorded
        reported = self.engine.get_aliased_input_tensor(output) or None
        if reported != recorded:
            raise SessionError(
                f"{self.path} wants {output} in the memory of {reported}, its passport has {recorded}; {self.refused}"
            )
        return reported

    def binding(self, profile: Profile, arrays: Mapping[str, DeviceArray]) -> Binding:
        """A binding of arrays by name, one for every input and output; an aliased output gets its input's."""
        placed = [arrays[t.name] for t in self.entry.inputs]
        placed += [arrays[self.aliases.get(t.name, t.name)] for t in self.entry.outputs]
        return Binding(profile.index, tuple(placed))

    def take(self, binding: Binding) -> None:
        """Binds, if something else is bound."""
        if binding.key != self.bound:
            self.bound, self.settled = None, False
            self.changes += 1
            self.bind(binding)
            self.bound = binding.key

    def output_shapes(self, profile: int, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Selects a profile and sets the shapes of all inputs; what shapes the outputs then have."""
        self.bound, self.settled = None, False
        self.select(profile)
        for tensor in self.entry.inputs:
            shape = shapes[tensor.name]
            self.require(self.context.set_input_shape(tensor.name, shape), f"take {tensor.name} {shape}")
        if missing := self.context.infer_shapes():
            raise SessionError(f"{self.path} does not know the shape of {', '.join(missing)}; {self.refused}")
        return {tensor.name: tuple(self.context.get_tensor_shape(tensor.name)) for tensor in self.entry.outputs}

    def bind(self, binding: Binding) -> None:
        inputs, outputs = self.entry.inputs, self.entry.outputs
        given = zip(inputs, binding.arrays[: len(inputs)], strict=True)
        inferred = self.output_shapes(binding.profile, {tensor.name: array.shape for tensor, array in given})
        for tensor, array in zip(outputs, binding.arrays[len(inputs) :], strict=True):
            if inferred[tensor.name] != array.shape:
                raise SessionError(
                    f"{self.path} makes {tensor.name} {inferred[tensor.name]}, expected {array.shape}; {self.refused}"
                )
        for tensor, array in zip((*inputs, *outputs), binding.arrays, strict=True):
            self.require(self.context.set_tensor_address(tensor.name, array.address), f"bind {tensor.name}")

    def select(self, profile: int) -> None:
        """Switches to a profile, on the stream that the next launch is queued on, so that it comes after."""
        if profile != self.profile:
            selected = self.context.set_optimization_profile_async(profile, self.device.stream)
            self.require(selected, f"select its profile {profile}")
            self.profile = profile

    def launch(self) -> None:
        """Queues one run with what is bound."""
        self.require(self.context.execute_async_v3(self.device.stream), "run")
        self.settled = True

    def require(self, done: bool, what: str) -> None:
        if not done:
            reason = f"{self.path} would not {what} ({self.logger.reason()}); {self.refused}"
            raise GraphError(reason, self.path.stem)

    def close(self) -> None:
        """Saves the runtime cache and releases everything, the context first and the runtime last."""
        if self.runtime_cache is not None and self.context is not None:
            self.runtime_cache.save()
        self.context = None
        self.config = None
        self.runtime_cache = None
        self.engine = None
        self.runtime = None


class RuntimeCache:
    """Kernels that TensorRT-RTX compiled for this GPU when the engine was opened, kept in a file beside the engine.

    It lives longer than the contexts that use it.
    """

    def __init__(self, config: Any, engine_path: Path):
        self.path = engine_path.with_suffix(".runtime_cache")
        self.cache = config.create_runtime_cache()
        self.saved = self.path.read_bytes() if self.path.is_file() else b""
        if self.saved and not self.cache.deserialize(self.saved):
            log.warning("%s is damaged or of another GPU or driver: it is ignored and written again", self.path)
            self.saved = b""
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
            """The latest error; a second call has none."""
            reason, self.latest = self.latest, "no reason given"
            return reason

    return ErrorKeeper()

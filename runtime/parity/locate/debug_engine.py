"""A TensorRT engine searched for a fault: built again with inner tensors marked as outputs, and run on the same inputs.

the passport's graph form --mark tensors--> build --> debug engine --run--> tensors, compared as those of ONNX files

The form is the one that the engine was made of, with its profiles, targets and flags. TensorRT fuses less where a
tensor is an output, so a debug engine has other kernels than the engine itself. A fault of a fused kernel may not occur
in it; the search then reports that.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, shape_inference

from seq2engine.errors import RequestError, SessionError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.artifact.graph_files import graph_from_file
from seq2engine.export.artifact.passport import EngineEntry, EngineTensor, Passport
from seq2engine.export.artifact.profiles import ShapeRanges, Workload, shapes_from_ranges
from seq2engine.export.artifact.transfers import aligned, itemsize_of
from seq2engine.export.audit import without_weight_data
from seq2engine.export.debug_outputs import element_types, exposed_graph, real_tensors
from seq2engine.export.engines.build import build_engine
from seq2engine.export.engines.to_engine import graph_for_tensorrt
from seq2engine.export.graph_index import copy_of
from seq2engine.export.trt_forms.fold_query import scaled_names
from seq2engine.export.trt_forms.step import frozen_axes

from ...trt.device import Device
from ...trt.engine import Engine
from ...trt.memory import DeviceArray, Shape, read_values, typed_front
from ...trt.selection import Opening, fix
from ...trt.session import engine_on_this_machine
from ...trt.shapes import call_sizes, profiles_of
from .three_way import GraphFile


@contextmanager
def debug_engines(
    bundle: Bundle, backend: str, precision: str, engine: str | None, workload: Workload
) -> Iterator[DebugEngines | None]:
    """The debug engines of a backend; None for a backend without engines."""
    if backend != "tensorrt":
        yield None
        return
    with DebugEngines(bundle, precision, engine, workload) as engines:
        yield engines


class DebugEngines:
    """The engines of a bundle, to be built with marked tensors. Nothing is opened or built before it is asked for."""

    def __init__(self, bundle: Bundle, precision: str, engine: str | None, workload: Workload | None = None):
        self.bundle, self.precision, self.engine, self.workload = bundle, precision, engine, workload
        self.resources = ExitStack()

    def __enter__(self) -> DebugEngines:
        return self

    def __exit__(self, *exc: object) -> None:
        self.resources.close()

    @cached_property
    def opening(self) -> Opening:
        return engine_on_this_machine(self.bundle, self.precision, self.engine, self.workload)

    @cached_property
    def folder(self) -> Path:
        """For engines that are gone afterwards."""
        return Path(self.resources.enter_context(tempfile.TemporaryDirectory(prefix="seq2engine-debug-")))

    @property
    def passport(self) -> Passport:
        return self.opening.passport

    @property
    def ranges(self) -> ShapeRanges:
        return self.passport.ranges

    @property
    def slots(self) -> int | None:
        return self.passport.slots if self.passport.cache_form == "static" else None

    def file(self, graph: str) -> EngineFile:
        return EngineFile(self, graph)

    @property
    def fewest_columns(self) -> int:
        """The least source length: shorter sources are padded to it."""
        return min(ranges.source.min for ranges in self.passport.profiles)

    def fitting(self, sources: Sequence[Any]) -> list[Any]:
        """As many of the sources as one batch of the engine takes; if all are too long, the beginnings of them."""
        most = self.ranges.source.max
        short = [source for source in sources if self.bundle.config.takes_features or len(source) <= most]
        few = (short or [source[:most] for source in sources])[: self.ranges.batch.max]
        return few + [few[i % len(few)] for i in range(self.ranges.batch.min - len(few))]


class EngineFile(GraphFile):
    """One graph in the form that TensorRT gets; `opened` builds an engine of it."""

    def __init__(self, engines: DebugEngines, graph: str):
        bundle, passport = engines.bundle, engines.passport
        self.engines, self.graph = engines, graph
        self.path, self.threads = bundle.graph_path(passport.precision, graph), None
        self.model = form_of(bundle, passport, graph)
        same = same_tensors(graph_from_file(self.path), self.model)
        self.tensors = {name: node for name, node in real_tensors(self.model).items() if name in same}
        self.weights = {weight.name: weight for weight in self.model.graph.initializer}
        self.built: list[OpenEngine] = []

    def opened(self, names: Iterable[str]) -> OpenEngine:  # type: ignore[override]
        """An engine with these outputs: one that was built before, if it has them all."""
        wanted = set(names)
        for one in self.built:
            if wanted <= {output.name for output in one.entry.outputs}:
                return one
        opening, passport = self.engines.opening, self.engines.passport
        entry = entry_with(passport.engines[self.graph], self.model, sorted(wanted), len(self.built))
        content = debug_engine(opening.trt, self.engines.bundle, passport, self.graph, self.model, sorted(wanted))
        path = self.engines.folder / entry.file
        path.write_bytes(content)
        made = OpenEngine(opening, self.graph, path, entry)
        self.engines.resources.callback(made.close)
        self.built.append(made)
        return made


def form_of(bundle: Bundle, passport: Passport, graph: str) -> onnx.ModelProto:
    """The graph as the engine was made of it, its weights left where they are."""
    form = graph_for_tensorrt(bundle, passport.precision, graph, passport.profiles, passport.slots)
    return onnx.load_from_string(form)


def debug_engine(
    trt: Any, bundle: Bundle, passport: Passport, graph: str, form: onnx.ModelProto, names: Sequence[str]
) -> bytes:
    """The engine of a form with these tensors as outputs besides its own; all else as in its passport."""
    spec = bundle.specs(passport.precision)[graph]
    widest, *narrower = (
        shapes_from_ranges(spec, ranges, passport.cache_form, passport.slots) for ranges in passport.profiles
    )
    path, marked = bundle.graph_path(passport.precision, graph), exposed_graph(form, names)
    return build_engine(trt, marked, path, widest, passport.targets, lambda done: None, narrower, passport.flags)


def entry_with(entry: EngineEntry, form: onnx.ModelProto, names: Sequence[str], number: int) -> EngineEntry:
    """The passport entry of such an engine."""
    own, types = {tensor.name for tensor in entry.outputs}, element_types(form)
    more = tuple(
        EngineTensor(name, str(helper.tensor_dtype_to_np_dtype(types[name])), ()) for name in names if name not in own
    )
    return dataclasses.replace(entry, file=f"{number}-{entry.file}", outputs=(*entry.outputs, *more))


def same_tensors(portable: onnx.ModelProto, form: onnx.ModelProto) -> set[str]:
    """Names of tensors that are the same in both: under the same name a form may widen or scale a tensor."""
    sizes = {
        given.dim_param: made.dim_value
        for before, after in zip(portable.graph.input, form.graph.input, strict=True)
        for given, made in zip(before.type.tensor_type.shape.dim, after.type.tensor_type.shape.dim, strict=True)
        if given.dim_param and made.HasField("dim_value")
    }
    frozen = copy_of(portable)
    frozen_axes(frozen, sizes)
    ours, theirs = known_sizes(frozen), known_sizes(form)
    both = (ours.keys() & theirs.keys()) - scaled_names(portable, form)
    return {name for name in both if agree(ours[name], theirs[name])}


def known_sizes(model: onnx.ModelProto) -> dict[str, list[int | None]]:
    """Axes of all tensors that shape inference knows; None: an open one."""
    graph = shape_inference.infer_shapes(without_weight_data(model), data_prop=True).graph
    return {
        value.name: [dim.dim_value if dim.HasField("dim_value") else None for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.value_info, *graph.output)
        if value.type.tensor_type.HasField("shape")
    }


def agree(ours: list[int | None], theirs: list[int | None]) -> bool:
    pairs = zip(ours, theirs, strict=False)
    return len(ours) == len(theirs) and all(None in pair or pair[0] == pair[1] for pair in pairs)


class OpenEngine:
    """An engine with marked tensors, run on arrays of the host."""

    def __init__(self, opening: Opening, graph: str, path: Path, entry: EngineEntry):
        self.opening, self.graph, self.entry = opening, graph, entry
        refused = fix(opening.folder, opening.passport)
        profiles = profiles_of(opening.passport)
        self.engine = Engine(opening.trt, opening.device, path, entry, profiles, False, False, refused)

    def run(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        device, entry = self.opening.device, self.entry
        shapes = {tensor.name: feeds[tensor.name].shape for tensor in entry.inputs}
        try:
            _, profile = call_sizes(self.opening.folder, self.opening.passport, self.graph, shapes)
        except RequestError as error:  # nobody asked for these shapes: it is the search that cannot be made
            raise SessionError(str(error)) from error
        arrays = {tensor.name: array_on(device, feeds[tensor.name], tensor.dtype) for tensor in entry.inputs}
        made = self.engine.output_shapes(profile.index, shapes)
        for tensor in entry.outputs:
            if tensor.name not in self.engine.aliases:
                arrays[tensor.name] = room_on(device, tensor.dtype, made[tensor.name])
        self.engine.take(self.engine.binding(profile, arrays))
        self.engine.launch()
        places = {tensor.name: arrays[self.engine.aliases.get(tensor.name, tensor.name)] for tensor in entry.outputs}
        return {name: array_from(device, place) for name, place in places.items()}

    def close(self) -> None:
        self.engine.close()


def room_on(device: Device, dtype: str, shape: Shape) -> DeviceArray:
    return DeviceArray(device.allocate(aligned(math.prod(shape) * itemsize_of(dtype))), dtype, shape)


def array_on(device: Device, values: np.ndarray, dtype: str) -> DeviceArray:
    """Values copied to the device; those for bfloat16 are fp32 that it holds exactly."""
    array = room_on(device, dtype, values.shape)
    staging = device.staging(array.memory.size)
    bits = values.astype(np.float32).view(np.uint32) >> 16 if dtype == "bfloat16" else values
    typed_front(staging, dtype, values.shape)[...] = bits
    device.upload(array.memory, staging)
    device.synchronize()  # the staging memory goes
    return array


def array_from(device: Device, array: DeviceArray) -> np.ndarray:
    """The values of a tensor on the device, bfloat16 as fp32."""
    staging = device.staging(max(array.bytes, 1))[: array.bytes]
    if array.bytes:
        device.download(staging, array.memory)
    device.synchronize()
    return read_values(staging, array.dtype, array.shape)

"""An opened engine of the TensorRT stand-in: what is bound to it, and its launches. See tensorrt_stand_in.py."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from support.host_device import ALIGNMENT, HostDevice, RuleBroken, host_device
from support.stand_in_config import (
    CudaGraphStrategy,
    KernelStrategy,
    RtxRuntimeConfig,
    RuntimeCache,
    RuntimeConfig,
    Severity,
    must_outlive,
)
from support.wide_bf16 import run_wide

Shape = tuple[int, ...]


class Launch:
    """One queued run of an engine. Addresses and shapes are those of the moment it was launched."""

    def __init__(self, context: ExecutionContext, device: HostDevice, allocations: dict[str, int]):
        self.context = weakref.ref(context)
        self.device, self.allocations = device, allocations
        self.engine = context.engine
        self.places = {name: (context.addresses[name], context.shapes[name]) for name in context.engine.io}
        self.changes = context.changes

    def check_replay(self) -> None:
        context = self.context()
        if context is None or context.changes != self.changes:
            raise RuleBroken("a graph was replayed after the context it was captured from had changed")

    def __call__(self) -> None:
        if self.context() is None:
            raise RuleBroken("a context was released while its work was queued")
        for name, (address, shape) in self.places.items():
            size = math.prod(shape) * self.engine.io[name].dtype.itemsize
            if self.device.check_place(name, address, size) != self.allocations[name]:
                raise RuleBroken(f"the memory of {name} was freed while work on it was queued")
        feed = {name: self.view(name) for name in self.engine.inputs}
        self.check_writes(feed)
        results = run_wide(self.engine.session, self.engine.outputs, feed)
        for name, result in zip(self.engine.outputs, results, strict=True):
            target = self.view(name)
            if target.shape != result.shape or target.dtype != result.dtype:
                raise RuleBroken(f"{name} came out as {result.dtype} {result.shape}, bound as {target.shape}")
            np.copyto(target, result)

    def check_writes(self, feed: dict[str, np.ndarray]) -> None:
        """Where a cache is written is the caller's duty: TensorRT writes there, whatever lies there."""
        for cache, index in self.engine.write_indices.items():
            last = feed["tokens"].shape[1] + int(feed[index].max(initial=0))
            if feed[index].min(initial=0) < 0 or last > feed[cache].shape[2]:
                raise RuleBroken(f"{index} leads outside {cache}, which has {feed[cache].shape[2]} slots")

    def view(self, name: str) -> np.ndarray:
        address, shape = self.places[name]
        dtype = self.engine.io[name].dtype
        size = math.prod(shape) * dtype.itemsize
        if size == 0:
            return np.empty(shape, dtype)
        return np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype).reshape(shape)


class ExecutionContext:
    """`own_graphs` are the CUDA graphs that a TensorRT-RTX context would have captured by itself."""

    def __init__(self, engine: Any, config: RuntimeConfig):
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
        self.switches: list[int] = []
        self.switched: tuple[HostDevice, int] | None = None  # where the profile was selected, and its waits so far
        self.shapes: dict[str, Shape] = {}
        self.addresses: dict[str, int] = {}
        self.own_graphs: set[tuple[Any, ...]] = set()
        self.complete = self.settled = False
        self.changes = 0

    def check_alive(self) -> Any:
        engine = self.engine_reference()
        if engine is None:
            raise RuleBroken("a context was used after its engine had been released")
        engine.check_alive()
        return engine

    def refuse(self, reason: str) -> bool:
        self.logger.log(Severity.ERROR, reason)
        return False

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        engine = self.check_alive()
        device = host_device(stream)
        device.check_not_recording("switched the profile on a stream")
        if not 0 <= index < len(engine.profiles):
            return self.refuse(f"Optimization profile index {index} is out of range [0, {len(engine.profiles) - 1}]")
        user = engine.busy.get(index, lambda: None)()
        if user is not None and user is not self:
            return self.refuse(f"Profile {index} has been chosen by another IExecutionContext")
        if self.profile is not None:
            del engine.busy[self.profile]
        engine.busy[index] = weakref.ref(self)
        self.profile = index
        self.switches.append(index)
        self.switched = (device, device.waits)
        self.shapes.clear()
        self.changed(shapes=True)
        return True

    def changed(self, shapes: bool) -> None:
        if any(device.recording is not None for device in HostDevice.streams.values()):
            raise RuleBroken("a context was changed during a capture")
        self.changes += 1
        if shapes:
            self.complete = self.settled = False

    def set_input_shape(self, name: str, shape: Shape) -> bool:
        self.check_alive()
        if self.profile is None:
            raise RuleBroken("no optimization profile was selected")
        if name not in self.engine.inputs:
            return self.refuse(f"{name} is not the name of an input tensor")
        least, _, most = self.engine.profiles[self.profile][name]
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
                if tensor.axes is None:  # of a tensor inside the graph: by computing it
                    self.shapes[name] = self.computed_shapes()[name]
                else:
                    self.shapes[name] = tuple(sizes[axis] if isinstance(axis, str) else axis for axis in tensor.axes)
            self.complete = True
        return missing

    def computed_shapes(self) -> dict[str, Shape]:
        feed = {name: np.zeros(self.shapes[name], tensor.dtype) for name, tensor in self.engine.inputs.items()}
        results = run_wide(self.engine.session, self.engine.outputs, feed)
        return {name: result.shape for name, result in zip(self.engine.outputs, results, strict=True)}

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
            raise RuleBroken("launched before infer_shapes confirmed that all shapes are known")
        if missing := [name for name in self.engine.io if not self.addresses.get(name)]:
            return self.refuse(f"Address is not set for tensor {missing[0]}")
        self.check_order(device)
        allocations = self.check_places(device)
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
        if self.captures_itself:
            self.own_graphs.add((*sorted(self.shapes.items()), *sorted(self.addresses.items())))
        self.settled = True
        device.run(Launch(self, device, allocations))
        return True

    def check_order(self, device: HostDevice) -> None:
        """A profile may be switched with copies on its stream: a launch comes after them, or after a wait for them."""
        assert self.switched is not None
        switched_on, waits = self.switched
        if switched_on is not device and switched_on.waits == waits:
            raise RuleBroken("launched on another stream than the profile was switched on, without waiting for that")

    def check_places(self, device: HostDevice) -> dict[str, int]:
        """The allocation of every tensor."""
        spans, allocations = {}, {}
        for name, tensor in self.engine.io.items():
            size = math.prod(self.shapes[name]) * tensor.dtype.itemsize
            allocations[name] = device.check_place(name, self.addresses[name], size)
            spans[name] = (self.addresses[name], self.addresses[name] + size)
        for name in self.engine.outputs:
            alias = self.engine.aliases.get(name)
            if alias is not None and self.addresses[name] != self.addresses[alias]:
                raise RuleBroken(f"{name} is updated in place, so it must be bound to the address of {alias}")
            for other in spans.keys() - {name, alias}:
                if max(spans[name][0], spans[other][0]) < min(spans[name][1], spans[other][1]):
                    raise RuleBroken(f"{name} overlaps {other}")
        return allocations


def engine_parts(engine: Any) -> Any:
    """What a context and its launches compute with. Not the engine itself: that would keep it alive."""
    names = ("session", "inputs", "outputs", "io", "profiles", "aliases", "write_indices", "digest")
    return SimpleNamespace(**{name: getattr(engine, name) for name in names})

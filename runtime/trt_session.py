"""A TensorRT engine pair as a Session: shapes checked, tensors bound by name, the cache left in place on the GPU."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import RequestError, SessionError
from ..export.bundle import Bundle
from ..export.passport import EngineEntry, EngineTensor, Passport
from ..export.profiles import Range, sizes_from_ranges
from ..model.config import ModelConfig
from .session import Limits, State
from .trt_choice import check_files, check_machine, choose_engine, mend
from .trt_device import CudaDevice, Device, import_tensorrt
from .trt_engine import Engine
from .trt_memory import BatchMemory, DeviceArray, HostBuffer, Shape, TrtState, allocate, largest_shape

RANGE_OF_AXIS = {"B": "batch", "K": "beam", "S": "source", "L": "target", "M": "target"}


class TrtSession(AbstractContextManager["TrtSession"]):
    """Owns the engines and all device memory. A state's memory returns to the session when the state dies.

    Everything happens on one stream, and the host waits for it once per step: for the logits.
    """

    backend = "tensorrt"

    def __init__(self, trt: Any, device: Device, folder: Path, passport: Passport, config: ModelConfig):
        """Opens the engines of `folder`, which were checked against `passport` and this machine before."""
        self.device, self.folder, self.passport, self.config = device, folder, passport, config
        self.precision, self.cache_form = passport.precision, passport.cache_form
        ranges, self.static = passport.ranges, passport.cache_form == "static"
        self.limits = Limits(
            batch=ranges.batch.max,
            beam=ranges.beam.max,
            source=ranges.source.max,
            target=ranges.target.max,
            slots=passport.slots if self.static else None,
        )
        self.most = sizes_from_ranges(ranges, passport.cache_form, passport.slots)[-1]
        self.engines: dict[str, Engine] = {}
        self.pool: list[BatchMemory] = []
        try:
            for name, entry in passport.engines.items():
                step = name == "decoder_step"
                self.engines[name] = Engine(
                    trt,
                    device,
                    folder / entry.file,
                    entry,
                    repeats=step and self.static,
                    grows=step and not self.static,
                    refused=mend(folder, passport),
                )
            self.allocate_shared()
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_bundle(cls, bundle: Bundle, precision: str, engine: str | None = None) -> TrtSession:
        folder, passport = choose_engine(bundle, precision, engine)
        check_files(bundle, folder, passport)
        device = CudaDevice()
        trt = import_tensorrt(passport.flavour)
        check_machine(folder, passport, trt, device)
        return cls(trt, device, folder, passport, bundle.config)

    def allocate_shared(self) -> None:
        """Memory that no state keeps: what every call sends, and the logits it gets."""
        encoder, step = self.passport.engines["encoder"], self.passport.engines["decoder_step"]
        from_encoder = {t.name for t in encoder.outputs} | {"source_mask"}
        self.cache_inputs = [t for t in step.inputs if t.name.startswith("self_") and t.name != "self_mask"]
        in_cache = {t.name for t in self.cache_inputs}
        self.sent = [t for t in step.inputs if t.name not in from_encoder | in_cache]
        self.kept = [*encoder.outputs, next(t for t in encoder.inputs if t.name == "source_mask")]
        self.logits = next(t for t in step.outputs if t.name == "logits")

        shared = [*(t for t in encoder.inputs if t.name != "source_mask"), *self.sent, self.logits]
        self.shared = {t.name: allocate(self.device, t, largest_shape(t, self.most)) for t in shared}
        self.host = {t.name: HostBuffer(self.device, t, self.most) for t in (*encoder.inputs, *self.sent, self.logits)}

    def encode(self, source_ids: np.ndarray, source_mask: np.ndarray) -> TrtState:
        engine = self.open_engine("encoder")
        values = {"source_ids": source_ids, "source_mask": source_mask}
        sizes = self.check("encoder", {}, values)
        check_span("source_ids", source_ids, self.config.source_vocab)
        memory = self.pool.pop() if self.pool else self.new_memory()
        state = TrtState(memory, self.pool)
        arrays = {
            "source_ids": self.host["source_ids"].send(source_ids, self.shared["source_ids"]),
            "source_mask": self.host["source_mask"].send(source_mask, memory.kept["source_mask"]),
        }
        for tensor in engine.entry.outputs:
            arrays[tensor.name] = memory.kept[tensor.name].reshaped(largest_shape(tensor, sizes))
        engine.run(arrays)
        self.device.synchronize()  # the host buffers are free again for the next batch
        state.update({tensor.name: arrays[tensor.name] for tensor in self.kept})
        return state

    def new_memory(self) -> BatchMemory:
        return BatchMemory(self.device, self.kept, self.cache_inputs, self.most, self.cache_form)

    def reserve(self, state: State, slots: int) -> None:
        self.open_engine("decoder_step")
        if self.static and slots != self.passport.slots:
            raise RequestError(
                f"a cache of {slots} slots was asked for, this engine's is fixed at {self.passport.slots}; "
                + mend(self.folder, self.passport, target=self.widened("L", slots))
            )
        if not self.static and not 0 <= slots <= self.most["L"]:
            raise RequestError(
                f"a cache of {slots} slots was asked for, this engine takes 0 to {self.most['L']}; "
                + mend(self.folder, self.passport, target=self.widened("L", slots))
            )
        memory: BatchMemory = state_memory(state)
        sizes = {"B": batch_of(state), "L": slots}
        empty = {t.name: memory.now[t.name].reshaped(largest_shape(t, sizes)) for t in self.cache_inputs}
        for array in empty.values():
            self.device.run(array.tensor.zero_)
        state.update(empty)

    def step(
        self, state: State, tokens: np.ndarray, position: np.ndarray, write_index: np.ndarray, self_mask: np.ndarray
    ) -> np.ndarray:
        engine = self.open_engine("decoder_step")
        if self.cache_inputs[0].name not in state:
            raise RequestError("the state has no cache yet; reserve one before the first step")
        given = {"tokens": tokens, "position": position, "write_index": write_index, "self_mask": self_mask}
        values = {t.name: given[t.name] for t in self.sent}
        sizes = self.check("decoder_step", state, values)
        check_span("tokens", tokens, self.config.target_vocab)
        check_span("position", position, self.config.max_target)
        if self.static:  # TensorRT does not look where it writes
            check_span("write_index", write_index, self.passport.slots - sizes["K"] + 1)

        arrays = dict(state)
        for name, value in values.items():
            arrays[name] = self.host[name].send(value, self.shared[name])
        memory = state_memory(state)
        written = {}
        for tensor in engine.entry.outputs:
            shape = largest_shape(tensor, sizes)
            cache_name = tensor.name.removeprefix("new_")
            if cache_name in memory.next:
                arrays[tensor.name] = written[cache_name] = memory.next[cache_name].reshaped(shape)
        logits = arrays["logits"] = self.shared["logits"].reshaped(largest_shape(self.logits, sizes))
        engine.run(arrays)
        fetched = self.host["logits"].fetch(logits)
        self.device.synchronize()
        memory.swap()
        state.update(written)
        return fetched

    def select(self, state: State, rows: np.ndarray | None, slots: np.ndarray | None) -> None:
        self.open_engine("decoder_step")
        if rows is None and slots is None:
            return
        batch = batch_of(state)
        kept_rows = np.arange(batch) if rows is None else np.asarray(rows, dtype=np.int64)
        check_span("rows", kept_rows, batch)
        if len(kept_rows) > self.passport.ranges.batch.max:
            raise RequestError(f"{len(kept_rows)} rows selected, this engine takes {self.passport.ranges.batch.max}")
        cached = {t.name for t in self.cache_inputs}
        if slots is not None:
            self.check_slots(state, len(kept_rows), slots)
        row_index = torch.from_numpy(kept_rows)
        slot_index = None if slots is None else torch.from_numpy(np.asarray(slots, dtype=np.int64))
        for name, array in state.items():
            index = slot_index if name in cached else None
            if index is None and rows is None:
                continue
            state[name] = self.gather(array, row_index, index)

    def gather(self, array: DeviceArray, rows: torch.Tensor, slots: torch.Tensor | None) -> DeviceArray:
        """Queues array[rows], or array[rows, :, slots], to the front of the same memory. A static cache keeps its
        length: behind the slots that were chosen it is zero."""
        shape = (len(rows), *array.shape[1:])
        if slots is not None and not self.static:
            shape = (len(rows), array.shape[1], slots.shape[1], array.shape[3])
        result = array.reshaped(shape)

        def work() -> None:
            old, new = array.tensor, result.tensor
            chosen = rows.to(old.device)
            if slots is None:
                new.copy_(old.index_select(0, chosen))
                return
            heads = torch.arange(old.shape[1], device=old.device)
            picked = old[chosen[:, None, None], heads[None, :, None], slots.to(old.device)[:, None, :]]  # [B', H, L', E]
            new[:, :, : slots.shape[1]].copy_(picked)
            new[:, :, slots.shape[1] :].zero_()

        self.device.run(work)
        return result

    def tensor(self, state: State, name: str) -> np.ndarray:
        self.open_engine("encoder")
        array: DeviceArray = state[name]
        dtype = torch.float32 if array.dtype == torch.bfloat16 else array.dtype  # numpy has no bfloat16
        copy = torch.empty(array.shape, dtype=dtype)
        self.device.run(lambda: copy.copy_(array.tensor))
        self.device.synchronize()
        return copy.numpy()

    def close(self) -> None:
        """Ends the session, whose states are then dead too. May be called twice."""
        for engine in self.engines.values():
            engine.close()
        self.engines.clear()
        self.pool.clear()
        self.shared: dict[str, DeviceArray] = {}
        self.host: dict[str, HostBuffer] = {}

    def __exit__(self, *exception: object) -> None:
        self.close()

    def open_engine(self, name: str) -> Engine:
        if not self.engines:
            raise SessionError("the session is closed; open it again with open_session")
        return self.engines[name]

    def check(self, graph: str, state: State, values: dict[str, np.ndarray]) -> dict[str, int]:
        """The size of every axis of a call, after its inputs were held against each other and the engine's ranges.

        TensorRT itself does not notice when two inputs disagree in their batch.
        """
        entry = self.passport.engines[graph]
        shapes: dict[str, Shape] = {}
        for tensor in entry.inputs:
            if tensor.name in values:
                check_dtype(graph, tensor, values[tensor.name])
                shapes[tensor.name] = values[tensor.name].shape
            else:
                shapes[tensor.name] = state[tensor.name].shape
        sizes = sizes_of(graph, entry, shapes)
        self.check_ranges(graph, entry, shapes)
        if not self.static and graph == "decoder_step" and sizes["M"] != sizes["L"] + sizes["K"]:
            raise RequestError(
                f"{graph} input self_mask has shape {list(shapes['self_mask'])}, expected its last axis to be "
                f"{sizes['L']} cached slots and {sizes['K']} new ones"
            )
        return sizes

    def check_ranges(self, graph: str, entry: EngineEntry, shapes: dict[str, Shape]) -> None:
        """Refuses shapes outside the ranges the engine was built for, naming the first and the build that takes all."""
        wrong: dict[str, int] = {}
        first = ""
        for tensor in entry.inputs:
            shape, least, most = shapes[tensor.name], tensor.shapes[0], tensor.shapes[-1]
            for axis, size, low, high in zip(tensor.axes, shape, least, most, strict=True):
                if low <= size <= high:
                    continue
                first = first or (
                    f"{graph} input {tensor.name} has shape {list(shape)}, "
                    f"this engine takes {list(least)} to {list(most)}"
                )
                if isinstance(axis, str):
                    wrong[axis] = size
        if first:
            ranges = {RANGE_OF_AXIS[axis]: self.widened(axis, size) for axis, size in wrong.items()}
            raise RequestError(f"{first}; {mend(self.folder, self.passport, **ranges)}")

    def widened(self, axis: str, size: int) -> Range:
        """The passport's range for an axis, stretched to take a size. The cache is as long as all beams of all steps."""
        ranges = self.passport.ranges
        r: Range = getattr(ranges, RANGE_OF_AXIS[axis])
        if axis in "LM":
            size = max(math.ceil(size / ranges.beam.max) + (axis == "L" and not self.static), 1)
        return Range(min(r.min, size), min(r.opt, r.max), max(r.max, size))

    def check_slots(self, state: State, batch: int, slots: np.ndarray) -> None:
        length = state[self.cache_inputs[0].name].shape[2]
        if slots.ndim != 2 or slots.shape[0] != batch or slots.shape[1] > length:
            raise RequestError(f"slots have shape {list(slots.shape)}, expected [{batch}, at most {length}]")
        check_span("slots", slots, length)


def state_memory(state: State) -> BatchMemory:
    assert isinstance(state, TrtState), "a state of another session"
    return state.memory


def batch_of(state: State) -> int:
    return state["source_mask"].shape[0]


def sizes_of(graph: str, entry: EngineEntry, shapes: dict[str, Shape]) -> dict[str, int]:
    """The size of every letter of the contract, which all inputs must agree on; M too where only L has it."""
    sizes: dict[str, int] = {}
    for tensor in entry.inputs:
        shape = shapes[tensor.name]
        expected = tuple(axis if isinstance(axis, int) else sizes.get(axis, axis) for axis in tensor.axes)
        agrees = len(shape) == len(expected) and all(
            isinstance(want, str) or want == have for want, have in zip(expected, shape, strict=True)
        )
        if not agrees:
            wanted = ", ".join(map(str, expected))
            raise RequestError(f"{graph} input {tensor.name} has shape {list(shape)}, expected [{wanted}] here")
        sizes.update((axis, size) for axis, size in zip(tensor.axes, shape, strict=True) if isinstance(axis, str))
    return sizes


def check_dtype(graph: str, tensor: EngineTensor, values: np.ndarray) -> None:
    if not np.can_cast(values.dtype, tensor.dtype, "same_kind"):
        raise RequestError(f"{graph} input {tensor.name} is {values.dtype}, expected {tensor.dtype}")


def check_span(name: str, values: np.ndarray, end: int) -> None:
    """Numbers that the GPU uses as places in memory must be places: there, nothing stops a wrong one."""
    if values.size and not (0 <= values.min() and values.max() < end):
        raise RequestError(f"{name} holds {values.min()} to {values.max()}, expected 0 to {end - 1}")

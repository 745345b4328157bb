"""TensorRT engines as a session: shapes are checked, tensors bound by name, the cache stays in place on the GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from seq2engine.common.tensorrt_module import load_tensorrt
from seq2engine.errors import RequestError, SessionError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.artifact.passport import Passport
from seq2engine.export.artifact.profiles import Workload
from seq2engine.model.config import ModelConfig

from ..backends import SessionOptions
from ..search.step_output import StepOutput
from ..session import EVERYTHING, Limits, Session, StepForm
from .device import CudaDevice, Device
from .engine import Binding, Engine
from .memory import (
    BatchMemory,
    DeviceArray,
    Parcel,
    Post,
    Shape,
    Transfer,
    TrtState,
    allocate,
    clear,
    gather_rows,
    gather_slots,
    put_rows,
    room_for,
    shape_of,
    staged,
)
from .selection import check_files, check_machine, choose_engine, fix, runs_on
from .shapes import call_sizes, check_dtypes, check_places, check_reserved, profiles_of


@dataclass(frozen=True)
class StepPlan:
    """What steps of one state have in common while shapes stay, so that a step copies only its inputs and logits."""

    signature: tuple[tuple[Shape, np.dtype], ...]  # of the values sent
    beams: int
    sent: Parcel
    binding: Binding
    logits: Transfer
    written: dict[str, DeviceArray]  # the cache afterwards


class TrtSession(Session):
    """Owns the engines and all device memory. A state's memory returns to the session when the state dies.

    Everything runs on one stream, and the host waits for it once per step: for the logits.
    """

    backend = "tensorrt"

    def __init__(self, trt: Any, device: Device, folder: Path, passport: Passport, config: ModelConfig):
        """Opens the engines of `folder`, which were checked against `passport` and this machine before."""
        self.device, self.folder, self.passport, self.config = device, folder, passport, config
        self.precision, self.cache_form = passport.precision, passport.cache_form
        self.static = passport.cache_form == "static"
        self.profiles = profiles_of(passport)
        ranges = [profile.ranges for profile in self.profiles]
        self.fewest_rows, self.most_rows = min(r.batch.min for r in ranges), max(r.batch.max for r in ranges)
        self.limits = Limits(
            batch=self.most_rows,
            beam=max(r.beam.max for r in ranges),
            source=max(r.source.max for r in ranges),
            target=max(r.target.max for r in ranges),
            slots=passport.slots if self.static else None,
            # A decode with fewer beams is padded: what its spare beams write, the next step overwrites. A growing cache
            # would keep it.
            least_beams=passport.ranges.beam.min if self.static else 1,
        )
        self.most = [profile.most for profile in self.profiles]
        encoder, step = passport.engines["encoder"], passport.engines["decoder_step"]
        self.kept = [*encoder.outputs, next(t for t in encoder.inputs if t.name == "source_mask")]
        self.cache = [t for t in step.inputs if f"new_{t.name}" in {output.name for output in step.outputs}]
        in_state = {t.name for t in (*self.kept, *self.cache)}
        self.sent = [t for t in step.inputs if t.name not in in_state]
        self.logits = next(t for t in step.outputs if t.name == "logits")

        self.pool: list[BatchMemory] = []  # of states that died
        self.engines: dict[str, Engine] = {}
        self.allocate_shared()
        try:
            for name, entry in passport.engines.items():
                repeats, grows = (self.static, not self.static) if name == "decoder_step" else (False, False)
                self.engines[name] = Engine(
                    trt, device, folder / entry.file, entry, self.profiles, repeats, grows, fix(folder, passport)
                )
        except BaseException:
            self.close()
            raise

    def allocate_shared(self) -> None:
        """Memory on both sides for tensors that are copied in every call and that no state keeps."""
        inputs = {"encoder": self.passport.engines["encoder"].inputs, "decoder_step": self.sent}
        self.posts = {graph: Post(self.device, tensors, self.most) for graph, tensors in inputs.items()}
        self.logits_memory = [allocate(self.device, self.logits, self.most)]
        self.logits_staging = self.device.staging(room_for(self.logits, self.most))

    @classmethod
    def from_bundle(
        cls, bundle: Bundle, precision: str, engine: str | None = None, workload: Workload | None = None
    ) -> TrtSession:
        """Opens the engines of a bundle; everything that files show is checked before a GPU is needed."""
        folder, passport = choose_engine(bundle, precision, engine, workload)
        check_files(bundle, folder, passport)
        device = CudaDevice()
        if engine is None and not runs_on(passport, device):  # there may be another one for this GPU
            folder, passport = choose_engine(bundle, precision, None, workload, lambda one: runs_on(one, device))
            check_files(bundle, folder, passport)
        trt = load_tensorrt(passport.flavour)
        check_machine(folder, passport, trt, device)
        return cls(trt, device, folder, passport, bundle.config)

    def encode(self, source_ids: np.ndarray, source_mask: np.ndarray) -> TrtState:
        engine = self.opened("encoder")
        values = {"source_ids": source_ids, "source_mask": source_mask}
        check_dtypes("encoder", engine.entry, values)
        shapes = {name: value.shape for name, value in values.items()}
        sizes, profile = call_sizes(self.folder, self.passport, "encoder", shapes)
        check_places("source_ids", source_ids, self.config.source_vocab)

        memory = self.pool.pop() if self.pool else self.new_memory()
        state = TrtState(memory, self.pool, rows=sizes["B"])
        for slab in memory.kept:
            state.update(slab.arrays(sizes))
        parcel = self.posts["encoder"].parcel(shapes)
        for name, value in values.items():
            np.copyto(parcel.values[name], value)
        arrived, kept = parcel.arrays["source_mask"].tensor, state["source_mask"].tensor

        def keep_mask() -> None:
            kept.copy_(arrived)

        arrays = {**state, **parcel.arrays}
        engine.run(engine.binding(profile, arrays, before=parcel.to_device, after=keep_mask))
        self.device.synchronize()  # the host side is free again for the next batch
        return state

    def new_memory(self) -> BatchMemory:
        return BatchMemory(self.device, self.kept, self.cache, self.most, self.cache_form)

    def reserve(self, state: TrtState, slots: int, form: StepForm = EVERYTHING) -> None:
        self.opened("decoder_step")
        if self.static and self.passport.slots - self.limits.least_beams < slots < self.passport.slots:
            slots = self.passport.slots
        check_reserved(self.folder, self.passport, slots)
        for slab in state.memory.cache[0]:
            state.update(slab.arrays({"B": physical_rows(state), "L": slots}))
            clear(self.device, slab, state[slab.names[0]].shape)
        state.plan, state.form = None, form

    def step(
        self, state: TrtState, tokens: np.ndarray, position: np.ndarray, write_index: np.ndarray, self_mask: np.ndarray
    ) -> StepOutput:
        engine = self.opened("decoder_step")
        given = {"tokens": tokens, "position": position, "write_index": write_index, "self_mask": self_mask}
        values = {t.name: given[t.name] for t in self.sent}
        plan: StepPlan | None = state.plan
        if plan is None or plan.signature != signature_of(values.values()):
            plan = state.plan = self.plan_step(engine, state, values)
        check_places("tokens", tokens, self.config.target_vocab)
        check_places("position", position, self.config.max_target)
        if self.static:
            check_places("write_index", write_index, self.passport.slots - plan.beams + 1)

        for name, value in values.items():
            fill(plan.sent.values[name], value)
        engine.run(plan.binding)
        self.device.synchronize()
        if not self.static:
            state.update(plan.written)
            state.plan = None  # the next step has other shapes and the buffers change places
        logits = plan.logits.values[: state.rows, : tokens.shape[1]]
        shortlist = state.form.shortlist  # an engine computes all logits, whatever becomes of them
        return StepOutput(logits if shortlist is None else logits[..., shortlist.ids], shortlist=shortlist)

    def plan_step(self, engine: Engine, state: TrtState, values: Mapping[str, np.ndarray]) -> StepPlan:
        if self.cache[0].name not in state:
            raise RequestError("this state has no cache yet; reserve one before the first step")
        check_dtypes("decoder_step", engine.entry, values)
        rows = physical_rows(state)
        shapes = {name: (state.rows, *array.shape[1:]) for name, array in state.items()}
        padded = {name: self.padded_shape(name, value.shape) for name, value in values.items()}
        shapes.update(padded)
        sizes, profile = call_sizes(self.folder, self.passport, "decoder_step", shapes, rows)

        sent = self.posts["decoder_step"].parcel({name: (rows, *shape[1:]) for name, shape in padded.items()})
        device_logits = self.logits_memory[0].reshaped(shape_of(self.logits, sizes))
        logits = Transfer(self.logits_staging, device_logits)
        written: dict[str, DeviceArray] = {}
        for slab in state.memory.beside(state[self.cache[0].name]):
            written |= slab.arrays({**sizes, "L": sizes.get("M", sizes["L"])})
        made = {f"new_{name}": array for name, array in written.items()}
        arrays = {**state, **sent.arrays, **made, "logits": device_logits}
        binding = engine.binding(profile, arrays, before=sent.to_device, after=logits.to_host)
        return StepPlan(signature_of(values.values()), sizes["K"], sent, binding, logits, written)

    def padded_shape(self, name: str, shape: Shape) -> Shape:
        """The shape [B,K] or [B,K,L] of a step's input with as many beams as the engine has at least."""
        spare = self.limits.least_beams - shape[1] if len(shape) > 1 else 0
        if spare <= 0:
            return shape
        slots = [self.passport.slots if size == self.passport.slots - spare else size for size in shape[2:]]
        return (shape[0], self.limits.least_beams, *slots)

    def select(self, state: TrtState, rows: np.ndarray | None, slots: np.ndarray | None) -> None:
        self.opened("decoder_step")
        kept = np.arange(state.rows) if rows is None else rows
        check_places("rows", kept, state.rows)
        if len(kept) > self.most_rows:
            raise RequestError(f"{len(kept)} rows were selected, this engine takes {self.most_rows}")
        if slots is not None:
            length = state[self.cache[0].name].shape[2]
            if slots.ndim != 2 or len(slots) != len(kept) or slots.shape[1] > length:
                raise RequestError(f"slots have shape {list(slots.shape)}, expected [{len(kept)}, up to {length}]")
            check_places("slots", slots, length)
        count = self.rows_for(len(kept), physical_rows(state)) if self.static else len(kept)
        row_index = staged(self.device, padded_rows(kept, count))
        slot_index = None if slots is None else staged(self.device, padded_rows(slots, count))
        reserved = state.get(self.cache[0].name)
        cached = [] if reserved is None else state.memory.holding(reserved)
        for slab in (*state.memory.kept, *cached):
            shape = state[slab.names[0]].shape
            if slot_index is not None and slab in cached:
                length = shape[2] if self.static else slot_index.shape[1]
                shape = gather_slots(self.device, slab, shape, row_index, slot_index, length)
            elif rows is not None:
                shape = gather_rows(self.device, slab, shape, row_index)
            state.update((name, slab.array(name, shape)) for name in slab.names)
        state.rows = len(kept)
        state.plan = None

    def rows_for(self, staying: int, now: int) -> int:
        """How many rows to go on with: the current ones until half of them are padding, so that the shapes of a decode,
        and with them its CUDA graph, change seldom while sources leave it."""
        while staying <= now // 2 and now // 2 >= self.fewest_rows:
            now //= 2
        return max(now, staying)

    def replace(self, state: TrtState, rows: np.ndarray, newcomers: TrtState, width: int) -> None:
        self.opened("decoder_step")
        check_places("rows", rows, state.rows)
        index = staged(self.device, rows)
        for slab, coming in zip(state.memory.kept, newcomers.memory.kept, strict=True):
            name = slab.names[0]
            shape = put_rows(self.device, slab, state[name].shape, index, coming, newcomers[name].shape, width)
            state.update((name, slab.array(name, shape)) for name in slab.names)
        state.plan = None

    def tensor(self, state: TrtState, name: str) -> np.ndarray:
        self.opened("decoder_step")
        array = state[name]
        dtype = torch.float32 if array.dtype == torch.bfloat16 else array.dtype  # numpy has no bfloat16
        copy = torch.empty(array.shape, dtype=dtype)
        self.device.run(lambda: copy.copy_(array.tensor))
        self.device.synchronize()
        return copy.numpy()[: state.rows]

    def opened(self, graph: str) -> Engine:
        if graph not in self.engines:
            raise SessionError("this session is closed; open it again with: open_session")
        return self.engines[graph]

    def close(self) -> None:
        """Ends the session, and with it the use of its states. A second call does nothing."""
        try:
            self.device.synchronize()  # nothing may be released while the GPU still works with it
        finally:
            for engine in self.engines.values():
                engine.close()
            self.engines.clear()
            self.pool.clear()
            self.posts.clear()
            self.logits_memory.clear()

    def __exit__(self, *exception: object) -> None:
        self.close()


def fill(window: np.ndarray, value: np.ndarray) -> None:
    """Copies an input of a step into the engine's memory. Padding rows and beams get token 0 at position 0 with an
    all-true mask; in the masks of all others, slots behind the value's last are false."""
    padding = window.dtype == bool
    if window.shape != value.shape:
        window[...] = padding
        if value.ndim == 3:
            window[: value.shape[0], : value.shape[1]] = False
        window = window[tuple(slice(size) for size in value.shape)]
    np.copyto(window, value)


def signature_of(values: Iterable[np.ndarray]) -> tuple[tuple[Shape, np.dtype], ...]:
    return tuple((value.shape, value.dtype) for value in values)


def physical_rows(state: TrtState) -> int:
    """Rows of its tensors."""
    return state["source_mask"].shape[0]


def padded_rows(index: np.ndarray, count: int) -> np.ndarray:
    """Indices [B] or [B,L] for `count` rows: padding rows repeat the last."""
    return index[np.minimum(np.arange(count), len(index) - 1)] if len(index) else index


def session_from_bundle(bundle: Bundle, precision: str, options: SessionOptions) -> Session:
    """The session of a bundle that the options ask for."""
    return TrtSession.from_bundle(bundle, precision, options.engine, options.workload)

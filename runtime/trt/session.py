"""TensorRT engines as a session: shapes are checked, tensors bound by name, the cache stays in place on the GPU."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from seq2engine.common.tensorrt_module import load_tensorrt
from seq2engine.errors import RequestError, SessionError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.artifact.passport import Passport
from seq2engine.export.artifact.profiles import ShapeRanges, Workload
from seq2engine.export.artifact.transfers import TOKENS_PER_WAIT
from seq2engine.model.config import ModelConfig

from ..backends import SessionOptions
from ..fitting import fitted
from ..search.ahead.greedy_plan import GreedyPlan, ahead_columns, outputs_of
from ..search.step_output import StepOutput
from ..session import EVERYTHING, Limits, RunAhead, Session, StepForm
from .ahead import SCORED, AheadMemory, AheadPlan, planned_ahead
from .device import CudaDevice, Device, Memory
from .engine import Engine
from .launches import Launches, Run
from .memory import (
    BatchMemory,
    DeviceArray,
    ParcelMemory,
    Shape,
    Slab,
    TrtState,
    physical_rows,
    read_values,
    room_for_moves,
)
from .moves import clear, gather_rows, padded_slots, put_rows, rows_to_continue_with, set_length
from .selection import Opening, check_files, check_machine, choose_engine, fix, larger_build, runs_on
from .shapes import Profile, call_sizes, check_dtypes, check_places, check_reserved, profile_for, profiles_of
from .step_plan import MASK, MASKS, SLOT_POSITION, StepMemory, StepPlan, planned, signature_of

# Engines whose shapes and addresses stay the same for many calls while the cache is static, so that graphs pay.
REPEATING = ("decoder_step", "candidates", "tree_mask", "next_greedy", "next_greedy_unscored")


class TrtSession(Session):
    """Owns the engines and all device memory. A state's memory returns to the session when the state dies.

    Everything runs on one stream. The host waits for it once per step, for candidates or logits; in greedy search once
    for `tokens_per_wait` tokens.
    """

    backend = "tensorrt"

    def __init__(
        self,
        trt: Any,
        device: Device,
        folder: Path,
        passport: Passport,
        config: ModelConfig,
        tokens_per_wait: int = TOKENS_PER_WAIT,
    ):
        """Opens the engines of `folder`, which were checked against `passport` and this machine before."""
        self.device, self.folder, self.passport, self.config = device, folder, passport, config
        self.precision, self.cache_form = passport.precision, passport.cache_form
        self.static = self.keeps_mask = passport.cache_form == "static"
        self.profiles = profiles_of(passport)
        ranges = [profile.ranges for profile in self.profiles]
        self.fewest_rows, self.most_rows = min(r.batch.min for r in ranges), max(r.batch.max for r in ranges)
        self.fewest_columns = 0 if config.takes_features else min(r.source.min for r in ranges)
        self.limits = limits_of(folder, passport, ranges)
        self.most = [profile.most for profile in self.profiles]
        encoder, step = passport.engines["encoder"], passport.engines["decoder_step"]
        self.kept = [*encoder.outputs, next(t for t in encoder.inputs if t.name == "source_mask")]
        self.cache = [t for t in step.inputs if f"new_{t.name}" in {output.name for output in step.outputs}]
        in_state = {t.name for t in (*self.kept, *self.cache)}
        self.sent = [t for t in step.inputs if t.name not in in_state]

        self.pool: list[BatchMemory] = []  # of states that died
        self.recent: list[Launches] = []
        self.engines: dict[str, Engine] = {}
        self.posts: dict[str, ParcelMemory] = {}
        self.step_memory: list[StepMemory] = []
        self.ahead_memory: list[AheadMemory] = []
        self.spare: list[Memory] = []  # for moves
        self.indices_sent = False
        try:
            self.open_engines(trt)
            self.allocate_shared()
        except BaseException:
            self.close()
            raise
        if self.ahead_memory and tokens_per_wait > 1:
            candidates = passport.reductions[SCORED].candidates
            self.ahead = RunAhead(tokens_per_wait, candidates, self.ahead_memory[0].length)

    def open_engines(self, trt: Any) -> None:
        for name, entry in self.passport.engines.items():
            repeats, grows = self.static and name in REPEATING, not self.static and name == "decoder_step"
            file, remedy = self.folder / entry.file, fix(self.folder, self.passport)
            self.engines[name] = Engine(trt, self.device, file, entry, self.profiles, repeats, grows, remedy)

    def allocate_shared(self) -> None:
        """Memory on both sides for tensors that are copied in every call and that no state keeps."""
        entries = self.passport.engines
        inputs = {
            "encoder": entries["encoder"].inputs,
            "gather_slots": [t for t in entries["gather_slots"].inputs if t.name != "cache"],
        }
        self.posts = {graph: ParcelMemory(self.device, tensors, self.most) for graph, tensors in inputs.items()}
        self.step_memory = [StepMemory(self.device, entries, self.sent, self.most)]
        self.ahead_memory = [AheadMemory(self.device, entries, self.most)] if SCORED in entries else []
        self.spare = [self.device.allocate(room_for_moves([*self.kept, *self.cache], self.most))]

    @classmethod
    def from_bundle(
        cls,
        bundle: Bundle,
        precision: str,
        engine: str | None = None,
        workload: Workload | None = None,
        tokens_per_wait: int = TOKENS_PER_WAIT,
    ) -> TrtSession:
        """Opens the engines of a bundle."""
        found = engine_on_this_machine(bundle, precision, engine, workload)
        return cls(found.trt, found.device, found.folder, found.passport, bundle.config, tokens_per_wait)

    def encode(self, source: np.ndarray, source_mask: np.ndarray) -> TrtState:
        engine = self.opened("encoder")
        if source.shape[1] == source_mask.shape[1] < self.fewest_columns:
            source, source_mask = (fitted(given, 1, self.fewest_columns) for given in (source, source_mask))
        values = {engine.entry.inputs[0].name: source, "source_mask": source_mask}
        check_dtypes("encoder", engine.entry, values)
        shapes = {name: value.shape for name, value in values.items()}
        sizes, profile = call_sizes(self.folder, self.passport, "encoder", shapes)
        if not self.config.takes_features:
            check_places("source_ids", source, self.config.source_vocab)

        memory = self.pool.pop() if self.pool else self.new_memory()
        state = TrtState(memory, self.pool, rows=sizes["B"])
        for slab in memory.kept:
            state.update(slab.arrays(sizes))
        parcel = self.posts["encoder"].parcel(shapes)
        for name, value in values.items():
            np.copyto(parcel.values[name], value)
        run = Run(engine, engine.binding(profile, {**state, **parcel.arrays}))
        Launches(self.device, [parcel.to_device, run])()
        arrived = parcel.arrays["source_mask"]
        self.device.copy(state["source_mask"].memory, arrived.memory, arrived.bytes)
        self.wait()  # the host side is free again for the next batch
        return state

    def new_memory(self) -> BatchMemory:
        masks = [t for t in self.sent if t.name in MASKS]
        return BatchMemory(self.device, self.kept, self.cache, masks, self.most, self.cache_form)

    def reserve(self, state: TrtState, slots: int, form: StepForm = EVERYTHING) -> None:
        self.opened("decoder_step")
        if self.static and self.passport.slots - self.limits.least_beams < slots < self.passport.slots:
            slots = self.passport.slots
        check_reserved(self.folder, self.passport, slots)
        for slab in state.memory.cache[0]:
            state.update(slab.arrays({"B": physical_rows(state), "L": slots}))
            clear(self.device, slab, state[slab.names[0]].shape)
        state.moved()
        state.form = form

    def descend(self, state: TrtState, parents: np.ndarray) -> None:
        state.parents = parents

    def step(
        self,
        state: TrtState,
        tokens: np.ndarray,
        position: np.ndarray,
        write_index: np.ndarray,
        self_mask: np.ndarray,
        slot_position: np.ndarray | None = None,
    ) -> StepOutput:
        self.opened("decoder_step")
        parents, state.parents = state.parents, None
        given = {"tokens": tokens, "position": position, "write_index": write_index, MASK: self_mask}
        given |= {} if slot_position is None else {SLOT_POSITION: slot_position}
        values = {t.name: given[t.name] for t in self.sent}
        plan: StepPlan | None = state.plan
        if plan is None or plan.signature != signature_of(values.values()):
            plan = state.plan = self.plan_step(state, values)
        check_places("tokens", tokens, self.config.target_vocab)
        check_places("position", position, self.config.max_target)
        if self.static:
            check_places("write_index", write_index, self.passport.slots - plan.beams + 1)

        mask_shape = plan.mask.arrays[MASK].shape
        plan.queue(values, parents if state.mask_shape == mask_shape else None)
        state.steps, state.mask_shape = state.steps + 1, mask_shape if self.static else None
        self.wait()
        if not self.static:
            state.update(plan.written)
            state.plan = None  # the next step has other shapes and the buffers change places
        return plan.output(state, tokens.shape[1], self.wait)

    def plan_step(self, state: TrtState, values: Mapping[str, np.ndarray]) -> StepPlan:
        check_dtypes("decoder_step", self.engines["decoder_step"].entry, values)
        padded = {name: self.padded_shape(name, value.shape) for name, value in values.items()}
        sizes, profile = self.sizes_of_step(state, padded)
        written: dict[str, DeviceArray] = {}
        for slab in state.memory.beside(state[self.cache[0].name]):
            written |= slab.arrays({**sizes, "L": sizes.get("M", sizes["L"])})
        signature = signature_of(values.values())
        plan = planned(self.step_memory[0], self.engines, profile, state, sizes, written, signature)
        plan.launches.update({follows: self.known(launches) for follows, launches in plan.launches.items()})
        return plan

    def sizes_of_step(self, state: TrtState, sent: Mapping[str, Shape]) -> tuple[dict[str, int], Profile]:
        """The sizes of the contract's letters in a step that is sent inputs of these shapes, and its profile."""
        if self.cache[0].name not in state:
            raise RequestError("this state has no cache yet; reserve one before the first step")
        shapes = {name: (state.rows, *array.shape[1:]) for name, array in state.items()}
        return call_sizes(self.folder, self.passport, "decoder_step", {**shapes, **sent}, physical_rows(state))

    def known(self, launches: Launches) -> Launches:
        """The same launches as before, if they are among the latest: with the CUDA graph that was captured of them."""
        for one in self.recent:
            if one.key == launches.key:
                return one
        self.recent = [*self.recent[-7:], launches]
        return launches

    def choose(
        self, state: TrtState, tokens: np.ndarray, position: np.ndarray, plan: GreedyPlan, count: int
    ) -> list[StepOutput]:
        self.opened("decoder_step")
        memory = self.ahead_memory[0]
        if state.ahead is None:
            state.ahead = self.plan_ahead(state, memory)
            memory.running = None
        ahead: AheadPlan = state.ahead
        if not memory.is_running(state, plan):
            check_places("tokens", tokens, self.config.target_vocab)
            check_places("position", position, int(plan.limit.max(initial=0)))
            ahead.begin(tokens, position, plan)
        columns = ahead_columns(position, plan.limit, count)
        found = ahead.queue(count, columns)
        state.steps += count
        self.wait()
        memory.running = weakref.ref(state), plan
        return outputs_of(found, columns, state.rows)

    def plan_ahead(self, state: TrtState, memory: AheadMemory) -> AheadPlan:
        beams, slots = self.limits.least_beams, self.passport.slots
        shapes: dict[str, Shape] = {
            "tokens": (state.rows, beams),
            "position": (state.rows,),
            "write_index": (state.rows,),
        }
        shapes |= {MASK: (state.rows, beams, slots)}
        if self.config.relative:
            shapes[SLOT_POSITION] = (state.rows, slots)
        sizes, profile = self.sizes_of_step(state, shapes)
        made = planned_ahead(memory, self.engines, profile, state, sizes, self.step_memory[0].logits)
        return dataclasses.replace(made, launches=self.known(made.launches))

    def padded_shape(self, name: str, shape: Shape) -> Shape:
        """The shape [B,K], [B,K,L] or [B,L] of a step's input with as many beams as the engine has at least.

        A decode with fewer beams knows of fewer slots: the others are its spare beams'.
        """
        axes = next(tensor.axes for tensor in self.sent if tensor.name == name)
        if len(axes) != len(shape):
            return shape  # which is refused later, by name
        beams, slots = self.limits.least_beams, self.passport.slots
        least = {"K": beams, "L": slots if slots - beams < shape[-1] else 0}
        return tuple(max(size, least.get(str(axis), 0)) for axis, size in zip(axes, shape, strict=True))

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
        if rows is not None:
            self.move_rows(state, rows)
        if slots is not None:
            self.move_slots(state, slots)
        state.moved()

    def move_rows(self, state: TrtState, rows: np.ndarray) -> None:
        """Rows of sources that stay come first; rows of some that left may follow as padding."""
        count = rows_to_continue_with(len(rows), physical_rows(state), self.fewest_rows) if self.static else len(rows)
        for slab in self.slabs_of(state):
            shape = state[slab.names[0]].shape
            gather_rows(self.device, slab, shape, rows.tolist(), self.spare[0])
            state.update((name, slab.array(name, (count, *shape[1:]))) for name in slab.names)
        state.rows = len(rows)

    def slabs_of(self, state: TrtState) -> list[Slab]:
        reserved = state.get(self.cache[0].name)
        return [*state.memory.kept, *([] if reserved is None else state.memory.holding(reserved))]

    def move_slots(self, state: TrtState, slots: np.ndarray) -> None:
        """These slots [B,L'] come first. A static cache keeps its length: the slots after them repeat one of them."""
        engine, first = self.opened("gather_slots"), state[self.cache[0].name]
        count, length = physical_rows(state), first.shape[2] if self.static else slots.shape[1]
        index = padded_slots(slots, count, length)
        sizes = {"B": count, "L" if self.static else "M": first.shape[2], "R": count, "T": length}
        profile = profile_for(self.profiles, sizes) or self.profiles[0]
        if self.indices_sent:  # the staging memory is still being read
            self.wait()
        parcel = self.posts["gather_slots"].parcel({"rows": (count,), "slots": index.shape})
        parcel.values["rows"][:], parcel.values["slots"][:] = np.arange(count), index
        parcel.to_device()
        self.indices_sent = True
        there = {name: slab for slab in state.memory.beside(first) for name in slab.names}
        for name in (tensor.name for tensor in self.cache):
            old, shape = state[name], (count, first.shape[1], length, first.shape[3])
            new = DeviceArray(self.spare[0], old.dtype, shape) if self.static else there[name].array(name, shape)
            engine.take(engine.binding(profile, {**parcel.arrays, "cache": old, "new_cache": new}))
            engine.launch()
            if self.static:
                self.device.copy(old.memory, new.memory, new.bytes)
            else:
                state[name] = new

    def replace(self, state: TrtState, rows: np.ndarray, newcomers: TrtState, width: int) -> None:
        self.opened("decoder_step")
        check_places("rows", rows, state.rows)
        width = max(width, self.fewest_columns)
        for slab, coming in zip(state.memory.kept, newcomers.memory.kept, strict=True):
            name = slab.names[0]
            shape = set_length(self.device, slab, state[name].shape, width, self.spare[0])
            put_rows(self.device, slab, shape, rows.tolist(), coming, newcomers[name].shape)
            state.update((name, slab.array(name, shape)) for name in slab.names)
        state.moved(masks=False)

    def tensor(self, state: TrtState, name: str) -> np.ndarray:
        self.opened("decoder_step")
        array = state[name]
        staging = self.device.staging(array.bytes)[: array.bytes]
        self.device.download(staging, array.memory)
        self.wait()
        values = read_values(staging, array.dtype, array.shape)[: state.rows]
        axis = next((kept.axes.index("S") for kept in self.kept if kept.name == name), None)
        if axis is None or name == "source_mask" or array.shape[axis] != self.fewest_columns:
            return values
        asked = np.flatnonzero(self.tensor(state, "source_mask").any(axis=0))[-1] + 1  # without the columns added
        return fitted(values, axis, asked)

    def wait(self) -> None:
        self.device.synchronize()
        self.indices_sent = False

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
            for shared in (self.posts, self.recent, self.step_memory, self.ahead_memory, self.spare):
                shared.clear()

    def __exit__(self, *exception: object) -> None:
        self.close()


def engine_on_this_machine(
    bundle: Bundle, precision: str, engine: str | None = None, workload: Workload | None = None
) -> Opening:
    """Chooses an engine of a bundle; everything that files show is checked before a GPU is needed."""
    folder, passport = choose_engine(bundle, precision, engine, workload)
    check_files(bundle, folder, passport)
    device = CudaDevice()
    if engine is None and not runs_on(passport, device):  # another engine may fit this GPU
        folder, passport = choose_engine(bundle, precision, None, workload, lambda one: runs_on(one, device))
        check_files(bundle, folder, passport)
    trt = load_tensorrt(passport.flavour)
    check_machine(folder, passport, trt, device)
    return Opening(trt, device, folder, passport)


def limits_of(folder: Path, passport: Passport, ranges: Sequence[ShapeRanges]) -> Limits:
    """The largest request that one of the engine's profiles takes."""
    static = passport.cache_form == "static"
    return Limits(
        batch=max(r.batch.max for r in ranges),
        beam=max(r.beam.max for r in ranges),
        source=max(r.source.max for r in ranges),
        target=max(r.target.max for r in ranges),
        slots=passport.slots if static else None,
        # A decode with fewer beams is padded: what its spare beams write, the next step overwrites. A growing cache
        # would keep it.
        least_beams=passport.ranges.beam.min if static else 1,
        larger=partial(larger_build, folder, passport),
    )


def session_from_bundle(bundle: Bundle, precision: str, options: SessionOptions) -> Session:
    """The session of a bundle that the options ask for."""
    tokens = TOKENS_PER_WAIT if options.tokens_per_wait is None else options.tokens_per_wait
    return TrtSession.from_bundle(bundle, precision, options.engine, options.workload, tokens)

"""A TensorRT engine pair as a Session: shapes checked, tensors bound by name, the cache left in place on the GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import RequestError, SessionError
from ..export.bundle import Bundle
from ..export.passport import Passport
from ..export.profiles import sizes_from_ranges
from ..export.trt_module import load_tensorrt
from ..model.config import ModelConfig
from .answers import Answer
from .fitting import fitted
from .session import Limits, Session, State
from .trt_choice import check_files, check_machine, choose_engine, mend
from .trt_device import CudaDevice, Device
from .trt_engine import Binding, Engine
from .trt_memory import BatchMemory, DeviceArray, Shape, SharedMemory, Transfer, TrtState, shape_of
from .trt_shapes import call_sizes, check_dtypes, check_places, check_reserved


@dataclass(frozen=True)
class StepPlan:
    """All that steps of one state have in common while shapes stay, so that a step only moves what is new."""

    signature: tuple[tuple[Shape, np.dtype], ...]  # of the values sent
    beams: int
    sent: list[Transfer]
    binding: Binding
    logits: Transfer
    written: dict[str, DeviceArray]  # the cache afterwards


class TrtSession(Session):
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
        encoder, step = passport.engines["encoder"], passport.engines["decoder_step"]
        self.kept = [*encoder.outputs, next(t for t in encoder.inputs if t.name == "source_mask")]
        self.cache = [t for t in step.inputs if f"new_{t.name}" in {output.name for output in step.outputs}]
        in_state = {t.name for t in (*self.kept, *self.cache)}
        self.sent = [t for t in step.inputs if t.name not in in_state]
        self.logits = next(t for t in step.outputs if t.name == "logits")

        self.pool: list[BatchMemory] = []  # of states that died
        self.shared = SharedMemory(device, [*encoder.inputs, *self.sent, self.logits], self.most)
        self.engines: dict[str, Engine] = {}
        try:
            for name, entry in passport.engines.items():
                repeats, grows = (self.static, not self.static) if name == "decoder_step" else (False, False)
                self.engines[name] = Engine(
                    trt, device, folder / entry.file, entry, repeats, grows, refused=mend(folder, passport)
                )
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_bundle(cls, bundle: Bundle, precision: str, engine: str | None = None) -> TrtSession:
        """Opens an engine pair of a bundle; what can be told from files is told before a GPU is needed."""
        folder, passport = choose_engine(bundle, precision, engine)
        check_files(bundle, folder, passport)
        device = CudaDevice()
        trt = load_tensorrt(passport.flavour)
        check_machine(folder, passport, trt, device)
        return cls(trt, device, folder, passport, bundle.config)

    def encode(self, source_ids: np.ndarray, source_mask: np.ndarray) -> State:
        engine = self.opened("encoder")
        values = {"source_ids": source_ids, "source_mask": source_mask}
        check_dtypes("encoder", engine.entry, values)
        shapes = {name: value.shape for name, value in values.items()}
        sizes = call_sizes(self.folder, self.passport, "encoder", shapes)
        check_places("source_ids", source_ids, self.config.source_vocab)

        memory = self.pool.pop() if self.pool else self.new_memory()
        state = TrtState(memory, self.pool)
        ids, sent_ids = self.shared.transfer("source_ids", source_ids.shape)
        mask = memory.kept["source_mask"].reshaped(source_mask.shape)
        sent_mask = Transfer(self.shared.staging["source_mask"], mask)
        made = {t.name: memory.kept[t.name].reshaped(shape_of(t, sizes)) for t in engine.entry.outputs}
        send(self.device, [sent_ids, sent_mask], [source_ids, source_mask])
        engine.run(engine.binding({"source_ids": ids, "source_mask": mask, **made}))
        self.device.synchronize()  # the host side is free again for the next batch
        state.update(made, source_mask=mask)
        return state

    def new_memory(self) -> BatchMemory:
        return BatchMemory(self.device, self.kept, self.cache, self.most, self.cache_form)

    def reserve(self, state: State, slots: int) -> None:
        self.opened("decoder_step")
        state = own(state)
        check_reserved(self.folder, self.passport, self.cache[0], slots)
        sizes = {"B": batch_of(state), "L": slots}
        empty = {t.name: state.memory.now[t.name].reshaped(shape_of(t, sizes)) for t in self.cache}
        for array in empty.values():
            self.device.run(array.tensor.zero_)
        state.update(empty)
        state.plan = None

    def step(
        self, state: State, tokens: np.ndarray, position: np.ndarray, write_index: np.ndarray, self_mask: np.ndarray
    ) -> Answer:
        engine = self.opened("decoder_step")
        state = own(state)
        given = {"tokens": tokens, "position": position, "write_index": write_index, "self_mask": self_mask}
        values = [given[t.name] for t in self.sent]
        plan: StepPlan | None = state.plan
        if plan is None or plan.signature != signature_of(values):
            plan = state.plan = self.plan_step(engine, state, {t.name: given[t.name] for t in self.sent})
        check_places("tokens", tokens, self.config.target_vocab)
        check_places("position", position, self.config.max_target)
        if self.static:
            check_places("write_index", write_index, self.passport.slots - plan.beams + 1)

        send(self.device, plan.sent, values)
        engine.run(plan.binding)
        self.device.run(plan.logits.to_host)
        self.device.synchronize()
        if not self.static:
            state.update(plan.written)
            state.memory.swap()
            state.plan = None  # the next step has other shapes and the buffers change places
        return Answer(plan.logits.values)

    def plan_step(self, engine: Engine, state: TrtState, values: dict[str, np.ndarray]) -> StepPlan:
        if self.cache[0].name not in state:
            raise RequestError("this state has no cache yet; reserve one before the first step")
        check_dtypes("decoder_step", engine.entry, values)
        shapes = {name: array.shape for name, array in state.items()}
        shapes.update((name, value.shape) for name, value in values.items())
        sizes = call_sizes(self.folder, self.passport, "decoder_step", shapes)

        arrays = dict(state)
        sent = []
        for name, value in values.items():
            arrays[name], transfer = self.shared.transfer(name, value.shape)
            sent.append(transfer)
        arrays["logits"], logits = self.shared.transfer("logits", shape_of(self.logits, sizes))
        written = {}
        for tensor in engine.entry.outputs:
            name = tensor.name.removeprefix("new_")
            if name in state.memory.next:
                arrays[tensor.name] = written[name] = state.memory.next[name].reshaped(shape_of(tensor, sizes))
        return StepPlan(signature_of(values.values()), sizes["K"], sent, engine.binding(arrays), logits, written)

    def select(self, state: State, rows: np.ndarray | None, slots: np.ndarray | None) -> None:
        self.opened("decoder_step")
        state = own(state)
        batch = batch_of(state)
        kept = np.arange(batch) if rows is None else rows
        check_places("rows", kept, batch)
        if len(kept) > self.passport.ranges.batch.max:
            raise RequestError(f"{len(kept)} rows were selected, this engine takes {self.passport.ranges.batch.max}")
        cached = {t.name for t in self.cache}
        if slots is not None:
            length = state[self.cache[0].name].shape[2]
            if slots.ndim != 2 or len(slots) != len(kept) or slots.shape[1] > length:
                raise RequestError(f"slots have shape {list(slots.shape)}, expected [{len(kept)}, up to {length}]")
            check_places("slots", slots, length)
        row_index = torch.tensor(kept)  # copies: the caller's arrays are free again when this returns
        slot_index = None if slots is None else torch.tensor(slots)
        for name, array in state.items():
            if slot_index is not None and name in cached:
                state[name] = self.gather_slots(array, row_index, slot_index)
            elif rows is not None:
                state[name] = self.gather_rows(array, row_index)
        state.plan = None

    def replace(self, state: State, rows: np.ndarray, newcomers: State, width: int) -> None:
        self.opened("decoder_step")
        state = own(state)
        check_places("rows", rows, batch_of(state))
        index = torch.tensor(rows)
        for tensor in self.kept:
            state[tensor.name] = self.put_rows(state[tensor.name], index, newcomers[tensor.name], width)
        state.plan = None

    def put_rows(self, array: DeviceArray, rows: Tensor, coming: DeviceArray, width: int) -> DeviceArray:
        """Queues array[rows] = coming, both with S made `width` long, in the same memory."""
        axis = 2 if len(array.shape) == 4 else 1
        result = array.reshaped((*array.shape[:axis], width, *array.shape[axis + 1 :]))

        def work() -> None:
            old, new = array.tensor, result.tensor
            if array.shape != result.shape:
                new.copy_(fitted(old, width))
            new.index_copy_(0, rows.to(old.device), fitted(coming.tensor, width))

        self.device.run(work)
        return result

    def gather_rows(self, array: DeviceArray, rows: Tensor) -> DeviceArray:
        """Queues array[rows], to the front of the same memory."""
        result = array.reshaped((len(rows), *array.shape[1:]))

        def work() -> None:
            old = array.tensor
            result.tensor.copy_(old.index_select(0, rows.to(old.device)))

        self.device.run(work)
        return result

    def gather_slots(self, array: DeviceArray, rows: Tensor, slots: Tensor) -> DeviceArray:
        """Queues [B,H,L,E] -> [B',H,L',E], to the front of the same memory.

        A static cache stays L slots long: behind those that were chosen it is zero.
        """
        chosen = slots.shape[1]
        _, heads, length, width = array.shape
        result = array.reshaped((len(rows), heads, length if self.static else chosen, width))

        def work() -> None:
            old, new = array.tensor, result.tensor
            row, slot = rows.to(old.device), slots.to(old.device)
            head = torch.arange(heads, device=old.device)
            picked = old[row[:, None, None], head[:, None], slot[:, None, :]]  # all three broadcast to [B', H, L']
            new[:, :, :chosen].copy_(picked)
            new[:, :, chosen:].zero_()

        self.device.run(work)
        return result

    def tensor(self, state: State, name: str) -> np.ndarray:
        self.opened("decoder_step")
        array: DeviceArray = state[name]
        dtype = torch.float32 if array.dtype == torch.bfloat16 else array.dtype  # numpy has no bfloat16
        copy = torch.empty(array.shape, dtype=dtype)
        self.device.run(lambda: copy.copy_(array.tensor))
        self.device.synchronize()
        return copy.numpy()

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
            self.shared.release()

    def __exit__(self, *exception: object) -> None:
        self.close()


def send(device: Device, transfers: list[Transfer], values: list[np.ndarray]) -> None:
    """Queues the copies of all values to the device as one piece of work."""
    for transfer, value in zip(transfers, values, strict=True):
        np.copyto(transfer.values, value)

    def work() -> None:
        for transfer in transfers:
            transfer.to_device()

    device.run(work)


def signature_of(values: Iterable[np.ndarray]) -> tuple[tuple[Shape, np.dtype], ...]:
    return tuple((value.shape, value.dtype) for value in values)


def own(state: State) -> TrtState:
    assert isinstance(state, TrtState), "a state is only good for the session that made it"
    return state


def batch_of(state: TrtState) -> int:
    return state["source_mask"].shape[0]

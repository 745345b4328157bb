"""The memory of a decode in ONNX Runtime: the arrays of a state, and the decoder step's IO binding.

Arrays are numpy's, in host memory, or a device's (device.py, device_state.py). A `Memory` is where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import onnxruntime as ort

from seq2engine.export.contract import GraphSpec, TensorSpec
from seq2engine.export.ort_form import OrtForm
from seq2engine.export.ort_forms.interface import CANDIDATES, COUNT, MOST, STATES, WANTED

from ..fitting import fitted
from ..search.step_output import Candidates, Logits, Reduced, StepOutput
from ..session import EVERYTHING, StepForm
from .graphs import Decoder, run_bound
from .memory import OVER_ALLOCATION, finite, resized, rows_of

LOGITS = TensorSpec("logits", "float32", ("B", "K", "W"))  # W: the whole vocabulary, or a shortlist
PARENTS = TensorSpec("parents", "int64", ("B", "K"))
SMALL_INPUTS = (
    "tokens",
    "position",
    "write_index",
    "self_mask",
    "slot_position",
)  # copied into the bound buffers in every step


class StepTransfers(Protocol):
    """Small arrays that the host writes before every step or reads after it; `values` is the host side."""

    values: dict[str, np.ndarray]
    shapes: dict[str, tuple[int, ...]]
    array: Any  # all of them as one buffer, where they are copied together

    def bind_inputs(self, binding: ort.IOBinding) -> None: ...

    def bind_outputs(self, binding: ort.IOBinding) -> None: ...

    def send(self) -> None: ...

    def fetch(self) -> None: ...


class Memory(Protocol):
    """Where the arrays of a state are: in host memory or on a device."""

    def empty(self, shape: Sequence[int], dtype: str) -> Any: ...

    def logits(self, shape: Sequence[int]) -> Any: ...

    def read_logits(self, array: Any) -> Logits: ...

    def numpy(self, array: Any) -> np.ndarray: ...

    def parcel(self, tensors: Iterable[TensorSpec], sizes: dict[str, int]) -> StepTransfers: ...

    def bind_input(self, binding: ort.IOBinding, name: str, array: Any) -> None: ...

    def bind_output(self, binding: ort.IOBinding, name: str, array: Any) -> None: ...


class HostArrays:
    """Small arrays of steps whose memory is the host's: they are bound as they are."""

    def __init__(self, values: dict[str, np.ndarray]):
        self.values, self.array = values, None
        self.shapes = {name: array.shape for name, array in values.items()}

    def bind_inputs(self, binding: ort.IOBinding) -> None:
        for name, array in self.values.items():
            bind_input(binding, name, array)

    def bind_outputs(self, binding: ort.IOBinding) -> None:
        for name, array in self.values.items():
            bind_output(binding, name, array)

    def send(self) -> None:
        pass

    def fetch(self) -> None:
        pass


class HostMemory:
    """Numpy's arrays; a graph reads and writes them in place."""

    def empty(self, shape: Sequence[int], dtype: str) -> np.ndarray:
        return np.empty(shape, dtype=dtype)

    def logits(self, shape: Sequence[int]) -> np.ndarray:
        return finite(shape, "float32")

    def read_logits(self, array: np.ndarray) -> Logits:
        return array

    def numpy(self, array: np.ndarray) -> np.ndarray:
        return array

    def parcel(self, tensors: Iterable[TensorSpec], sizes: dict[str, int]) -> HostArrays:
        return HostArrays({tensor.name: np.zeros(tensor.shape(sizes), dtype=tensor.dtype) for tensor in tensors})

    def bind_input(self, binding: ort.IOBinding, name: str, array: np.ndarray) -> None:
        bind_input(binding, name, array)

    def bind_output(self, binding: ort.IOBinding, name: str, array: np.ndarray) -> None:
        bind_output(binding, name, array)


HOST = HostMemory()


class KeptMask(Protocol):
    """The self-attention mask of a state, where each step computes it from the previous one."""

    own: np.ndarray  # beams as their own parents
    where: tuple[Any, ...]  # of the two masks that were bound last
    places: dict[str, Any]  # further inputs, which stay

    def bind_next(self, binding: ort.IOBinding, mask: np.ndarray | None) -> None:
        """Binds the mask that the next step reads and the one that it writes. `mask` is its initial value."""


class OrtState(dict[str, Any]):
    """The arrays of one batch and, after `reserve`, the decoder step that decodes it."""

    memory: Memory = HOST
    form: StepForm = EVERYTHING
    parents: np.ndarray | None = None  # of the next step's beams, where it has been announced; as in `Session.descend`
    mask: KeptMask | None = None  # where steps make it themselves
    decoder: Decoder
    bound: StepBinding | None = None
    host_steps: Any = None  # to which several steps of one call are bound (host_chain.py)

    def reserve(self, tensors: Iterable[TensorSpec], slots: int) -> None:
        """Puts an empty cache into the state."""
        sizes = {"B": len(self["source_mask"]), "L": slots}
        for tensor in tensors:
            self[tensor.name] = finite(tensor.shape(sizes), tensor.dtype, OVER_ALLOCATION)
        self.bound = self.host_steps = None

    def of_row(self, row: int) -> OrtState:
        """A view of one source: both write to the same cache. Host memory only."""
        found = OrtState({name: array[row : row + 1] for name, array in self.items()})
        found.form, found.decoder = self.form, self.decoder
        return found

    def kept_mask(self, shape: tuple[int, ...]) -> KeptMask | None:
        """The mask that steps of this shape make themselves; None: they are given theirs."""
        return None

    def attend(self, weights: Mapping[str, Any], types: Mapping[str, str]) -> None:
        """Takes the arrays that steps write their cross-attention weights [B,H,K,S] to."""
        self.update(weights)

    def select(self, cache: Sequence[TensorSpec], rows: np.ndarray | None, slots: np.ndarray | None) -> None:
        """As `Session.select`. A step stays bound where neither arrays nor their shapes change."""
        self.host_steps = None
        if self.bound is not None and slots is not None and slots.shape[1] != self[cache[0].name].shape[2]:
            self.bound.release()  # first: it references arrays that are about to be freed
        if rows is not None:
            self.bound = None
            for name, array in self.items():
                self[name] = rows_of(array, rows)  # one by one: each old array is freed before the next is copied
        if slots is not None:
            for tensor in cache:
                self[tensor.name] = gathered_slots(self[tensor.name], slots)

    def replace(self, kept: Iterable[TensorSpec], rows: np.ndarray, newcomers: OrtState, width: int) -> None:
        """As `Session.replace`; `kept` are the tensors that the encoder made."""
        self.bound = self.host_steps = None
        for tensor in kept:
            axis = tensor.axes.index("S")
            array = self[tensor.name] = fitted(self[tensor.name], axis, width)
            array[rows] = fitted(newcomers[tensor.name], axis, width)


@dataclass(frozen=True)
class StepLayout:
    """Inputs and outputs of a model's decoder step, independent of the batch."""

    spec: GraphSpec
    cache: tuple[TensorSpec, ...]
    grows: bool  # a growing cache gets new arrays every step; a static one is written in place
    vocab: int
    heads: int
    attention: Mapping[str, str]  # outputs with cross-attention weights -> their types


class StepBinding:
    """A decoder step bound to one state's memory, valid while its shapes and arrays stay; it keeps the arrays alive.

    A static cache is both input and output: the same memory, so that nothing is copied. The output arrays of the
    binding that it replaces are used again where their shapes are the same.
    """

    outputs: StepTransfers
    logits: Any

    def __init__(self, layout: StepLayout, state: OrtState, mask_shape: tuple[int, ...], with_logits: bool = False):
        self.shape, self.session, self.shortlist = mask_shape, state.decoder.session, state.form.shortlist
        self.memory = state.memory
        batch, beams, attended = mask_shape
        columns = self.columns = layout.vocab if self.shortlist is None else len(self.shortlist.tokens)
        wanted = 0 if with_logits else candidates_of(state)
        # Of some steps candidates with their scores are read, hardly ever all logits.
        form = state.decoder.form
        repeats = form.kernels and not form.drafts and not layout.grows  # a grown cache would grow again
        scored = min(state.form.best, columns) if repeats and not wanted and not with_logits else 0
        most = max(beams + 1, state.form.best) if state.decoder.form.counted else beams + 1
        best = min(wanted or scored or most, columns)
        width = best if (wanted or scored) and state.decoder.form.outputs_candidates else columns
        sizes = {"B": batch, "K": beams, "M": attended, "L": attended, "W": width, "C": best}
        self.binding = self.session.io_binding()
        self.mask = state.kept_mask(mask_shape)
        self.bind_inputs(layout.spec, state, sizes)
        self.bind_counts(state.decoder.form, wanted or -scored, best)
        self.bind_outputs(sizes, state.bound, state.decoder.flat_logits)
        self.bind_cache(layout, state, sizes)
        self.states: np.ndarray | None = None  # [B,K,D], of a step that puts them out
        if state.decoder.state_width:
            self.states = np.empty((batch, beams, state.decoder.state_width), dtype=np.float32)
            bind_output(self.binding, STATES, self.states)
        shape = (batch, layout.heads, beams, state["source_mask"].shape[1])
        self.attention = {name: self.memory.empty(shape, dtype) for name, dtype in layout.attention.items()}
        for name, array in self.attention.items():
            self.memory.bind_output(self.binding, name, array)
        found = self.outputs.values
        self.reduced = Reduced(Candidates(found["best_tokens"], found["best_logits"]), found["exp_sum"])
        self.no_logits = np.zeros((batch, beams, 0), dtype=np.float32) if wanted else None
        again = repeats and (wanted or scored)
        self.again = partial(StepBinding, layout, state, mask_shape, with_logits=True) if again else None
        self.replays, self.places = state.decoder.replays, ()
        if self.replays is not None:
            arrays = [*state.values(), *self.attention.values(), self.logits, self.inputs.array, self.outputs.array]
            self.places = (best, *(array.place for array in arrays))

    def bind_inputs(self, spec: GraphSpec, state: OrtState, sizes: dict[str, int]) -> None:
        small = [tensor for tensor in spec.inputs if tensor.name in SMALL_INPUTS]
        sent = small if self.mask is None else [*(one for one in small if one.name != "self_mask"), PARENTS]
        self.inputs = self.memory.parcel(sent, sizes)
        self.inputs.bind_inputs(self.binding)
        if self.mask is not None:
            for name, array in self.mask.places.items():
                self.memory.bind_input(self.binding, name, array)
        for tensor in spec.inputs:
            if tensor.name not in SMALL_INPUTS:
                self.memory.bind_input(self.binding, tensor.name, state[tensor.name])

    def bind_counts(self, form: OrtForm, wanted: int, best: int) -> None:
        """How many candidates: on the host wherever the graph runs."""
        self.counts = {WANTED.name: np.array([wanted])} if form.takes_wanted else {}
        if form.counted:
            self.counts[COUNT.name] = np.array([best])
        for name, count in self.counts.items():
            bind_input(self.binding, name, count)

    def bind_outputs(self, sizes: dict[str, int], before: StepBinding | None, flat: bool) -> None:
        shapes = {tensor.name: tensor.shape(sizes) for tensor in CANDIDATES}
        shape = LOGITS.shape(sizes)
        if before is not None and (before.outputs.shapes, before.logits.shape) == (shapes, shape):
            found = before.outputs, before.logits
        else:
            found = self.memory.parcel(CANDIDATES, sizes), self.memory.logits(shape)
        self.outputs, self.logits = found
        self.outputs.bind_outputs(self.binding)
        logits = self.logits.reshape(-1, self.logits.shape[-1]) if flat else self.logits
        self.memory.bind_output(self.binding, LOGITS.name, logits)

    def bind_cache(self, layout: StepLayout, state: OrtState, sizes: dict[str, int]) -> None:
        self.grown: dict[str, Any] = {}
        for cached in layout.cache:
            if layout.grows:
                tensor = layout.spec.output(f"new_{cached.name}")
                array = self.grown[cached.name] = self.memory.empty(tensor.shape(sizes), tensor.dtype)
            else:
                array = state[cached.name]
            self.memory.bind_output(self.binding, f"new_{cached.name}", array)

    def run(self, given: Mapping[str, np.ndarray], parents: np.ndarray | None = None) -> StepOutput:
        """With `parents`, steps that keep the mask compute it from the latest one."""
        if self.mask is not None:
            given = {**given, PARENTS.name: self.mask.own if parents is None else parents}
            self.mask.bind_next(self.binding, given["self_mask"] if parents is None else None)
        for name, buffer in self.inputs.values.items():
            buffer[...] = given[name]
        self.inputs.send()
        options = None
        if self.replays is not None and self.mask is not None:
            options = self.replays.options((*self.places, *self.mask.where))
        run_bound(self.session, self.binding, options)
        self.outputs.fetch()
        return StepOutput(self.read_logits(), self.reduced, self.shortlist)

    def read_logits(self) -> Logits:
        if self.again is not None:
            return RepeatedStep(self.again, self.inputs.values, (*self.shape[:2], self.columns))
        return self.memory.read_logits(self.logits) if self.no_logits is None else self.no_logits

    def release(self) -> None:
        """Drops its references to the state's arrays, which are being moved; the next binding may reuse its outputs."""
        self.binding, self.shape, self.grown, self.attention, self.again = None, (), {}, {}, None


class RepeatedStep:
    """Logits of a step that output its candidates alone: once they are asked for, the step is computed again with them.

    It writes the same numbers to the same slots of the cache. Valid until the next step.
    """

    def __init__(self, bind: Callable[[], StepBinding], given: Mapping[str, np.ndarray], shape: tuple[int, ...]):
        self.bind, self.given, self.shape = bind, given, shape

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.all[index]

    @cached_property
    def all(self) -> np.ndarray:
        """[B,K,W]."""
        return self.bind().run(self.given).raw[...]


def cache_of(step: GraphSpec) -> tuple[TensorSpec, ...]:
    """The inputs of a decoder step that are its KV cache: those that are also outputs, updated."""
    updated = {tensor.name for tensor in step.outputs}
    return tuple(tensor for tensor in step.inputs if f"new_{tensor.name}" in updated)


def candidates_of(state: OrtState) -> int:
    """How many candidates a step outputs instead of logits; 0 where it has no shortcut to that many."""
    wanted, form = state.form.candidates, state.decoder.form
    if form.drafts:
        return 1
    return wanted if form.counted or form.kernels or (form.screened and wanted <= MOST) else 0


def bind_input(binding: ort.IOBinding, name: str, array: np.ndarray) -> None:
    """Binds the memory of a contiguous array: nothing is copied."""
    assert array.flags.c_contiguous
    binding.bind_cpu_input(name, array)


def bind_output(binding: ort.IOBinding, name: str, array: np.ndarray) -> None:
    assert array.flags.c_contiguous
    binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array))


def gathered_slots(cache: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """cache [B,H,L,E], slots [B,L'] -> [B,H,L',E]; the same array, where as many slots stay: few of them move."""
    batch, heads, length, width = cache.shape
    if slots.shape[1] == length:
        for row, moves in enumerate(slots != np.arange(length)):
            if moves.any():
                first, last = np.flatnonzero(moves)[[0, -1]]
                cache[row, :, first : last + 1] = np.take(cache[row], slots[row, first : last + 1], axis=1)
        return cache
    shape = (batch, heads, slots.shape[1], width)
    result = resized(cache, shape)
    if result is None:
        result = finite(shape, cache.dtype, OVER_ALLOCATION)
        for row in range(batch):
            np.take(cache[row], slots[row], axis=1, out=result[row], mode="clip")  # clip mode writes without a buffer
        return result
    # In place: rows of a longer cache move back, so the last one moves first.
    for row in range(batch) if slots.shape[1] < length else reversed(range(batch)):
        result[row] = np.take(cache[row], slots[row], axis=1)
    return result

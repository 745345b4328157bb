"""The memory of a decode in ONNX Runtime: the arrays of a state, and the decoder step bound to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort

from seq2engine.export.contract import GraphSpec, TensorSpec
from seq2engine.export.ort_forms.screened_argmax import MOST, WANTED
from seq2engine.export.ort_forms.top_candidates import CANDIDATES

from ..fitting import fitted
from ..search.step_output import Candidates, Reduced, StepOutput
from ..session import EVERYTHING, StepForm
from .graphs import Decoder
from .memory import resized, rows_of, zeros

LOGITS = TensorSpec("logits", "float32", ("B", "K", "W"))  # W: the whole vocabulary, or a shortlist
OVER_ALLOCATION = 4  # a cache has so many times its first size reserved, to grow in place; unused pages cost nothing
SMALL_INPUTS = ("tokens", "position", "write_index", "self_mask")  # copied into bound buffers every step


class OrtState(dict[str, np.ndarray]):
    """The arrays of one batch. From `reserve` on it has the decoder step that it is decoded with."""

    form: StepForm = EVERYTHING
    decoder: Decoder
    bound: StepBinding | None = None

    def reserve(self, tensors: Iterable[TensorSpec], slots: int) -> None:
        """Puts an empty cache into the state."""
        sizes = {"B": len(self["source_mask"]), "L": slots}
        for tensor in tensors:
            self[tensor.name] = zeros(tensor.shape(sizes), tensor.dtype, OVER_ALLOCATION)
        self.bound = None

    def select(self, cache: Sequence[TensorSpec], rows: np.ndarray | None, slots: np.ndarray | None) -> None:
        """As `Session.select`. A step stays bound where neither arrays nor their shapes change."""
        if self.bound is not None and slots is not None and slots.shape[1] != self[cache[0].name].shape[2]:
            self.bound.release()  # first: it references arrays that are about to go
        if rows is not None:
            self.bound = None
            for name, array in self.items():
                self[name] = rows_of(array, rows)  # one by one: each old array is freed before the next is copied
        if slots is not None:
            for tensor in cache:
                self[tensor.name] = gathered_slots(self[tensor.name], slots)

    def replace(self, kept: Iterable[TensorSpec], rows: np.ndarray, newcomers: OrtState, width: int) -> None:
        """As `Session.replace`; `kept` are the tensors that the encoder made."""
        self.bound = None
        for tensor in kept:
            axis = tensor.axes.index("S")
            array = self[tensor.name] = fitted(self[tensor.name], axis, width)
            array[rows] = fitted(newcomers[tensor.name], axis, width)


@dataclass(frozen=True)
class StepLayout:
    """What a model's decoder step takes and puts out, whatever the batch."""

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

    def __init__(self, layout: StepLayout, state: OrtState, mask_shape: tuple[int, ...]):
        self.shape, self.session, self.shortlist = mask_shape, state.decoder.session, state.form.shortlist
        batch, beams, attended = mask_shape
        wanted = candidates_of(state)
        columns = layout.vocab if self.shortlist is None else len(self.shortlist.tokens)
        best = wanted or min(beams + 1, columns)
        sizes = {"B": batch, "K": beams, "M": attended, "L": attended, "W": wanted or columns, "C": best}
        self.binding = self.session.io_binding()
        self.bind_inputs(layout.spec, state, sizes, wanted)
        self.bind_outputs(sizes, state.bound)
        self.bind_cache(layout, state, sizes)
        shape = (batch, layout.heads, beams, state["source_mask"].shape[1])
        self.attention = {name: np.zeros(shape, dtype=dtype) for name, dtype in layout.attention.items()}
        for name, array in self.attention.items():
            bind_output(self.binding, name, array)
        candidates = Candidates(self.outputs["best_tokens"], self.outputs["best_logits"])
        self.reduced = Reduced(candidates, self.outputs["exp_sum"])
        self.logits = self.outputs["logits"][..., :0] if wanted else self.outputs["logits"]

    def bind_inputs(self, spec: GraphSpec, state: OrtState, sizes: dict[str, int], wanted: int) -> None:
        self.inputs: dict[str, np.ndarray] = {}
        for tensor in spec.inputs:
            if tensor.name in SMALL_INPUTS:
                array = self.inputs[tensor.name] = np.empty(tensor.shape(sizes), dtype=tensor.dtype)
            else:
                array = state[tensor.name]
            bind_input(self.binding, tensor.name, array)
        if state.decoder.form.screened:
            self.wanted = np.array([wanted])
            bind_input(self.binding, WANTED.name, self.wanted)

    def bind_outputs(self, sizes: dict[str, int], before: StepBinding | None) -> None:
        tensors = (LOGITS, *CANDIDATES)
        shapes = {tensor.name: tensor.shape(sizes) for tensor in tensors}
        outputs = {} if before is None else before.outputs
        if {name: array.shape for name, array in outputs.items()} != shapes:
            outputs = {tensor.name: zeros(shapes[tensor.name], tensor.dtype) for tensor in tensors}
        self.outputs: dict[str, np.ndarray] = outputs
        for name, array in outputs.items():
            bind_output(self.binding, name, array)

    def bind_cache(self, layout: StepLayout, state: OrtState, sizes: dict[str, int]) -> None:
        self.grown: dict[str, np.ndarray] = {}
        for cached in layout.cache:
            if layout.grows:
                tensor = layout.spec.output(f"new_{cached.name}")
                array = self.grown[cached.name] = np.empty(tensor.shape(sizes), dtype=tensor.dtype)
            else:
                array = state[cached.name]
            bind_output(self.binding, f"new_{cached.name}", array)

    def run(self, given: Mapping[str, np.ndarray]) -> StepOutput:
        for name, buffer in self.inputs.items():
            buffer[...] = given[name]
        self.session.run_with_iobinding(self.binding)
        return StepOutput(self.logits, self.reduced, self.shortlist)

    def release(self) -> None:
        """Drops its references to the state's arrays, which are moving; its outputs may serve the next binding."""
        self.binding, self.shape, self.grown, self.attention = None, (), {}, {}


def cache_of(step: GraphSpec) -> tuple[TensorSpec, ...]:
    """The inputs of a decoder step that are its KV cache: those that it also puts out, updated."""
    updated = {tensor.name for tensor in step.outputs}
    return tuple(tensor for tensor in step.inputs if f"new_{tensor.name}" in updated)


def candidates_of(state: OrtState) -> int:
    """How many candidates a step puts out instead of logits; 0 where it has no shortcut to so many."""
    wanted = state.form.candidates
    return wanted if state.decoder.form.screened and wanted <= MOST else 0


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
        result = zeros(shape, cache.dtype, OVER_ALLOCATION)
        for row in range(batch):
            np.take(cache[row], slots[row], axis=1, out=result[row], mode="clip")  # clip mode writes without a buffer
        return result
    # In the same memory: rows of a longer cache begin behind where they were, so the last one moves first.
    for row in range(batch) if slots.shape[1] < length else reversed(range(batch)):
        result[row] = np.take(cache[row], slots[row], axis=1)
    return result

"""One step of a TensorRT session: its inputs, the sequence of engines, and the outputs that are read.

    tokens, places, parents --+--> tree_mask --> mask --+
                              +-------------------------+--> decoder_step --> logits --> candidates --> host
    a whole mask, where it does not follow from the last --^

Logits stay on the device where candidates suffice for the search. They are copied to the host on request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from seq2engine.errors import RequestError
from seq2engine.export.artifact.passport import EngineEntry, EngineTensor

from ..search.step_output import Candidates, Reduced, StepOutput
from .device import Device
from .engine import Engine
from .launches import Launches, Run, Work
from .memory import DeviceArray, Parcel, ParcelMemory, Shape, Sizes, TrtState, allocate, room_for, shape_of
from .shapes import Profile

MASK = "self_mask"
SLOT_POSITION = "slot_position"  # of models with relative positions
MASKS = (MASK, SLOT_POSITION)  # stays on the device and is derived there
CANDIDATES = "candidates"
TREE_MASK = "tree_mask"


class StepMemory:
    """Memory on both sides for what every step sends and reads and no state keeps."""

    def __init__(
        self, device: Device, entries: Mapping[str, EngineEntry], sent: Sequence[EngineTensor], most: list[Sizes]
    ):
        self.device, step = device, entries["decoder_step"]
        self.masks = [t for t in sent if t.name in MASKS]
        following = entries[TREE_MASK].inputs if TREE_MASK in entries else ()
        parents = [t for t in following if t.name == "parents"]
        self.small = ParcelMemory(device, [*(t for t in sent if t.name not in MASKS), *parents], most)
        self.mask_staging = device.staging(sum(room_for(t, most) for t in self.masks))
        self.logits = ParcelMemory(device, [t for t in step.outputs if t.name == "logits"], most)
        self.best = ParcelMemory(device, entries[CANDIDATES].outputs, most)
        self.beam = [self.numbers(t, most) for t in following if t.name == "beam"]

    def numbers(self, tensor: EngineTensor, most: Sequence[Sizes]) -> DeviceArray:
        """0, 1, ..., sent once."""
        array = allocate(self.device, tensor, most)
        staging = self.device.staging(array.memory.size)
        staging.view(np.int64)[:] = np.arange(array.memory.size // 8)
        self.device.upload(array.memory, staging)
        self.device.synchronize()
        return array


@dataclass(frozen=True)
class StepPlan:
    """What steps of one state have in common while shapes stay, so that a step copies only its inputs and outputs.

    `launches` are by whether the mask follows from the one before.
    """

    signature: tuple[tuple[Shape, np.dtype], ...]  # of the values sent
    beams: int
    small: Parcel
    mask: Parcel
    launches: dict[bool, Launches]
    logits: Parcel
    best: Parcel | None  # None: logits are read
    written: dict[str, DeviceArray]  # the cache afterwards

    def queue(self, values: Mapping[str, np.ndarray], parents: np.ndarray | None) -> None:
        """Sends the inputs and queues the step, and the copies of what is read of it."""
        for name, value in values.items():
            fill((self.mask if name in MASKS else self.small).values[name], value)
        if "parents" in self.small.values:
            window = self.small.values["parents"]
            window[...] = np.arange(self.beams)
            if parents is not None:
                window[: parents.shape[0], : parents.shape[1]] = parents
        self.launches[parents is not None]()

    def output(self, state: TrtState, beams: int, wait: Callable[[], None]) -> StepOutput:
        """What was read, after the wait for it."""
        shortlist, front = state.form.shortlist, (slice(state.rows), slice(beams))
        if self.best is None:
            logits = self.logits.values["logits"][front]
            return StepOutput(logits if shortlist is None else logits[..., shortlist.ids], shortlist=shortlist)
        raw = DeferredLogits(self.logits, front, wait, partial(state.is_at, state.steps))
        found = {name: array[front] for name, array in self.best.values.items()}
        candidates = ordered(found["best_tokens"], found["best_logits"], state.form.best, raw.shape[-1])
        return StepOutput(raw, None if candidates is None else Reduced(candidates, found["exp_sum"]))


class DeferredLogits:
    """Logits on the device. They are copied to the host once, when an item is read."""

    def __init__(
        self, parcel: Parcel, front: tuple[slice, slice], wait: Callable[[], None], is_latest: Callable[[], bool]
    ):
        self.parcel, self.front, self.wait, self.is_latest = parcel, front, wait, is_latest
        self.shape = parcel.values["logits"][front].shape

    @cached_property
    def values(self) -> np.ndarray:
        if not self.is_latest():
            raise RequestError("the logits of a step were asked for after the next one; copy what is needed before")
        self.parcel.to_host()
        self.wait()
        return self.parcel.values["logits"][self.front]

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.values[index]


def ordered(tokens: np.ndarray, logits: np.ndarray, wanted: int, vocab: int) -> Candidates | None:
    """The best `wanted` of candidates [B,K,C], which have the largest logits first: of equal ones the lower token.

    None where that cannot be known: TensorRT may have left out some that equal the last it has.
    """
    count = tokens.shape[-1]
    equal = logits[..., 1:] == logits[..., :-1]
    if equal.any():
        if count < vocab and (logits[..., wanted - 1] == logits[..., -1]).any():
            return None
        order = np.lexsort((tokens, -logits))  # along the last axis
        tokens, logits = (np.take_along_axis(array, order, axis=-1) for array in (tokens, logits))
    return Candidates(tokens[..., :wanted], logits[..., :wanted])


def fill(window: np.ndarray, value: np.ndarray) -> None:
    """Copies an input of a step into the engine's memory. Padding rows and beams get token 0 at position 0 with an
    all-true mask; in the masks of all others, slots after the value's last are false."""
    padding = window.dtype == bool
    if window.shape != value.shape:
        window[...] = padding
        if value.ndim == 3:
            window[: value.shape[0], : value.shape[1]] = False
        window = window[tuple(slice(size) for size in value.shape)]
    np.copyto(window, value)


def signature_of(values: Iterable[np.ndarray]) -> tuple[tuple[Shape, np.dtype], ...]:
    return tuple((value.shape, value.dtype) for value in values)


def planned(
    memory: StepMemory,
    engines: Mapping[str, Engine],
    profile: Profile,
    state: TrtState,
    sizes: Sizes,
    written: dict[str, DeviceArray],
    signature: tuple[tuple[Shape, np.dtype], ...],
) -> StepPlan:
    """The plan of steps with these sizes of the contract's letters."""
    device, step = memory.device, engines["decoder_step"]
    small = memory.small.parcel({t.name: shape_of(t, sizes) for t in memory.small.tensors})
    shapes = {t.name: shape_of(t, sizes) for t in memory.masks}
    masks = [Parcel(device, memory.mask_staging, one, memory.masks, shapes) for one in state.memory.masks]
    logits = memory.logits.parcel({t.name: shape_of(t, sizes) for t in memory.logits.tensors})
    made = {f"new_{name}": array for name, array in written.items()}
    arrays = {**state, **small.arrays, **masks[0].arrays, **made, **logits.arrays}
    run = Run(step, step.binding(profile, arrays))

    best, reading = None, list[Work]([logits.to_host])
    entry = engines[CANDIDATES].entry.outputs
    if 0 < state.form.best <= candidate_count(entry) and state.form.shortlist is None:
        best = memory.best.parcel({t.name: shape_of(t, sizes) for t in entry})
        reducing = engines[CANDIDATES].binding(profile, {**logits.arrays, **best.arrays})
        reading = [Run(engines[CANDIDATES], reducing), best.to_host]
    works: dict[bool, list[Work]] = {False: [small.to_device, masks[0].to_device, run, *reading]}
    if len(masks) > 1:
        beam = memory.beam[0].reshaped((sizes["K"],))
        after = {f"new_{name}": array for name, array in masks[1].arrays.items()}
        following = {**small.arrays, **masks[0].arrays, "beam": beam, **after}
        follow = Run(engines[TREE_MASK], engines[TREE_MASK].binding(profile, following))
        back = partial(device.copy, masks[0].memory, masks[1].memory, masks[0].memory.size)
        works[True] = [small.to_device, follow, back, run, *reading]
    launches = {follows: Launches(device, work) for follows, work in works.items()}
    return StepPlan(signature, sizes["K"], small, masks[0], launches, logits, best, written)


def candidate_count(outputs: Sequence[EngineTensor]) -> int:
    axis = next(t for t in outputs if t.name == "best_tokens").axes[-1]
    assert isinstance(axis, int)
    return axis

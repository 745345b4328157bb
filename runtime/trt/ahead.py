"""Greedy search some tokens ahead of the host: each step feeds its chosen tokens to the next one on the device.

    tokens, position, mask --> decoder_step --> logits --> next_greedy --> next tokens, position, mask, what was chosen
       ^                                                                      |
       +------------------------------ one copy ------------------------------+

The host queues some of these, then waits once and reads the chosen tokens. The rules are in the plan sent before
(search/ahead/greedy_plan.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from seq2engine.export.artifact.passport import EngineEntry, EngineTensor
from seq2engine.export.artifact.transfers import aligned, itemsize_of

from ..search.ahead.greedy_plan import GreedyPlan
from .device import Device
from .engine import Engine
from .launches import Launches, Run
from .memory import DeviceArray, Parcel, ParcelMemory, Sizes, TrtState, allocate, shape_of, typed_front
from .shapes import Profile
from .step_plan import SLOT_POSITION

SCORED, UNSCORED = "next_greedy", "next_greedy_unscored"
STEP_INPUTS = ("tokens", "self_mask")
CARRIED = ("position", "done", "target")  # from one token to the next, sent at the beginning
RECORDED = ("top_logits", "chosen_logits", "exp_sums")  # filled on the device
FIXED = ("limit", "end")


class AheadMemory:
    """Memory for one state at a time that runs ahead: the inputs of a step and what it computes from them."""

    def __init__(self, device: Device, entries: Mapping[str, EngineEntry], most: list[Sizes]):
        greedy, step = entries[SCORED], entries["decoder_step"]
        known = {t.name: t for t in (*step.inputs, *greedy.inputs)}
        self.carried = [known[name] for name in (*STEP_INPUTS, *CARRIED, *RECORDED)]
        self.device = device
        self.now = ParcelMemory(device, self.carried, most)
        self.next = device.allocate(self.now.memory.size)
        self.fixed = ParcelMemory(device, [known[name] for name in FIXED], most)
        self.banned = allocate(device, known["banned"], most).reshaped(shape_of(known["banned"], most[0]))
        self.ban_staging = device.staging(self.banned.bytes)[: self.banned.bytes]
        self.sent_bans: bytes | None = None
        self.slot_position = [self.places(t, most) for t in step.inputs if t.name == SLOT_POSITION]
        length = known["target"].axes[-1]
        assert isinstance(length, int)
        self.length = length
        rows = max(sizes["B"] for sizes in most)
        self.read_staging = [device.staging(rows * length * itemsize_of(known[n].dtype)) for n in ("target", *RECORDED)]
        self.running: tuple[weakref.ref[TrtState], GreedyPlan] | None = None

    def places(self, tensor: EngineTensor, most: Sequence[Sizes]) -> DeviceArray:
        """Slot positions [B,L] of sources whose one beam wrote slot after slot: the slots' own numbers, sent once."""
        array = allocate(self.device, tensor, most)
        shape = max(shape_of(tensor, sizes) for sizes in most)
        staging = self.device.staging(array.memory.size)
        typed_front(staging, tensor.dtype, shape)[...] = np.arange(shape[-1])
        self.device.upload(array.memory, staging)
        self.device.synchronize()
        return array

    def is_running(self, state: TrtState, plan: GreedyPlan) -> bool:
        """Whether the data on the device belongs to this state and plan and can be continued."""
        return self.running is not None and self.running[0]() is state and self.running[1] is plan

    def send_bans(self, banned: np.ndarray) -> None:
        """The same bans are sent once."""
        if (content := banned.tobytes()) != self.sent_bans:
            self.ban_staging[:] = np.frombuffer(content, dtype=np.uint8)
            self.device.upload(self.banned.memory, self.ban_staging)
            self.sent_bans = content


@dataclass(frozen=True)
class AheadPlan:
    """What all tokens of one state share while its rows stay."""

    memory: AheadMemory
    now: Parcel
    fixed: Parcel
    launches: Launches
    recorded: tuple[str, ...]

    def begin(self, tokens: np.ndarray, position: np.ndarray, plan: GreedyPlan) -> None:
        """Sends all that the first step needs. Rows that are padding are done."""
        values, rows = self.now.values, len(tokens)
        values["tokens"][...], values["position"][...], values["done"][...], values["target"][...] = 0, 0, True, -1
        values["tokens"][:rows], values["position"][:rows] = tokens, position
        values["done"][:rows] = (tokens[:, 0] == plan.end) & (position > 0)
        values["target"][:rows] = plan.target
        mask = values["self_mask"]
        mask[...] = (np.arange(mask.shape[-1]) <= values["position"][:, None])[:, None]
        self.fixed.values["limit"][...], self.fixed.values["end"][...] = 1, plan.end
        self.fixed.values["limit"][:rows] = plan.limit
        last = self.now.arrays["target"]
        sent = last.address - self.now.memory.address + aligned(last.bytes)  # without what is recorded
        device, memory = self.memory.device, self.now.memory
        device.upload(memory, self.now.host[:sent])
        device.clear(memory.part(sent, memory.size - sent), memory.size - sent)  # zeros where nothing will be recorded
        self.fixed.to_device()
        self.memory.send_bans(plan.banned)

    def queue(self, count: int, columns: np.ndarray) -> list[np.ndarray]:
        """Queues steps, and copies of what they record: arrays [B, last - first] of the columns they fill, to
        be read after the wait."""
        for _ in range(count):
            self.launches()
        first, last = int(columns.min()), int(columns.max()) + 1
        found = []
        for name, staging in zip(("target", *self.recorded), self.memory.read_staging, strict=False):
            array = self.now.arrays[name]
            size, (rows, length) = itemsize_of(array.dtype), array.shape
            window = typed_front(staging, array.dtype, (rows, last - first))
            offset = array.memory.part(first * size, array.bytes - first * size)
            self.memory.device.download(window, offset, length * size)
            found.append(window)
        return found


def planned_ahead(
    memory: AheadMemory,
    engines: Mapping[str, Engine],
    profile: Profile,
    state: TrtState,
    sizes: Sizes,
    logits: ParcelMemory,
) -> AheadPlan:
    device, scored = memory.device, not state.form.candidates
    step, greedy = engines["decoder_step"], engines[SCORED if scored else UNSCORED]
    recorded = RECORDED if scored else RECORDED[:1]
    shapes = {t.name: shape_of(t, sizes) for t in memory.carried}
    now, fixed = (
        memory.now.parcel(shapes),
        memory.fixed.parcel({t.name: shape_of(t, sizes) for t in memory.fixed.tensors}),
    )
    after = Parcel(device, memory.now.staging, memory.next, memory.carried, shapes).arrays
    new = {f"new_{name}": array for name, array in after.items()}
    out = logits.parcel({t.name: shape_of(t, sizes) for t in logits.tensors}).arrays
    places = {}
    if memory.slot_position:
        places[SLOT_POSITION] = memory.slot_position[0].reshaped((sizes["B"], sizes["L"]))
    stepped = step.binding(profile, {**state, **now.arrays, **places, "write_index": now.arrays["position"], **out})
    chosen = greedy.binding(profile, {**now.arrays, **fixed.arrays, "banned": memory.banned, **new, **out})
    used = end_of(after, (*STEP_INPUTS, *CARRIED, *recorded))
    back = partial(device.copy, now.memory, memory.next.part(0, used), used)
    return AheadPlan(memory, now, fixed, Launches(device, [Run(step, stepped), Run(greedy, chosen), back]), recorded)


def end_of(arrays: Mapping[str, DeviceArray], names: Sequence[str]) -> int:
    """Bytes from the start of the first to the end of the last of these contiguous tensors."""
    return arrays[names[-1]].address + aligned(arrays[names[-1]].bytes) - arrays[names[0]].address

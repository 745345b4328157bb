"""Greedy search some tokens ahead of the host: each step makes the inputs of the next one on the device.

    A: tokens, position, mask, target, ...  -- step --> B: the same, one token on  -- step --> A  -- step --> ...

Both buffers are fixed, so a step is bound twice, once in each direction. The host starts some steps, waits for
the last one only, and reads the chosen tokens. The rules are in the plan sent before (search/ahead/greedy_plan.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnxruntime as ort

from seq2engine.export.contract import TensorSpec
from seq2engine.export.ort_forms.interface import RECORDED

from ..search.ahead.greedy_plan import GreedyPlan
from .device import Device, DeviceArray, Parcel
from .device_state import DeviceState
from .graphs import Decoder

CARRIED = (
    TensorSpec("tokens", "int64", ("B", 1)),
    TensorSpec("position", "int64", ("B",)),
    TensorSpec("self_mask", "bool", ("B", 1, "L")),
    TensorSpec("done", "bool", ("B",)),
    TensorSpec("target", "int64", ("B", "T")),
    *(TensorSpec(name, "float32", ("B", "T")) for name in RECORDED),
)
READ = ("target", *RECORDED)


class BannedTokens:
    """Banned tokens of plans [R,V]; equal ones are sent once."""

    def __init__(self, device: Device):
        self.device, self.content = device, b""
        self.array: DeviceArray | None = None

    def of(self, banned: np.ndarray) -> DeviceArray:
        if self.array is None or self.content != banned.tobytes():
            self.array, self.content = self.device.put(banned), banned.tobytes()
        return self.array


class Chain:
    """The steps of one state by one plan, while neither its rows nor its arrays change."""

    def __init__(
        self, decoder: Decoder, state: DeviceState, cache: Sequence[TensorSpec], plan: GreedyPlan, bans: BannedTokens
    ):
        device, slots = state.memory, state[cache[0].name].shape[2]
        self.decoder, self.plan, self.cache = decoder, plan, cache
        sizes = {"B": state.rows, "L": slots, "T": int(plan.limit.max())}
        self.sides = [device.parcel(CARRIED, sizes) for _ in range(2)]
        self.fixed = {
            "limit": device.put(plan.limit),
            "end": device.put(plan.end),
            "banned": bans.of(plan.banned),
            "slots": device.put(np.arange(slots)),
            "places": device.put(np.arange(sizes["T"])),
        }
        self.bindings = [self.bound(state, *sides) for sides in (self.sides, self.sides[::-1])]
        arrays = [*state.values(), *self.fixed.values(), *(side.array for side in self.sides)]
        self.places = tuple(array.place for array in arrays)
        self.latest = 0

    def bound(self, state: DeviceState, now: Parcel, after: Parcel) -> ort.IOBinding:
        binding, memory = self.decoder.session.io_binding(), state.memory
        for name in now.values:
            binding.bind_input(name, *now.where(name))
            binding.bind_output(f"new_{name}", *after.where(name))
        binding.bind_input("write_index", *now.where("position"))  # one beam, which never moves: slots are positions
        for name in (tensor.name for tensor in state.tensors.values()):
            if name != "encoder_states" and not name.startswith("cross_attention"):
                memory.bind_input(binding, name, state[name])
        for name, array in self.fixed.items():
            memory.bind_input(binding, name, array)
        for tensor in self.cache:
            memory.bind_output(binding, f"new_{tensor.name}", state[tensor.name])
        return binding

    def begin(self, tokens: np.ndarray, position: np.ndarray) -> None:
        """Sends all that the first step needs."""
        side = self.sides[self.latest]
        values, plan = side.values, self.plan
        values["tokens"][...], values["position"][...] = tokens, position
        values["done"][...] = (tokens[:, 0] == plan.end) & (position > 0)
        values["target"][...] = plan.target[:, : values["target"].shape[1]]
        values["self_mask"][...] = (np.arange(values["self_mask"].shape[-1]) <= position[:, None])[:, None]
        side.send()

    def run(self, columns: np.ndarray) -> list[np.ndarray]:
        """Runs a step for each of these columns [B,N] of the target and returns what they recorded. Only the
        last step is waited for."""
        count = columns.shape[1]
        for number in range(count):
            waits = number == count - 1
            options = None
            if self.decoder.replays is not None:
                options = self.decoder.replays.options((self.latest, *self.places), waits)
            self.decoder.session.run_with_iobinding(self.bindings[self.latest], options)
            self.latest = 1 - self.latest
        side = self.sides[self.latest]
        side.fetch()
        recorded = slice(int(columns.min()), int(columns.max()) + 1)
        return [side.values[name][:, recorded].copy() for name in READ]

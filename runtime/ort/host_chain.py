"""Several steps in one call of a step program, in host memory (export/kernel_forms/program.py).

The library runs the steps of greedy and of beam search one after another, until all sources are done or its cache is
full. So Python has its turn once for many tokens instead of twice for each.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort

from seq2engine.export.contract import TensorSpec
from seq2engine.export.ort_forms.interface import BEAMS, CHOSEN, FED, WANTED

from ..search.ahead.beam_plan import BeamPlan, BeamRows, BeamsAhead, first_beams
from ..search.ahead.greedy_plan import ChosenTokens, GreedyPlan
from .binding import OrtState, StepLayout, bind_input, bind_output
from .graphs import run_bound

AHEAD = 64  # most tokens of one call: a key press that ends a decode waits for them
KEPT_ROWS = 8  # of a batch whose binding is kept for the next one
MOST_CANDIDATES = 16  # of a step, of which rules may ban all but one
MADE = tuple(tensor for tensor in BEAMS if not tensor.name.startswith("new_"))  # outputs that are new in every call


@dataclass(frozen=True)
class ChainShape:
    """What of a batch a binding depends on, beside its arrays."""

    batch: int
    beams: int
    slots: int
    positions: bool  # one for each beam of a source
    unscored: bool


class HostSteps:
    """A step program bound for batches of one shape, and to one state after another."""

    state: weakref.ref[OrtState] | None = None

    def __init__(self, session: ort.InferenceSession, shape: ChainShape, more: Mapping[str, np.ndarray]):
        self.session, self.shape = session, shape
        self.binding = session.io_binding()
        self.values = {
            "tokens": np.zeros((shape.batch, shape.beams), dtype=np.int64),
            "position": np.zeros((shape.batch, shape.beams) if shape.positions else shape.batch, dtype=np.int64),
            "write_index": np.zeros(shape.batch, dtype=np.int64),
            "self_mask": np.zeros((shape.batch, shape.beams, shape.slots), dtype=bool),
            **more,
        }
        for name, array in self.values.items():
            self.bind(name, array)

    def bind(self, name: str, array: np.ndarray) -> None:
        """Of an input that has a default, too, which is found in this way only."""
        self.binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))

    def attach(self, state: OrtState, layout: StepLayout) -> None:
        """The next steps are those of this state."""
        if state.host_steps is self and self.state is not None and self.state() is state:
            return
        for tensor in layout.spec.inputs:
            if tensor.name not in FED:
                bind_input(self.binding, tensor.name, state[tensor.name])
        for tensor in layout.cache:
            bind_output(self.binding, f"new_{tensor.name}", state[tensor.name])
        state.host_steps, self.state = self, weakref.ref(state)

    def outputs(self, tensors: Iterable[TensorSpec], sizes: dict[str, int]) -> list[np.ndarray]:
        found = [np.empty(tensor.shape(sizes), dtype=tensor.dtype) for tensor in tensors]
        for tensor, array in zip(tensors, found, strict=True):
            bind_output(self.binding, tensor.name, array)
        return found


class HostChain(HostSteps):
    """Steps of greedy search by a plan. Mask and places of writing are the library's."""

    def __init__(self, session: ort.InferenceSession, shape: ChainShape):
        super().__init__(session, shape, {"steps": np.zeros(1, dtype=np.int64)})
        self.plan: GreedyPlan | None = None
        self.fixed: dict[str, np.ndarray] = {}  # what is bound of the plan

    def follow(self, plan: GreedyPlan) -> None:
        """The next steps are those of this plan."""
        if self.plan is plan:
            return
        self.plan = plan
        banned = int(np.count_nonzero(plan.banned, axis=1).max(initial=0)) + 1
        fixed = {
            "target": np.ascontiguousarray(plan.target[:, : int(plan.limit.max())]),
            "limit": plan.limit,
            "banned": plan.banned,
            "end": plan.end,
            WANTED.name: np.array([banned if self.shape.unscored else -banned]),
        }
        for name, array in fixed.items():
            self.bind(name, array)
        self.fixed = fixed  # a binding of older versions of ONNX Runtime keeps no array alive

    def run(self, tokens: np.ndarray, position: np.ndarray, count: int) -> ChosenTokens:
        """At most so many steps."""
        self.values["tokens"][...] = tokens
        self.values["position"].reshape(-1)[...] = position
        self.values["steps"][...] = count
        found = self.outputs(CHOSEN, {"B": self.shape.batch, "N": count})
        run_bound(self.session, self.binding)
        *chosen, ran = found
        return ChosenTokens(*(array[:, : int(ran[0])] for array in chosen))


class HostBeams(HostSteps):
    """Steps of beam search by a plan. Of each source the library writes what is known in place."""

    def __init__(self, session: ort.InferenceSession, shape: ChainShape):
        first = first_beams(shape.batch, shape.beams, 0)
        more = {"beam_steps": np.zeros(1, dtype=np.int64), "beam_rules": np.zeros(3, dtype=np.int64)}
        super().__init__(session, shape, {**more, "beam_state": first.state, "beam_scores": first.scores})
        for name, array in zip(("new_state", "new_scores", "new_mask"), self.carried, strict=True):
            bind_output(self.binding, name, array)
        self.plan: BeamPlan | None = None
        self.fixed: dict[str, np.ndarray] = {}  # as above

    @property
    def carried(self) -> tuple[np.ndarray, ...]:
        return self.values["beam_state"], self.values["beam_scores"], self.values["self_mask"]

    def follow(self, plan: BeamPlan) -> None:
        """The next steps are those of this plan."""
        if self.plan is plan:
            return
        self.plan = plan
        given = {"target": plan.target, "limit": plan.limit, "banned": plan.banned, "end": plan.end}
        self.fixed = {**given, "beam_norms": plan.norms, WANTED.name: np.array([-plan.width])}
        for name, array in self.fixed.items():
            self.bind(name, array)
        self.values["beam_rules"][:2] = plan.ending

    def run(self, rows: BeamRows, mask: np.ndarray, room: int, count: int) -> BeamsAhead:
        """At most so many steps."""
        state, scores, seen = self.carried
        state[...], scores[...], seen[...] = rows.state, rows.scores, mask
        self.values["beam_rules"][2] = room
        self.values["beam_steps"][0] = count
        sizes = {"N": count, "B": self.shape.batch, "K": self.shape.beams}
        choices, log_probs, runs = self.outputs(MADE, sizes)
        run_bound(self.session, self.binding)
        ran, failed = runs.tolist()
        after = BeamRows(state.copy(), scores.copy())
        return BeamsAhead(choices[:ran], log_probs[:ran], after, seen.copy(), None if failed < 0 else failed)


def chain_shape(state: OrtState, layout: StepLayout, beams: int = 1) -> ChainShape:
    slots = state[layout.cache[0].name].shape[2]
    positions = len(layout.spec.input("position").axes) > 1
    return ChainShape(len(state["source_mask"]), beams, slots, positions, state.form.candidates > 0)

"""One graph run three ways on the same inputs: in fp64, in PyTorch at the candidate's precision, and as the ONNX file.

In every step the file gets the KV caches that PyTorch filled, so that an error comes from this step; or its own
(`own_cache`), to find errors that only accumulate. Slow: every tensor is an output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from seq2engine.export.artifact.graph_files import array_of, graph_from_file
from seq2engine.export.debug_outputs import ReferenceGraph, exposed_graph, numbers, real_tensors
from seq2engine.export.ort_form import FormedGraph

from ...numerics.budgets import FEWEST_ROWS, ErrorTally, TensorResult
from ...ort.binding import gathered_slots
from ...ort.graphs import Placement, inference_session, run_arrays
from ...search.step_output import StepOutput
from ...session import EVERYTHING, Limits, Session, State, StepForm
from ...torch_session import TorchSession

MASKED = -65504.0  # a masked attention score, as in model/layers.py
LOGITS = "logits"

Three = tuple[np.ndarray, np.ndarray, np.ndarray]  # oracle, reference, candidate


class GraphFile:
    """An ONNX file and the names in it. Opened once for every set of tensors."""

    def __init__(self, path: Path, threads: int | None):
        self.path, self.threads = path, threads
        self.model = graph_from_file(path)
        self.tensors = real_tensors(self.model)
        self.weights = {weight.name: weight for weight in self.model.graph.initializer}

    def opened(self, names: Iterable[str]) -> OpenFile:
        changed = FormedGraph(exposed_graph(self.model, names).SerializeToString())
        return OpenFile(inference_session(self.path, Placement(self.threads), changed=changed))

    def weight(self, name: str) -> np.ndarray:
        return array_of(self.weights[name], self.path.parent)


class OpenFile:
    def __init__(self, session):  # type: ignore[no-untyped-def]
        self.session = session
        self.inputs = [given.name for given in session.get_inputs()]
        self.outputs = [made.name for made in session.get_outputs()]

    def run(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        graph = "decoder_step" if "tokens" in self.inputs else "encoder"
        found = run_arrays(self.session, self.outputs, {name: feeds[name] for name in self.inputs}, graph)
        return dict(zip(self.outputs, found, strict=True))


@dataclass
class Seen:
    """One call of the graph: its inputs and the compared tensors."""

    exact: dict[str, torch.Tensor]  # the oracle's inputs
    tensors: dict[str, Three]


class Trio:
    """One graph of the contract in its three forms."""

    def __init__(self, oracle: ReferenceGraph, reference: ReferenceGraph, file: GraphFile):
        self.oracle, self.reference, self.file = oracle, reference, file

    @property
    def names(self) -> list[str]:
        """The tensors that all three have, in the order in which PyTorch computes them."""
        return [name for name in self.oracle.calls if name in self.file.tensors]


class Watch:
    """Errors of some tensors of one graph, pooled and by step."""

    def __init__(self, trio: Trio, names: Sequence[str], precision: str, keep_step: int | None = None):
        self.trio, self.names, self.precision, self.keep_step = trio, list(names), precision, keep_step
        self.open = trio.file.opened(names)
        self.by_step: list[dict[str, ErrorTally]] = []
        self.kept: Seen | None = None

    def call(self, exact: State, rounded: State, given: State) -> tuple[State, State, State]:
        """Runs each of the three on its inputs; returns their outputs."""
        trio = self.trio
        outputs = [tensor.name for tensor in trio.oracle.spec.outputs]
        wanted = {*self.names, *outputs}
        got = self.open.run(given)
        ours = trio.oracle.run(exact, wanted)
        theirs = trio.reference.run(rounded, wanted)
        here = {name: ErrorTally(self.precision) for name in self.names}
        tensors: dict[str, Three] = {}
        for name in self.names:
            three = (numbers(ours[name]), numbers(theirs[name]), got[name])
            tensors[name] = three
            add_to(here[name], name, *three)
        if self.keep_step == len(self.by_step):
            self.kept = Seen({name: tensor.clone() for name, tensor in exact.items()}, tensors)
        self.by_step.append(here)
        return ({n: ours[n] for n in outputs}, {n: theirs[n] for n in outputs}, {n: got[n] for n in outputs})

    def result(self, name: str) -> tuple[TensorResult, list[int]] | None:
        """The result of a tensor beyond its budget, and the steps at which it is; None within the budget."""
        steps = [tally[name].result("locate", name, step) for step, tally in enumerate(self.by_step)]
        judged = [r for r in steps if self.by_step[r.step or 0][name].rows >= FEWEST_ROWS]
        total = ErrorTally(self.precision)
        for tally in self.by_step:
            total.merge(tally[name])
        pooled = total.result("locate", name)
        if pooled and all(judged):
            return None
        bad = [r for r in judged if not r] or [max(steps, key=lambda r: r.strain)]
        return (bad[0] if pooled else pooled), [r.step or 0 for r in bad]


def add_to(tally: ErrorTally, name: str, exact: np.ndarray, rounded: np.ndarray, given: np.ndarray) -> None:
    """Scores that are masked on both sides do not count."""
    if given.shape != exact.shape:
        given = np.full(exact.shape, np.inf)
    if name == LOGITS:
        width = exact.shape[-1]
        tally.add_logits(*(array.reshape(-1, width) for array in (exact, rounded, given)))  # [B, K, V]
    elif (hidden := (exact == MASKED) & (given == MASKED)).any():
        shown = [np.where(hidden, 0.0, array) for array in (exact, rounded, given)]
        tally.add(shown[0], shown[1], shown[2], ~hidden)
    else:
        tally.add(exact, rounded, given)


class Lockstep(Session):
    """A session for `TreeStep` that runs every step three ways and returns the oracle's logits."""

    backend = "lockstep"

    def __init__(
        self,
        oracle: TorchSession,
        reference: TorchSession,
        watch: Watch,
        own_cache: bool = False,
        slots: int | None = None,
    ):
        """`slots` is the length of the cache where the file has a fixed one."""
        self.oracle, self.reference, self.watch, self.own_cache = oracle, reference, watch, own_cache
        self.config, self.precision, self.cache_form = oracle.config, oracle.precision, oracle.cache_form
        self.limits = Limits(None, None, self.config.max_source, self.config.max_target, slots)
        self.cache = [f"self_{part}.{i}" for i in range(self.config.decoder_layers) for part in "kv"]

    def encode(self, source: np.ndarray, source_mask: np.ndarray) -> State:
        return {who.precision: who.encode(source, source_mask) for who in (self.oracle, self.reference)}

    def reserve(self, state: State, slots: int, form: StepForm = EVERYTHING) -> None:
        assert form == EVERYTHING, "all tensors are compared"
        for who in (self.oracle, self.reference):
            who.reserve(state[who.precision], slots)
        rounded = state[self.reference.precision]
        state["own"] = {name: numbers(rounded[name]).copy() for name in self.cache}

    def step(
        self,
        state: State,
        tokens: np.ndarray,
        position: np.ndarray,
        write_index: np.ndarray,
        self_mask: np.ndarray,
        slot_position: np.ndarray | None = None,
    ) -> StepOutput:
        fed = {"tokens": tokens, "position": position, "write_index": write_index, "self_mask": self_mask}
        fed |= {} if slot_position is None else {"slot_position": slot_position}
        small = {name: torch.from_numpy(array.copy()) for name, array in fed.items()}
        exact, rounded = state[self.oracle.precision], state[self.reference.precision]
        given = {name: numbers(tensor) for name, tensor in {**rounded, **small}.items()}
        if self.own_cache:
            given |= state["own"]
        made = self.watch.call({**exact, **small}, {**rounded, **small}, given)
        for held, found in zip((exact, rounded, state["own"]), made, strict=True):
            held.update({name: found[f"new_{name}"] for name in self.cache})
        return StepOutput(numbers(made[0]["logits"]))

    def select(self, state: State, rows: np.ndarray | None, slots: np.ndarray | None) -> None:
        assert rows is None, "step patterns keep all their rows"
        for who in (self.oracle, self.reference):
            who.select(state[who.precision], rows, slots)
        if slots is not None:
            state["own"] = {name: gathered_slots(cache, slots) for name, cache in state["own"].items()}

    def replace(self, state: State, rows: np.ndarray, newcomers: State, width: int) -> None:
        raise NotImplementedError("step patterns keep all their rows")

    def tensor(self, state: State, name: str) -> np.ndarray:
        return self.oracle.tensor(state[self.oracle.precision], name)

    def close(self) -> None:
        """The caller that opened the two sessions closes them."""

    def __exit__(self, *exc: object) -> None:
        self.close()


def encode_watched(watch: Watch, source: np.ndarray, mask: np.ndarray) -> None:
    """The encoder, once."""
    given = {watch.trio.oracle.spec.inputs[0].name: source, "source_mask": mask}
    exact = {name: torch.from_numpy(array) for name, array in given.items()}
    watch.call(exact, exact, given)

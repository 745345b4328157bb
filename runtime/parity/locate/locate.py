"""Locates a fault: the first tensor of a graph that is wrong, and the cause.

stored tensors that are not the reference's (weights/): known without a run
encoder, then the decoder step on PyTorch's own KV caches:
    coarse   the last tensor of every layer           -> the first layer beyond its budget
    fine     every tensor of that layer                -> the first of them, in the order of the graph, and its step
    cause    possible causes in fp64 (causes.py)       -> the one whose result is what the graph computed
then on the graph's own caches, for errors that only accumulate over steps
nodes that differ from an export, if no value shows the fault
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import cast

import numpy as np

from seq2engine.errors import BuildError, GraphError, RequestError, SessionError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.artifact.default_precision import NOT_COMPUTED
from seq2engine.export.contract import FOR_CPUS, oracle_of
from seq2engine.export.debug_outputs import Call, ReferenceGraph
from seq2engine.model.config import ModelConfig

from ...encoder_inputs import encoder_inputs, listed_sources
from ...fitting import fitted
from ...numerics.budgets import TensorResult
from ...opening import open_session
from ...steps.tree_cache import TreeStep
from ...text.sources import fewest_sources, random_sources, sample_of
from ...torch_session import TorchSession, threads_of_torch
from ..levels.baseline import Baseline
from ..levels.findings import Finding, layer_of
from ..levels.result import ParityResult
from ..levels.step_patterns import STEP_PATTERNS, pattern_steps, width_of
from ..levels.weights import WeightResult, stored_fault, structure_fault
from ..weights.level import weights_of
from .causes import cause_of
from .debug_engine import DebugEngines
from .evidence import Evidence
from .three_way import GraphFile, Lockstep, Seen, Trio, Watch, encode_watched

PLACES = ("encoder", *STEP_PATTERNS)
WEIGHTS = "weights"  # the place of a stored tensor in --locate
STEPS = 12  # decoder steps searched first; then all of them
WITHIN_DEBUG_ENGINE = (
    "every node of the ONNX graphs is within budget, and so is every tensor of a debug build of the tensorrt engine "
    "with them as outputs; the fault is in a kernel that is fused otherwise there, or in the session"
)
ROUNDED_ACTIVATIONS = (
    "every tensor is as close to fp64 as PyTorch's own at this precision; int8 activations alone change these outputs, "
    "so this model has values too large for w8a8: serve fp32 or fp16, or export with --calibrate CORPUS"
)
IN_DEBUG_ENGINE = "in a debug build of the engine with this tensor as an output; ONNX Runtime computes it right"


@dataclass(frozen=True)
class Trail:
    """The first tensor beyond its budget, and the steps at which it is."""

    place: str
    tensor: str
    steps: list[int]
    result: TensorResult
    own_cache: bool = False


class Locator:
    """Searches a bundle's graphs of one precision for a fault, on given sources. Opens sessions; use it in `with`.

    With `engines`, the graphs are engines of TensorRT that are built for it.
    """

    def __init__(
        self,
        bundle: Bundle,
        precision: str,
        sources: Sequence[Sequence[int]],
        beam: int,
        threads: int | None = None,
        engines: DebugEngines | None = None,
    ):
        self.bundle, self.precision, self.beam = bundle, precision, beam
        self.sources = listed_sources(sources, bundle.config)
        self.threads, self.engines = threads, engines
        self.fewest_beams, self.slots = 1, None
        if engines is not None:
            self.beam = min(beam, engines.ranges.beam.max)
            self.fewest_beams, self.slots = engines.ranges.beam.min, engines.slots
            self.sources = engines.fitting(self.sources)
        self.opened = ExitStack()

    def __enter__(self) -> Locator:
        bundle, precision = self.bundle, self.precision
        self.opened.enter_context(threads_of_torch(self.threads))
        self.oracle, self.reference = (
            cast(TorchSession, self.opened.enter_context(open_session(bundle, "torch", who, self.threads)))
            for who in (oracle_of(precision), precision)
        )
        specs = bundle.specs(precision)
        self.trios = {
            name: Trio(
                ReferenceGraph(self.oracle.model, spec, bundle.cache_form),
                ReferenceGraph(self.reference.model, spec, bundle.cache_form),
                self.file(name),
            )
            for name, spec in specs.items()
        }
        return self

    def __exit__(self, *exc: object) -> None:
        self.opened.close()

    def file(self, graph: str) -> GraphFile:
        if self.engines is not None:
            return self.engines.file(graph)
        return GraphFile(self.bundle.graph_path(self.precision, graph), self.threads)

    def trio(self, place: str) -> Trio:
        return self.trios["encoder" if place == "encoder" else "decoder_step"]

    def inputs(self) -> tuple[np.ndarray, np.ndarray]:
        """What all three read: the sources and their mask, with as many columns as an engine takes at least."""
        source, mask = encoder_inputs(self.sources, self.bundle.config)
        if self.engines is None or self.bundle.config.takes_features:
            return source, mask
        width = max(mask.shape[1], self.engines.fewest_columns)
        return fitted(source, 1, width), fitted(mask, 1, width)

    def watched(
        self, place: str, names: Sequence[str], steps: int, keep: int | None = None, own_cache: bool = False
    ) -> Watch:
        """Runs the encoder, or that many steps of a pattern, and compares these tensors."""
        watch = Watch(self.trio(place), names, self.precision, keep)
        if place == "encoder":
            encode_watched(watch, *self.inputs())
            return watch
        session = Lockstep(self.oracle, self.reference, watch, own_cache, self.slots)
        state = session.encode(*self.inputs())
        beams = max(width_of(place, self.beam), self.fewest_beams)
        tree = TreeStep(session, state, len(self.sources), beams, steps)
        for step, _ in enumerate(pattern_steps([tree], place, self.oracle.config.start_id, steps)):
            if step == keep:
                break
        return watch

    def trail(self, place: str, steps: int, own_cache: bool = False) -> Trail | None:
        """The first tensor of a place beyond its budget, in the order of the graph."""
        names = self.trio(place).names
        layers = [layer_of(self.trio(place).oracle.module(name)) for name in names]
        outputs = {tensor.name for tensor in self.trio(place).oracle.spec.outputs}
        ends = [i for i, name in enumerate(names) if name in outputs or layers[i] != (*layers, "")[i + 1]]
        coarse = self.first(place, [names[i] for i in ends], steps, own_cache)
        if coarse is None:
            return None
        end = names.index(coarse.tensor)
        begin = max((i + 1 for i in ends if i < end), default=0)
        return self.first(place, names[begin : end + 1], steps, own_cache) or coarse

    def first(self, place: str, names: Sequence[str], steps: int, own_cache: bool = False) -> Trail | None:
        watch = self.watched(place, names, steps, own_cache=own_cache)
        for name in names:
            if broken := watch.result(name):
                result, found = broken
                return Trail(place, name, found, result, own_cache)
        return None

    def evidence(self, trail: Trail, steps: int) -> Evidence:
        """Repeats the call that computes the wrong tensor, with other tensors that it may have read by mistake.

        At the last wrong step: by then the caches are filled, and few tensors are equal by chance.
        """
        trio = self.trio(trail.place)
        graph = trio.oracle
        seen = self.watched(trail.place, [trail.tensor], steps, trail.steps[-1], trail.own_cache).kept
        assert isinstance(seen, Seen)
        place = layer_of(graph.module(trail.tensor))
        near = [name for name in graph.calls if layer_of(graph.module(name)) == place]
        shown = {trail.tensor, *near, *(output.name for output in graph.spec.outputs)}
        for _ in range(2):  # what goes into the layer, and what that was made of
            shown |= {before for name in shown for before in graph.operands(name) if before in graph.calls}
        calls: list[Call] = []

        def note(name: str, call: Call) -> None:
            if name == trail.tensor:
                calls.append(call)

        others = graph.run(seen.exact, shown, note)
        others.pop(trail.tensor)
        three = seen.tensors[trail.tensor]
        return Evidence(trio, trail.tensor, self.precision, calls[0], *three, seen.exact, others)

    def finding(self, trail: Trail, steps: int, command: str) -> Finding:
        trio = self.trio(trail.place)
        guess = cause_of(self.evidence(trail, steps))
        module = guess.module or trio.oracle.module(trail.tensor)
        pattern = "" if trail.place == "encoder" else trail.place
        return Finding(
            graph=trio.oracle.spec.name,
            node=trio.file.tensors[trail.tensor].name,
            tensor=trail.tensor,
            module=module,
            layer=layer_of(module),
            pattern=pattern,
            step=None if trail.place == "encoder" else trail.steps[0],
            cause=guess.cause,
            detail=guess.detail
            + (" (it accumulates over the steps on its own cache)" if trail.own_cache else "")
            + (f" ({IN_DEBUG_ENGINE})" if self.engines is not None else ""),
            ratios=(trail.result.median_ratio, trail.result.worst_ratio),
            command=f"{command} --locate {shlex.quote(f'{trail.place}:{trail.tensor}')}",
        )


@dataclass(frozen=True)
class LocateOptions:
    """Where to look for a fault: graphs of this precision, decoding these sources to at most `longest` tokens.

    `step` is one that is known to be wrong. `only` is "place:tensor": only that tensor is compared, as the command of a
    finding does.
    """

    precision: str
    sources: Sequence[Sequence[int]]
    beam: int
    longest: int
    step: int = 0
    threads: int | None = None
    only: str | None = None
    command: str = "seq2engine parity BUNDLE"


def locate(
    bundle: Bundle,
    options: LocateOptions,
    weights: tuple[WeightResult, ...] | None = None,
    engines: DebugEngines | None = None,
) -> Finding | None:
    """The first fault in a bundle's graphs, or None; with `engines`, in those if not in the graphs.

    `weights` are the graphs' accounts, if they were made already.
    """
    precision, only, command = options.precision, options.only, options.command
    if only is None or only.startswith(f"{WEIGHTS}:"):
        weights = weights_of(bundle, precision) if weights is None else weights
        tensor = (only or "").partition(":")[2]
        if only is not None or stored_fault(weights) is not None:
            return in_weights(stored_fault(weights, tensor), command)
    try:
        found = None
        if engines is None or precision not in NOT_COMPUTED["onnxruntime"]:
            found = numeric_fault(bundle, options)
    except GraphError as error:
        found = crash_of(error, command)
    doubtful = found is None or found.cause in ("unknown", "crash")
    other = structure_fault(weights) if doubtful and weights is not None else None
    found = found if other is None else in_weights(other, command)
    if found is not None or engines is None:
        return found
    try:
        return numeric_fault(bundle, options, engines)
    except GraphError as error:
        return crash_of(error, command)
    except (BuildError, SessionError) as error:
        detail = f"the graphs are within budget, and the engine could not be searched: {error}"
        return outside_graphs("engine", detail, f"{command} --locate")


def in_weights(fault: Finding | None, command: str) -> Finding | None:
    """A fault found without running, with the command that reproduces it."""
    if fault is None:
        return None
    place = f" {shlex.quote(f'{WEIGHTS}:{fault.tensor}')}" if fault.tensor else ""
    return dataclasses.replace(fault, command=f"{command} --locate{place}")


def crash_of(error: GraphError, command: str) -> Finding:
    """The finding for a graph that cannot run, if nothing else explains it."""
    module = error.node.partition("/")[0] or error.graph
    detail, layer = " ".join(str(error).split()), layer_of(module)
    return Finding(
        error.graph, error.node, "", module, layer, "", None, "crash", detail, (0.0, 0.0), f"{command} --locate"
    )


def numeric_fault(bundle: Bundle, options: LocateOptions, engines: DebugEngines | None = None) -> Finding | None:
    """The first tensor that is beyond its budget when the graphs are run."""
    longest = options.longest if engines is None else min(options.longest, engines.ranges.target.max)
    steps, command = min(longest, max(STEPS, options.step + 1)), options.command
    with Locator(bundle, options.precision, options.sources, options.beam, options.threads, engines) as locator:
        if options.only is not None:
            place, name = checked(locator, options.only)
            found = locator.first(place, [name], longest)
            return locator.finding(found, longest, command) if found else None
        places = [place for place in PLACES if locator.beam > 1 or place != "beams"]
        for count in dict.fromkeys((steps, longest)):
            for place in places:
                if trail := locator.trail(place, count):
                    return locator.finding(trail, count, command)
        trails = (locator.trail(place, longest, own_cache=True) for place in places[1:])
        trail = next((trail for trail in trails if trail), None)
        return locator.finding(trail, longest, command) if trail else None


def checked(locator: Locator, only: str) -> tuple[str, str]:
    place, _, name = only.partition(":")
    if place not in PLACES:
        places = ", ".join((WEIGHTS, *PLACES))
        raise RequestError(f"unknown place {place!r}, expected PLACE:TENSOR with a place of {places}")
    if name not in locator.trio(place).names:
        raise RequestError(
            f"no tensor {name!r} in both the graph and PyTorch; search all of them with: "
            "seq2engine parity BUNDLE --locate"
        )
    return place, name


def finding_of(
    bundle: Bundle,
    result: ParityResult,
    sources: Sequence[Sequence[int]],
    beam: int,
    threads: int | None,
    command: str,
    baseline: Baseline | None = None,
    engines: DebugEngines | None = None,
) -> Finding:
    """Why a candidate failed: the first fault in its graphs or `engines`, or a finding that they have none.

    `baseline` is the one that `--against` names, if any.
    """
    if baseline is not None and all(result.tensors) and other_weights(bundle, baseline.bundle):
        detail = (
            f"{baseline.bundle.root} holds other weights than {bundle.root}, whose tensors are within budget: these "
            "are two different models"
        )
        return outside_graphs("other weights", detail, baseline.command)
    bugs = [divergence for decode in result.decodes for divergence in decode.differing]
    steps = [tensor.step for tensor in result.tensors if not tensor and tensor.step is not None]
    step = min([*steps, *(divergence.step for divergence in bugs)], default=0)
    rows = [divergence.source for divergence in bugs[:1]]
    chosen = locate_sources(bundle.config, sources, rows)
    command = " ".join([command, f"--precision={result.precision}", *(f"--row={row}" for row in rows)])
    weights = result.weights or None
    longest = result.max_length
    options = LocateOptions(result.precision, chosen, beam, longest, step, threads, command=command)
    found = locate(bundle, options, weights, engines)
    if found is not None:
        return found
    if result.stopped is not None:
        return crash_of(GraphError(result.stopped.reason, result.stopped.graph, result.stopped.node), command)
    kept = "on ONNX Runtime every node of the ONNX graphs is within budget, on their own caches too; the fault is in "
    if baseline is not None and all(result.tensors):
        return outside_graphs(
            "other side", f"{kept}{baseline.name}; check it against its own weights", baseline.command
        )
    if result.precision in FOR_CPUS and all(result.tensors):
        return outside_graphs("precision", ROUNDED_ACTIVATIONS, f"{command} --locate")
    if engines is not None:
        return outside_graphs("engine", WITHIN_DEBUG_ENGINE, f"{command} --locate")
    cause = "engine" if result.backend == "tensorrt" else "session"
    return outside_graphs(cause, f"{kept}the {result.backend} session", f"{command} --locate")


def other_weights(bundle: Bundle, other: Bundle) -> bool:
    return bundle.manifest.checkpoint_sha256 != other.manifest.checkpoint_sha256


def outside_graphs(cause: str, detail: str, command: str) -> Finding:
    """A finding outside the graphs."""
    return Finding("", "", "", "", "", "", None, cause, detail, (0.0, 0.0), command)


def locate_sources(config: ModelConfig, sources: Sequence[Sequence[int]], rows: Sequence[int]) -> list[list[int]]:
    """A few sources, as every tensor is compared: the given rows, others of all lengths, and random ones if needed."""
    if wrong := [row for row in rows if not 0 <= row < len(sources)]:
        raise RequestError(f"row {wrong[0]} asked for, but there are {len(sources)} sources, the first is row 0")
    given, fewest = listed_sources(sources, config), fewest_sources(config)
    rest = [source for row, source in enumerate(given) if row not in rows]
    chosen = [given[row] for row in rows] + sample_of(rest, max(0, fewest - len(rows)))
    return chosen + random_sources(config, max(0, fewest - len(chosen)))

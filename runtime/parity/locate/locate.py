"""The hunt: where in a graph it goes wrong first, and why.

encoder, then the decoder step on PyTorch's own caches:
    coarse   the last tensor of every layer           -> the first layer that breaks its budget
    fine     every tensor of that layer                -> the first of them, in the order of the graph, and its step
    cause    guesses computed in fp64 (causes.py)      -> the one that explains what the graph made
then on the graph's own caches, for what only adds up
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import cast

from seq2engine.errors import RequestError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.contract import oracle_of
from seq2engine.export.debug_outputs import Call, ReferenceGraph
from seq2engine.model.config import ModelConfig

from ...generate import padded
from ...numerics.budgets import TensorResult
from ...opening import open_session
from ...text.sources import FEWEST_SOURCES, random_sources, sample_of
from ...torch_session import TorchSession
from ...tree_cache import TreeStep
from ..levels.baseline import Speaker
from ..levels.findings import Finding, layer_of
from ..levels.result import ParityResult
from ..levels.step_patterns import DRIVES, driven, width_of
from .causes import cause_of
from .evidence import Evidence
from .three_way import GraphFile, Lockstep, Seen, Trio, Watch, encode_watched

PLACES = ("encoder", *DRIVES)
STEPS = 12  # decoder steps looked at first; a fault that shows later than that is looked for in all of them


@dataclass(frozen=True)
class Trail:
    """The first tensor that breaks its budget, and the steps at which it does."""

    place: str
    tensor: str
    steps: list[int]
    result: TensorResult
    own_cache: bool = False


class Hunter:
    """Hunts in one bundle's graphs of one precision, with given sources. Opens what it needs; close it with `with`."""

    def __init__(
        self, bundle: Bundle, precision: str, sources: Sequence[Sequence[int]], beam: int, threads: int | None = None
    ):
        self.bundle, self.precision, self.beam = bundle, precision, beam
        self.sources = [list(source) for source in sources]
        self.threads = threads
        self.opened = ExitStack()

    def __enter__(self) -> Hunter:
        bundle, precision = self.bundle, self.precision
        self.oracle, self.reference = (
            cast(TorchSession, self.opened.enter_context(open_session(bundle, "torch", who, self.threads)))
            for who in (oracle_of(precision), precision)
        )
        specs = bundle.specs(precision)
        self.trios = {
            name: Trio(
                ReferenceGraph(self.oracle.model, spec, bundle.cache_form),
                ReferenceGraph(self.reference.model, spec, bundle.cache_form),
                GraphFile(bundle.graph_path(precision, name), self.threads),
            )
            for name, spec in specs.items()
        }
        return self

    def __exit__(self, *exc: object) -> None:
        self.opened.close()

    def trio(self, place: str) -> Trio:
        return self.trios["encoder" if place == "encoder" else "decoder_step"]

    def watched(
        self, place: str, names: Sequence[str], steps: int, keep: int | None = None, own_cache: bool = False
    ) -> Watch:
        """Runs the encoder, or a drive of so many steps, with an eye on these tensors."""
        watch = Watch(self.trio(place), names, self.precision, keep)
        if place == "encoder":
            encode_watched(self.oracle, self.reference, watch, self.sources)
            return watch
        session = Lockstep(self.oracle, self.reference, watch, own_cache)
        state = session.encode(*padded(self.sources, self.oracle.config.pad_id))
        tree = TreeStep(session, state, len(self.sources), width_of(place, self.beam), steps)
        for step, _ in enumerate(driven([tree], place, self.oracle.config.start_id, steps)):
            if step == keep:
                break
        return watch

    def trail(self, place: str, steps: int, own_cache: bool = False) -> Trail | None:
        """The first tensor of a place that breaks its budget, in the order of the file."""
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
        """The call that made the wrong tensor, once more, with everything that may have been taken for something else.

        Of the wrong steps the last: by then the caches are filled, and few things are equal by chance.
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
        drive = "" if trail.place == "encoder" else trail.place
        return Finding(
            graph=trio.oracle.spec.name,
            node=trio.file.tensors[trail.tensor].name,
            tensor=trail.tensor,
            module=module,
            layer=layer_of(module),
            drive=drive,
            step=None if trail.place == "encoder" else trail.steps[0],
            cause=guess.cause,
            detail=guess.detail + (" (it adds up over the steps on its own cache)" if trail.own_cache else ""),
            ratios=(trail.result.median_ratio, trail.result.worst_ratio),
            command=f"{command} --hunt {shlex.quote(f'{trail.place}:{trail.tensor}')}",
        )


def hunt(
    bundle: Bundle,
    precision: str,
    sources: Sequence[Sequence[int]],
    beam: int,
    longest: int,
    step: int = 0,
    threads: int | None = None,
    only: str | None = None,
    command: str = "seq2engine parity BUNDLE",
) -> Finding | None:
    """What is wrong first in a bundle's graphs, or nothing. `step` is one that is known to be wrong.

    `only` is "place:tensor": that tensor alone is looked at, as the command of a finding does.
    """
    steps = min(longest, max(STEPS, step + 1))
    with Hunter(bundle, precision, sources, beam, threads) as hunter:
        if only is not None:
            place, name = checked(hunter, only)
            found = hunter.first(place, [name], longest)
            return hunter.finding(found, longest, command) if found else None
        places = [place for place in PLACES if beam > 1 or place != "beams"]
        for count in dict.fromkeys((steps, longest)):
            for place in places:
                if trail := hunter.trail(place, count):
                    return hunter.finding(trail, count, command)
        trails = (hunter.trail(place, longest, own_cache=True) for place in places[1:])
        trail = next((trail for trail in trails if trail), None)
        return hunter.finding(trail, longest, command) if trail else None


def checked(hunter: Hunter, only: str) -> tuple[str, str]:
    place, _, name = only.partition(":")
    if place not in PLACES:
        raise RequestError(f"cannot hunt in {place!r}, expected PLACE:TENSOR with a place of {', '.join(PLACES)}")
    if name not in hunter.trio(place).names:
        raise RequestError(
            f"the graphs have no tensor {name!r} that PyTorch has too; hunt in all of them with: "
            "seq2engine parity BUNDLE --hunt"
        )
    return place, name


def finding_of(
    bundle: Bundle,
    result: ParityResult,
    sources: Sequence[Sequence[int]],
    beam: int,
    threads: int | None,
    command: str,
    speaker: Speaker | None = None,
) -> Finding:
    """Why a candidate failed: the first thing wrong in its graphs, or that nothing in them is.

    `speaker` is whom its decodes were compared with, where `--against` named one.
    """
    if speaker is not None and all(result.tensors) and other_weights(bundle, speaker.bundle):
        detail = (
            f"{speaker.bundle.root} holds other weights than {bundle.root}, whose tensors keep their budgets, so these "
            "are two models that each say their own"
        )
        return told("other weights", detail, speaker.command)
    bugs = [divergence for decode in result.decodes for divergence in decode.differing]
    steps = [tensor.step for tensor in result.tensors if not tensor and tensor.step is not None]
    step = min([*steps, *(divergence.step for divergence in bugs)], default=0)
    rows = [divergence.source for divergence in bugs[:1]]
    chosen = hunt_sources(bundle.config, sources, rows)
    command = " ".join([command, f"--precision={result.precision}", *(f"--row={row}" for row in rows)])
    found = hunt(bundle, result.precision, chosen, beam, result.max_length, step, threads, None, command)
    if found is not None:
        return found
    kept = (
        "node by node, on their own caches too, the ONNX graphs keep their budgets on ONNX Runtime, so it is not they "
    )
    if speaker is not None and all(result.tensors):
        return told("other side", f"{kept}but {speaker.name}; hold that against its own weights", speaker.command)
    cause = "engine" if result.backend == "tensorrt" else "session"
    return told(cause, f"{kept}but what {result.backend} makes of them", f"{command} --hunt")


def other_weights(bundle: Bundle, other: Bundle) -> bool:
    return bundle.manifest.checkpoint_sha256 != other.manifest.checkpoint_sha256


def told(cause: str, detail: str, command: str) -> Finding:
    """A finding that is in no graph."""
    return Finding("", "", "", "", "", "", None, cause, detail, (0.0, 0.0), command)


def hunt_sources(config: ModelConfig, sources: Sequence[Sequence[int]], rows: Sequence[int]) -> list[list[int]]:
    """Few, because everything inside is looked at: those rows, others of all lengths, random ones up to the fewest."""
    if wrong := [row for row in rows if not 0 <= row < len(sources)]:
        raise RequestError(f"row {wrong[0]} asked for, but there are {len(sources)} sources, the first is row 0")
    rest = [list(source) for row, source in enumerate(sources) if row not in rows]
    chosen = [list(sources[row]) for row in rows] + sample_of(rest, FEWEST_SOURCES - len(rows))
    return chosen + random_sources(config, FEWEST_SOURCES - len(chosen))

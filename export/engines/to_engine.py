"""Graphs to TensorRT engines, by `tensorrt_rtx` (ahead of time, no GPU needed) or `tensorrt` (on the GPU it finds)."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seq2engine.common.atomic_folders import new_folder, remove_leftovers
from seq2engine.common.progress import Progress, silent
from seq2engine.common.tensorrt_module import gpu_name, load_tensorrt
from seq2engine.errors import BuildError
from seq2engine.model.config import ModelConfig

from ..artifact.build_flags import BuildFlags, check_flags
from ..artifact.bundle import Bundle, GraphEntry, open_bundle
from ..artifact.default_precision import precision_to_build
from ..artifact.engines import ENGINES
from ..artifact.gpu_support import target_from_text
from ..artifact.graph_files import graph_from_file, graph_of_ours
from ..artifact.passport import PASSPORT, EngineEntry, EngineTensor, Passport
from ..artifact.profiles import Range, ShapeRanges, Shapes, check_profiles, shapes_from_ranges
from ..contract import GRAPHS, PRECISIONS, GraphSpec
from ..device_graphs.of_engine import graphs_of_engine, reductions_of_engine
from ..precision.census import check_engine
from ..trt_forms.step import step_for_tensorrt
from .build_options import DEFAULT_OPTIONS, BuildOptions
from .cache import EngineFacts, engine_key
from .jobs import EngineJob
from .kernels import kernels_by_profile, weights_from_engine
from .reuse import engines_of_jobs, passport_with, timings_path
from .targets import check_targets, target_groups

NO_WEIGHTS = ""  # in place of their hash
FEATURE_BATCH = 8  # most windows of audio, or images, of such a build: each has as many positions as twenty sentences
BEAMS = 4  # default maximum of a build: fits what `run` and `parity` decode with by default


def default_ranges(config: ModelConfig, precision: str = "fp16", cache_form: str = "static") -> ShapeRanges:
    """Ranges that suit short texts: batches of 1 to 32, up to 4 beams, lengths up to 256 where the model goes that far.

    TensorRT fuses attention over a range of beams in fp16 and bf16, but in fp32 only over a fixed number of them; a
    session pads what has fewer (runtime/trt/session.py), which a growing cache does not allow. For audio and images the
    number is fixed in fp16, too, so that the source's keys and values are never copied; all sources have one length,
    and outputs as many tokens as the model has positions, because a prompt counts.
    """
    fixed = (PRECISIONS[precision] == "float32" or config.takes_features) and cache_form == "static"
    if config.takes_features:
        return ShapeRanges(
            batch=Range(1, 1, FEATURE_BATCH),
            beam=Range(BEAMS, BEAMS, BEAMS) if fixed else Range(1, BEAMS, BEAMS),
            source=Range(config.max_source, config.max_source, config.max_source),
            target=Range(1, min(64, config.max_target), config.max_target),
        )
    source, target = min(config.max_source, 256), min(config.max_target, 256)
    return ShapeRanges(
        batch=Range(1, 8, 32),
        beam=Range(BEAMS, BEAMS, BEAMS) if fixed else Range(1, BEAMS, BEAMS),
        source=Range(1, min(32, source), source),
        target=Range(1, min(32, target), target),
    )


def engines_from_onnx(
    bundle: Bundle | str | os.PathLike[str],
    targets: Sequence[str] = (),
    ranges: ShapeRanges | None = None,
    precision: str | None = None,
    options: BuildOptions = DEFAULT_OPTIONS,
    progress: Progress = silent,
) -> Passport:
    """Builds the engines of a precision and their device graphs into the bundle and returns the passport.

    `targets` are compute capabilities such as sm89 (RTX only; none = what RTX calls portable). An engine that was built
    before from the same graph, weights, TensorRT, targets, shapes and flags is taken from the bundle or from the cache.
    """
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(bundle)
    request = checked_request(opened, targets, ranges, precision, options)
    plans = {graph: engine_plan(request, graph) for graph in GRAPHS} | device_plans(request)
    keys = {graph: plan.key for graph, plan in plans.items()}
    folder = opened.place(ENGINES, check_name(options.name) or name_of_request(request, keys))
    if not options.rebuild and (there := passport_with(folder, keys)) is not None:
        for graph in plans:
            progress(f"build: {graph} {request.precision}", 1.0, "it was there")
        return there
    remove_leftovers(folder.parent)
    if options.name is not None and folder.exists() and not (options.force or options.rebuild):
        raise BuildError(f"{folder} is another engine, or damaged; choose another --name, or add --force to replace it")
    with no_room_is_an_error(folder), new_folder(folder, force=True, marker=PASSPORT) as beside:
        entries = built_engines(request, plans, beside, options, progress)
        passport = passport_of(request, entries)
        (beside / PASSPORT).write_text(passport.to_json())
    return passport


@contextmanager
def no_room_is_an_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BuildError(
            f"cannot write {folder}: {error.strerror or error}; make room there and build again"
        ) from error


@dataclass(frozen=True)
class BuildRequest:
    """A build request with all defaults filled in and everything checked that does not need a graph."""

    bundle: Bundle
    trt: Any  # the TensorRT module
    device: str  # the GPU that `tensorrt` builds for; nothing where engines are built for targets
    targets: tuple[str, ...]
    precision: str
    profiles: tuple[ShapeRanges, ...]  # the widest first
    slots: int
    flags: BuildFlags


def checked_request(
    bundle: Bundle,
    targets: Sequence[str],
    ranges: ShapeRanges | None,
    precision: str | None,
    options: BuildOptions,
) -> BuildRequest:
    """Fills in defaults; raises if this bundle cannot be built this way, or not for these targets."""
    named = [target_from_text(target) for target in targets]
    trt = load_tensorrt(options.flavour)
    has_targets = hasattr(trt, "ComputeCapability")
    precision = precision or precision_to_build(bundle, named, has_targets)
    widest = ranges or default_ranges(bundle.config, precision, bundle.cache_form)
    profiles = check_profiles((widest, *options.narrower), bundle.config)
    slots = check_slots(options.slots, profiles[0], bundle.cache_form)
    check_targets(trt, named, precision, bundle.root, [bundle.graph(precision, graph).census for graph in GRAPHS])
    shared = shared_targets(named)
    check_flags(trt, options.flags)
    device = "" if has_targets else gpu_name()
    return BuildRequest(bundle, trt, device, shared, precision, tuple(profiles), slots, options.flags)


def shared_targets(targets: Sequence[str]) -> tuple[str, ...]:
    """Each target once; raises if they cannot share an engine."""
    if len(groups := target_groups(targets)) > 1:
        listed = " and ".join(", ".join(group) for group in groups)
        raise BuildError(f"{', '.join(targets)} cannot share an engine; build one for each of: {listed}")
    return tuple(groups[0])


@dataclass(frozen=True)
class EnginePlan:
    """What is known of an engine before it is built. A device graph has no `entry`: it is not in the bundle."""

    graph: str
    spec: GraphSpec
    entry: GraphEntry | None
    model: bytes
    shapes: tuple[Shapes, ...]
    key: str
    flags: BuildFlags


def engine_plan(request: BuildRequest, graph: str) -> EnginePlan:
    bundle, trt = request.bundle, request.trt
    spec = bundle.specs(request.precision)[graph]
    entry = bundle.graph(request.precision, graph)
    shapes = tuple(shapes_from_ranges(spec, one, bundle.cache_form, request.slots) for one in request.profiles)
    model = graph_for_tensorrt(bundle, request.precision, graph, request.profiles, request.slots)
    built_by = (trt.__name__, trt.__version__, request.device, request.targets)
    key = engine_key(model, entry.data_sha256, *built_by, shapes, request.flags)
    return EnginePlan(graph, spec, entry, model, shapes, key, request.flags)


def device_plans(request: BuildRequest) -> dict[str, EnginePlan]:
    """The plans of the device graphs, which have no weights to refit or stream."""
    bundle, trt = request.bundle, request.trt
    step = bundle.specs(request.precision)["decoder_step"]
    flags = dataclasses.replace(request.flags, refit=False, weight_streaming=False)
    built_by = (trt.__name__, trt.__version__, request.device, request.targets)
    plans = {}
    for graph, (made, spec) in graphs_of_engine(step, bundle.cache_form, request.profiles[0], request.slots).items():
        shapes = tuple(shapes_from_ranges(spec, one, bundle.cache_form, request.slots) for one in request.profiles)
        model = made.SerializeToString(deterministic=True)
        key = engine_key(model, NO_WEIGHTS, *built_by, shapes, flags)
        plans[graph] = EnginePlan(graph, spec, None, model, shapes, key, flags)
    return plans


def built_engines(
    request: BuildRequest, plans: Mapping[str, EnginePlan], folder: Path, options: BuildOptions, progress: Progress
) -> dict[str, EngineEntry]:
    """Puts the engines into a folder, built or reused; returns the passport entry of each."""
    by_key = {plan.key: plan for plan in plans.values()}
    jobs = {key: job_of(request, plan, folder, options) for key, plan in by_key.items()}

    def check(key: str, file: Path) -> None:
        check_precision(by_key[key], request.precision, file)

    facts = engines_of_jobs(request.trt, jobs, request.bundle.root, options, progress, check)
    return {graph: entry_of(plan, jobs[plan.key].file, facts[plan.key]) for graph, plan in plans.items()}


def job_of(request: BuildRequest, plan: EnginePlan, folder: Path, options: BuildOptions) -> EngineJob:
    bundle, entry = request.bundle, plan.entry
    return EngineJob(
        stage=f"build: {plan.graph} {request.precision}",
        model=plan.model,
        path=folder / f"{plan.graph}.onnx" if entry is None else bundle.graph_path(request.precision, plan.graph),
        weight_bytes=0 if entry is None else bundle.inside(entry.data_path).stat().st_size,
        profiles=plan.shapes,
        targets=request.targets,
        flags=plan.flags,
        timings=timings_path(request.trt, request.device, options.cache),
        file=folder / f"{plan.graph}.engine",
    )


def passport_of(request: BuildRequest, engines: Mapping[str, EngineEntry]) -> Passport:
    return Passport(
        flavour=request.trt.__name__,
        version=request.trt.__version__,
        targets=request.targets,
        precision=request.precision,
        cache_form=request.bundle.cache_form,
        ranges=request.profiles[0],
        slots=request.slots,
        engines=dict(engines),
        reductions=reductions_of_engine(
            request.bundle.specs(request.precision)["decoder_step"], request.bundle.cache_form, request.profiles[0]
        ),
        narrower=request.profiles[1:],
        flags=request.flags,
        device=request.device,
    )


def graph_for_tensorrt(
    bundle: Bundle, precision: str, graph: str, profiles: Sequence[ShapeRanges], slots: int
) -> bytes:
    """The graph as TensorRT gets it; weights stay external."""
    path = bundle.graph_path(precision, graph)
    model = graph_from_file(path)
    if graph == "decoder_step":
        beam = profiles[0].beam
        beams = beam.max if beam.fixed else None
        long_sources = bundle.config.takes_features
        with graph_of_ours(path):
            model = step_for_tensorrt(model, bundle.cache_form, beams, slots, path.parent, long_sources)
    return model.SerializeToString(deterministic=True)


def check_slots(slots: int | None, ranges: ShapeRanges, cache_form: str) -> int:
    if slots is None:
        return ranges.slots
    if cache_form == "growing":
        raise BuildError("--slots sets the length of a static cache, but this bundle's cache grows; leave --slots out")
    least = ranges.target.max - 1 + ranges.beam.max  # a path all beams share, and the last step of each
    if slots < least:
        raise BuildError(f"--slots {slots} is too few: one path of {ranges.target.max} tokens needs at least {least}")
    return slots


def engine_name(
    flavour: str, targets: Sequence[str], precision: str, ranges: ShapeRanges, keys: Mapping[str, str]
) -> str:
    """A unique folder name for each build of a bundle. Nothing is parsed from it: facts are in the passport."""
    where = "-".join(targets) if targets else ("portable" if flavour == "tensorrt_rtx" else "local")
    beams = str(ranges.beam.max) if ranges.beam.fixed else f"{ranges.beam.min}to{ranges.beam.max}"
    key = hashlib.sha256("".join(keys[graph] for graph in GRAPHS).encode()).hexdigest()
    return f"{where}-{precision}-beam{beams}-{key[:8]}"


def name_of_request(request: BuildRequest, keys: Mapping[str, str]) -> str:
    return engine_name(request.trt.__name__, request.targets, request.precision, request.profiles[0], keys)


def name_of(passport: Passport) -> str:
    """The folder name of an engine that was given none."""
    return engine_name(passport.flavour, passport.targets, passport.precision, passport.ranges, passport.keys)


def check_name(name: str | None) -> str | None:
    """Checks a given name, which becomes a folder's; None stays None."""
    if name is not None and (name in ("", ".", "..") or "/" in name or name.startswith(".")):
        raise BuildError(f"--name {name!r} cannot name a folder; write letters, digits and dashes")
    return name


def check_precision(plan: EnginePlan, precision: str, file: Path) -> None:
    """Raises if an engine's weights are not of the requested precision. Only TensorRT-RTX engines can be read."""
    engine = file.read_bytes()
    if plan.entry is not None and kernels_by_profile(engine, len(plan.shapes))[0].statements:
        check_engine(weights_from_engine(engine), plan.entry.census, precision, file.name)


def entry_of(plan: EnginePlan, file: Path, facts: EngineFacts) -> EngineEntry:
    """The passport entry of an engine."""
    engine = file.read_bytes()
    widest, *narrower = kernels_by_profile(engine, len(plan.shapes))
    spec, shapes = plan.spec, plan.shapes[0]
    in_place = [] if plan.entry is None else [o.name for o in spec.outputs if o.name.startswith("new_")]
    static = any(t.name == "write_index" for t in spec.inputs)
    return EngineEntry(
        file=file.name,
        bytes=facts.bytes,
        sha256=facts.sha256,
        onnx_fingerprint=hashlib.sha256(plan.model).hexdigest() if plan.entry is None else plan.entry.fingerprint,
        inputs=tuple(EngineTensor(t.name, t.dtype, t.axes, shapes[t.name]) for t in spec.inputs),
        outputs=tuple(EngineTensor(t.name, t.dtype, t.axes) for t in spec.outputs),
        aliases={name: name.removeprefix("new_") for name in in_place} if static else {},
        launches=widest.launches,
        fused_attentions=min(program.fused_attentions for program in (widest, *narrower)),
        attentions=0 if plan.entry is None else plan.entry.census["attentions"],
        build_seconds=facts.build_seconds,
        peak_memory=facts.peak_memory,
        key=plan.key,
        narrower_launches=tuple(program.launches for program in narrower),
        weight_bytes=weights_from_engine(engine),
    )

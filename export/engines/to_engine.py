"""Graphs to TensorRT engines, by `tensorrt_rtx` (ahead of time, no GPU needed) or `tensorrt` (on the GPU it finds)."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from seq2engine.common.atomic_folders import new_folder, remove_leftovers
from seq2engine.common.progress import Progress, silent
from seq2engine.common.tensorrt_module import gpu_name, load_tensorrt
from seq2engine.errors import BuildError
from seq2engine.model.config import ModelConfig

from ..artifact.build_flags import PLAIN, BuildFlags, check_flags
from ..artifact.bundle import Bundle, GraphEntry, open_bundle
from ..artifact.default_precision import precision_to_build
from ..artifact.engines import ENGINES
from ..artifact.gpu_support import NEAREST, PORTABLE, target_from_text, unknown_target, unsupported
from ..artifact.passport import PASSPORT, EngineEntry, EngineTensor, Passport
from ..artifact.profiles import Range, ShapeRanges, Shapes, check_profiles, shapes_from_ranges
from ..contract import GRAPHS, PRECISIONS, GraphSpec
from ..precision.census import check_engine
from ..trt_forms.step import step_for_tensorrt
from .cache import EngineCache, EngineFacts, engine_key
from .jobs import EngineJob
from .kernels import kernels_by_profile, weights_from_engine
from .reuse import engines_of_jobs, passport_with, timings_path

BEAMS = 4  # most of a build that nobody asked otherwise: what `run` and `parity` decode with by default fits
APART = ("sm75",)  # targets that share an engine with no other


def default_ranges(config: ModelConfig, precision: str = "fp16", cache_form: str = "static") -> ShapeRanges:
    """Ranges that suit short texts: batches of 1 to 32, up to 4 beams, lengths up to 256 where the model goes that far.

    TensorRT fuses attention over a range of beams in fp16 and bf16, but in fp32 only over a fixed number of them; a
    session pads what has fewer (runtime/trt/session.py), which a growing cache does not allow.
    """
    fixed = PRECISIONS[precision] == "float32" and cache_form == "static"
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
    slots: int | None = None,
    flavour: str | None = None,
    force: bool = False,
    progress: Progress = silent,
    narrower: Sequence[ShapeRanges] = (),
    flags: BuildFlags = PLAIN,
    cache: str | os.PathLike[str] | None = None,
    rebuild: bool = False,
    workers: int = 1,
    name: str | None = None,
) -> Passport:
    """Builds both engines of a precision into the bundle and returns their passport.

    `targets` are compute capabilities such as sm89 (RTX only; none = what RTX calls portable); `slots` is the length of
    a static cache, by default one that always suffices; `narrower` are ranges within `ranges` that get profiles of
    their own. An engine that was built before from the same graph, weights, TensorRT, targets, shapes and flags is
    taken from the bundle, or from the folder `cache`, unless `rebuild` is asked for. Its folder is called `name`, or by
    what it is and its key: so builds that differ never meet.
    """
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(bundle)
    targets = [target_from_text(target) for target in targets]
    trt = load_tensorrt(flavour)
    precision = precision or precision_to_build(opened, targets, hasattr(trt, "ComputeCapability"))
    specs = opened.specs(precision)
    profiles = check_profiles(
        (ranges or default_ranges(opened.config, precision, opened.cache_form), *narrower), opened.config
    )
    slots = check_slots(slots, profiles[0], opened.cache_form)
    check_targets(trt, targets, precision, opened.root, [opened.graph(precision, graph).census for graph in GRAPHS])
    if len(groups := target_groups(targets)) > 1:
        listed = " and ".join(", ".join(group) for group in groups)
        raise BuildError(f"{', '.join(targets)} cannot share an engine; build one for each of: {listed}")
    (targets,) = groups
    check_flags(trt, flags)
    device = "" if hasattr(trt, "ComputeCapability") else gpu_name()
    plans = {}
    for graph in GRAPHS:
        shapes = tuple(shapes_from_ranges(specs[graph], one, opened.cache_form, slots) for one in profiles)
        model = graph_for_tensorrt(opened, precision, graph, profiles, slots)
        weights = opened.graph(precision, graph).data_sha256
        key = engine_key(model, weights, trt.__name__, trt.__version__, device, targets, shapes, flags)
        plans[graph] = EnginePlan(graph, specs[graph], opened.graph(precision, graph), model, shapes, key)
    keys = {graph: plan.key for graph, plan in plans.items()}
    folder = (
        opened.root / ENGINES / (check_name(name) or engine_name(trt.__name__, targets, precision, profiles[0], keys))
    )
    if not rebuild and (there := passport_with(folder, keys)) is not None:
        for graph in GRAPHS:
            progress(f"build: {graph} {precision}", 1.0, "it was there")
        return there
    remove_leftovers(folder.parent)
    if name is not None and folder.exists() and not (force or rebuild):
        raise BuildError(f"{folder} is another engine, or damaged; choose another --name, or add --force to replace it")
    with no_room_is_an_error(folder), new_folder(folder, force=True, marker=PASSPORT) as beside:
        jobs = {
            plan.key: EngineJob(
                stage=f"build: {graph} {precision}",
                model=plan.model,
                path=opened.graph_path(precision, graph),
                weight_bytes=opened.inside(plan.entry.data_path).stat().st_size,
                profiles=plan.shapes,
                targets=tuple(targets),
                flags=flags,
                timings=timings_path(trt, device, cache),
                file=beside / f"{graph}.engine",
            )
            for graph, plan in plans.items()
        }
        kept = None if cache is None else EngineCache(Path(cache))
        by_key = {plan.key: plan for plan in plans.values()}

        def check(key: str, file: Path) -> None:
            check_precision(by_key[key], precision, file)

        facts = engines_of_jobs(trt, jobs, opened.root / "engines", kept, rebuild, workers, progress, check)
        passport = Passport(
            flavour=trt.__name__,
            version=trt.__version__,
            targets=tuple(targets),
            precision=precision,
            cache_form=opened.cache_form,
            ranges=profiles[0],
            slots=slots,
            engines={graph: entry_of(plan, jobs[plan.key].file, facts[plan.key]) for graph, plan in plans.items()},
            narrower=profiles[1:],
            flags=flags,
            device=device,
        )
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
class EnginePlan:
    """All that is known of an engine before it is built."""

    graph: str
    spec: GraphSpec
    entry: GraphEntry
    model: bytes
    shapes: tuple[Shapes, ...]
    key: str


def graph_for_tensorrt(
    bundle: Bundle, precision: str, graph: str, profiles: Sequence[ShapeRanges], slots: int
) -> bytes:
    """The graph as TensorRT gets it, with its weights left where they are."""
    path = bundle.graph_path(precision, graph)
    model = onnx.load(path, load_external_data=False)
    if graph == "decoder_step":
        beam = profiles[0].beam
        model = step_for_tensorrt(model, bundle.cache_form, beam.max if beam.fixed else None, slots, path.parent)
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


def check_targets(
    trt: Any, targets: Sequence[str], precision: str, root: Path, censuses: Sequence[dict[str, Any]] = ()
) -> None:
    """Refuses targets that are unknown, or that cannot run the graphs, before anything is built."""
    if not hasattr(trt, "ComputeCapability"):
        if targets:
            raise BuildError(f"{trt.__name__} builds for the GPU of this machine only; leave --gpu out")
        return
    known = [f"sm{name[2:]}" for name in trt.ComputeCapability.__members__ if name.startswith("SM")]
    problems = [unknown_target(target, known) for target in targets if target not in known]
    command = f"seq2engine build {shlex.quote(str(root))} --gpu"
    reasons = {target: unsupported(target, precision, censuses) for target in targets or PORTABLE}
    able = [target for target, reason in reasons.items() if reason is None]
    for target, reason in reasons.items():
        if reason is None:
            continue
        if not targets and able:  # nobody asked for this one: those that can are the nearest thing
            mend = f"{command} {' '.join(able)} --precision {precision}"
            problems.append(
                f"portable engines run on {target} too, which cannot run {precision} ({reason}); build with: {mend}"
            )
            break
        mend = f"{command} {target} --precision {NEAREST.get(precision, precision)}"
        problems.append(f"{target} cannot run {precision} ({reason}); build with: {mend}")
        if not targets:  # none can, for the same reason
            break
    if problems:
        raise BuildError("; ".join(problems))


def target_groups(targets: Sequence[str]) -> list[list[str]]:
    """Targets by the engine they share. Turing gets one of its own: it lacks types that all others have, and an engine
    for several GPUs can have only what every one of them has."""
    once = list(dict.fromkeys(targets))
    groups = [[t for t in once if t not in APART], *([t] for t in once if t in APART)]
    return [group for group in groups if group] or [[]]


def engine_name(
    flavour: str, targets: Sequence[str], precision: str, ranges: ShapeRanges, keys: Mapping[str, str]
) -> str:
    """A folder name that tells builds of one bundle apart. Facts are in the passport; nothing is read from the name."""
    where = "-".join(targets) if targets else ("portable" if flavour == "tensorrt_rtx" else "local")
    beams = str(ranges.beam.max) if ranges.beam.fixed else f"{ranges.beam.min}to{ranges.beam.max}"
    key = hashlib.sha256("".join(keys[graph] for graph in GRAPHS).encode()).hexdigest()
    return f"{where}-{precision}-beam{beams}-{key[:8]}"


def name_of(passport: Passport) -> str:
    """The folder name of an engine that was given none."""
    return engine_name(passport.flavour, passport.targets, passport.precision, passport.ranges, passport.keys)


def check_name(name: str | None) -> str | None:
    """A name that was given: it is a folder's, beside those of the other engines."""
    if name is not None and (name in ("", ".", "..") or "/" in name or name.startswith(".")):
        raise BuildError(f"--name {name!r} is no name for a folder; write letters, digits and dashes")
    return name


def check_precision(plan: EnginePlan, precision: str, file: Path) -> None:
    """Raises if an engine's weights are not of the precision asked for. Only TensorRT-RTX writes what it holds."""
    engine = file.read_bytes()
    if kernels_by_profile(engine, len(plan.shapes))[0].statements:
        check_engine(weights_from_engine(engine), plan.entry.census, precision, file.name)


def entry_of(plan: EnginePlan, file: Path, facts: EngineFacts) -> EngineEntry:
    """What the passport says of an engine."""
    engine = file.read_bytes()
    widest, *narrower = kernels_by_profile(engine, len(plan.shapes))
    spec, shapes = plan.spec, plan.shapes[0]
    in_place = [o.name for o in spec.outputs if o.name.startswith("new_")]
    static = any(t.name == "write_index" for t in spec.inputs)
    return EngineEntry(
        file=file.name,
        bytes=facts.bytes,
        sha256=facts.sha256,
        onnx_fingerprint=plan.entry.fingerprint,
        inputs=tuple(EngineTensor(t.name, t.dtype, t.axes, shapes[t.name]) for t in spec.inputs),
        outputs=tuple(EngineTensor(t.name, t.dtype, t.axes) for t in spec.outputs),
        aliases={name: name.removeprefix("new_") for name in in_place} if static else {},
        launches=widest.launches,
        fused_attentions=min(program.fused_attentions for program in (widest, *narrower)),
        attentions=plan.entry.census["attentions"],
        build_seconds=facts.build_seconds,
        peak_memory=facts.peak_memory,
        key=plan.key,
        narrower_launches=tuple(program.launches for program in narrower),
        weight_bytes=weights_from_engine(engine),
    )

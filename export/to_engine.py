"""Graphs to TensorRT engines, by `tensorrt_rtx` (ahead of time, no GPU needed) or `tensorrt` (on the GPU it finds)."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import onnx

from seq2engine.folders import new_folder, sha256_of
from seq2engine.progress import Progress, silent

from ..errors import BuildError
from ..model.config import ModelConfig
from .bundle import Bundle, GraphEntry, open_bundle
from .census import check_engine
from .contract import GRAPHS, GraphSpec
from .kernels import kernels_from_engine, weights_from_engine
from .passport import PASSPORT, EngineEntry, EngineTensor, Passport
from .profiles import Range, ShapeRanges, Shapes, check_ranges, shapes_from_ranges
from .support import NEAREST, PORTABLE, unsupported
from .trt_build import build_engine
from .trt_form import step_for_tensorrt
from .trt_module import load_tensorrt


def default_ranges(config: ModelConfig, beam: int = 1) -> ShapeRanges:
    """Ranges that suit short texts: batches of 1 to 32, lengths up to 256 where the model goes that far."""
    source, target = min(config.max_source, 256), min(config.max_target, 256)
    return ShapeRanges(
        batch=Range(1, 8, 32),
        beam=Range(beam, beam, beam),
        source=Range(1, min(32, source), source),
        target=Range(1, min(32, target), target),
    )


def engines_from_onnx(
    bundle: Bundle | str | os.PathLike[str],
    targets: Sequence[str] = (),
    ranges: ShapeRanges | None = None,
    precision: str = "fp16",
    slots: int | None = None,
    flavour: str | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> Passport:
    """Builds both engines of a precision into the bundle and returns their passport.

    `targets` are compute capabilities such as sm89 (RTX only; none = what RTX calls portable); `slots` is the length of
    a static cache, by default one that always suffices.
    """
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(bundle)
    ranges = ranges or default_ranges(opened.config)
    specs = opened.specs(precision)
    trt = load_tensorrt(flavour)
    check_ranges(ranges, opened.config)
    slots = check_slots(slots, ranges, opened.cache_form)
    check_targets(trt, targets, precision, opened.root, [opened.graph(precision, graph).census for graph in GRAPHS])
    name = engine_name(trt.__name__, targets, precision, ranges.beam)
    folder = opened.root / "engines" / name
    with new_folder(folder, force, marker=PASSPORT) as beside:
        entries = {}
        for graph in GRAPHS:
            path = opened.graph_path(precision, graph)
            spec = specs[graph]
            shapes = shapes_from_ranges(spec, ranges, opened.cache_form, slots)
            model = onnx.load(path, load_external_data=False)
            if graph == "decoder_step":
                beams = ranges.beam.max if ranges.beam.fixed else None
                model = step_for_tensorrt(model, opened.cache_form, beams, slots)
            started = time.monotonic()
            stage = f"build: {graph} {precision}"
            engine = build_engine(trt, model, path, shapes, targets, partial(progress, stage))
            progress(stage, 1.0)
            file = beside / f"{graph}.engine"
            file.write_bytes(engine)
            if kernels_from_engine(engine).statements:  # only TensorRT-RTX writes its program into the engine
                check_engine(weights_from_engine(engine), opened.graph(precision, graph).census, precision, file.name)
            entries[graph] = entry_of(
                file, engine, spec, shapes, opened.graph(precision, graph), time.monotonic() - started
            )
        passport = Passport(
            flavour=trt.__name__,
            version=trt.__version__,
            targets=tuple(targets),
            precision=precision,
            cache_form=opened.cache_form,
            ranges=ranges,
            slots=slots,
            engines=entries,
        )
        (beside / PASSPORT).write_text(passport.to_json())
    return passport


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
            raise BuildError(f"{trt.__name__} builds for the GPU of this machine only; leave --target out")
        return
    known = [f"sm{name[2:]}" for name in trt.ComputeCapability.__members__ if name.startswith("SM")]
    problems = [
        f"unknown target {target!r}, expected one of {', '.join(known)}" for target in targets if target not in known
    ]
    command = f"seq2engine build {shlex.quote(str(root))} --target"
    reasons = {target: unsupported(target, precision, censuses) for target in targets or PORTABLE}
    able = [target for target, reason in reasons.items() if reason is None]
    for target, reason in reasons.items():
        if reason is None:
            continue
        if not targets:  # nobody asked for this one: those that can are the nearest thing
            mend = f"{command} {' '.join(able)} --precision {precision}"
            problems.append(
                f"portable engines run on {target} too, which cannot run {precision} ({reason}); build with: {mend}"
            )
            break
        mend = f"{command} {target} --precision {NEAREST.get(precision, precision)}"
        problems.append(f"{target} cannot run {precision} ({reason}); build with: {mend}")
    if problems:
        raise BuildError("; ".join(problems))


def engine_name(flavour: str, targets: Sequence[str], precision: str, beam: Range) -> str:
    """A folder name that tells builds of one bundle apart. Facts are in the passport; nothing is read from the name."""
    where = "-".join(targets) if targets else ("portable" if flavour == "tensorrt_rtx" else "local")
    beams = str(beam.max) if beam.fixed else f"{beam.min}to{beam.max}"
    return f"{where}-{precision}-beam{beams}"


def entry_of(
    file: Path, engine: bytes, spec: GraphSpec, shapes: Shapes, graph: GraphEntry, seconds: float
) -> EngineEntry:
    kernels, weights = kernels_from_engine(engine), weights_from_engine(engine)
    in_place = [o.name for o in spec.outputs if o.name.startswith("new_")]
    static = any(t.name == "write_index" for t in spec.inputs)
    return EngineEntry(
        file=file.name,
        bytes=len(engine),
        sha256=sha256_of(file),
        onnx_fingerprint=graph.fingerprint,
        inputs=tuple(EngineTensor(t.name, t.dtype, t.axes, shapes[t.name]) for t in spec.inputs),
        outputs=tuple(EngineTensor(t.name, t.dtype, t.axes) for t in spec.outputs),
        aliases={name: name.removeprefix("new_") for name in in_place} if static else {},
        launches=kernels.launches,
        fused_attentions=kernels.fused_attentions,
        attentions=graph.census["attentions"],
        build_seconds=round(seconds, 2),
        weight_bytes=weights,
    )

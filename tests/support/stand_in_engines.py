"""Bundles with engines of the TensorRT stand-in, and sessions over them."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

from seq2engine.common.atomic_folders import sha256_of
from seq2engine.export.artifact.bundle import Bundle, open_bundle
from seq2engine.export.artifact.passport import PASSPORT, EngineEntry, EngineTensor, Passport, read_passport
from seq2engine.export.artifact.profiles import Range, ShapeRanges, shapes_from_ranges
from seq2engine.export.artifact.transfers import TOKENS_PER_WAIT
from seq2engine.export.contract import GRAPHS, GraphSpec
from seq2engine.export.device_graphs.of_engine import graphs_of_engine, reductions_of_engine
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.export.trt_forms.step import step_for_tensorrt
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.model.transformer import Transformer
from seq2engine.runtime.trt.device import Device
from seq2engine.runtime.trt.session import TrtSession
from support.host_device import HostDevice
from support.tensorrt_stand_in import VERSIONS, engine_bytes, tensorrt_stand_in

ONE_BEAM = ShapeRanges(Range(1, 2, 4), Range(1, 1, 1), Range(1, 8, 16), Range(1, 8, 12))
BEAMS = ShapeRanges(Range(1, 2, 4), Range(1, 2, 3), Range(1, 8, 16), Range(1, 8, 12))
THREE_BEAMS = ShapeRanges(Range(1, 2, 4), Range(3, 3, 3), Range(1, 8, 16), Range(1, 8, 12))
FOUR_BEAMS = ShapeRanges(Range(1, 2, 4), Range(1, 4, 4), Range(1, 8, 16), Range(1, 8, 12))
NARROWER = (  # further profiles of FOUR_BEAMS: one short source, and two of middling length
    ShapeRanges(Range(1, 1, 1), Range(1, 4, 4), Range(1, 4, 4), Range(1, 8, 12)),
    ShapeRanges(Range(1, 2, 2), Range(1, 4, 4), Range(1, 5, 8), Range(1, 8, 12)),
)
# Pre-norm with learned positions: its decodes wander through the vocabulary and end at different lengths.
MODEL = random_model(dataclasses.replace(PRESETS["tiny"], norm="pre", positions="learned"), seed=12)
EXACT_MODEL = copy.deepcopy(MODEL).double()
ERROR_FACTOR = 20  # between two orders of summation; a wrong slot or source errs ten thousand times more
SOURCES = [[5, 17, 250, 9, 41], [77, 3], [12, 200, 31, 8, 99, 140, 6]]


def exported(folder: Path) -> dict[str, Path]:
    """The tiny model's bundles by cache form, without engines."""
    onnx_from_model(MODEL, folder / "static", ("fp32", "fp16"), "static")
    onnx_from_model(MODEL, folder / "growing", ("fp32",), "growing")
    return {form: folder / form for form in ("static", "growing")}


def copied(bundle: Path, target: Path) -> Bundle:
    """A bundle of one's own, to put engines into and to damage."""
    shutil.copytree(bundle, target)
    return open_bundle(target)


def put_engines(
    bundle: Bundle,
    ranges: ShapeRanges = ONE_BEAM,
    precision: str = "fp32",
    flavour: str = "tensorrt_rtx",
    slots: int | None = None,
    name: str | None = None,
    targets: tuple[str, ...] = ("sm86", "sm89"),
    narrower: tuple[ShapeRanges, ...] = (),
) -> Path:
    """Writes engines and passport as a build would, and returns their folder."""
    folder = bundle.root / "engines" / (name or f"sm86-sm89-{precision}")
    folder.mkdir(parents=True)
    slots = slots or ranges.slots
    entries = {}
    for graph, (model, spec) in models_of(bundle, ranges, precision, slots).items():
        profiles = [shapes_from_ranges(spec, r, bundle.cache_form, slots) for r in (ranges, *narrower)]
        file = folder / f"{graph}.engine"
        file.write_bytes(engine_bytes(model, profiles, flavour))
        in_place = graph == "decoder_step" and bundle.cache_form == "static"
        updated = [t.name for t in spec.outputs if t.name.startswith("new_")] if in_place else []
        entries[graph] = EngineEntry(
            file=file.name,
            bytes=file.stat().st_size,
            sha256=sha256_of(file),
            onnx_fingerprint=bundle.graph(precision, graph).fingerprint
            if graph in GRAPHS
            else hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest(),
            inputs=tuple(EngineTensor(t.name, t.dtype, t.axes, profiles[0][t.name]) for t in spec.inputs),
            outputs=tuple(EngineTensor(t.name, t.dtype, t.axes) for t in spec.outputs),
            aliases={output: output.removeprefix("new_") for output in updated},
            launches=0,
            fused_attentions=0,
            attentions=0,
            build_seconds=0.0,
        )
    passport = Passport(
        flavour=flavour,
        version=VERSIONS[flavour],
        targets=targets,
        precision=precision,
        cache_form=bundle.cache_form,
        ranges=ranges,
        slots=slots,
        engines=entries,
        reductions=reductions_of_engine(bundle.specs(precision)["decoder_step"], bundle.cache_form, ranges),
        narrower=narrower,
    )
    (folder / PASSPORT).write_text(passport.to_json())
    return folder


def models_of(
    bundle: Bundle, ranges: ShapeRanges, precision: str, slots: int
) -> dict[str, tuple[onnx.ModelProto, GraphSpec]]:
    """What a build makes engines of."""
    found = {}
    for graph in GRAPHS:
        model = onnx.load(bundle.graph_path(precision, graph))
        if graph == "decoder_step":
            beams = ranges.beam.max if ranges.beam.fixed else None
            audio = bundle.config.takes_audio
            model = step_for_tensorrt(model, bundle.cache_form, beams, slots, long_sources=audio)
        found[graph] = (model, bundle.specs(precision)[graph])
    step = bundle.specs(precision)["decoder_step"]
    return found | graphs_of_engine(step, bundle.cache_form, ranges, slots)


def session_over(
    folder: Path, trt: Any = None, device: Device | None = None, tokens_per_wait: int = TOKENS_PER_WAIT
) -> TrtSession:
    passport = read_passport(folder / PASSPORT)
    bundle = open_bundle(folder.parents[1])
    trt = trt or tensorrt_stand_in(passport.flavour)
    return TrtSession(trt, device or HostDevice(), folder, passport, bundle.config, tokens_per_wait)


def reference_logits(model: Transformer, sources: list[list[int]], targets: list[list[int]]) -> np.ndarray:
    """Teacher forcing: unpadded sources and the decoder's inputs so far -> the next logits [N,V]."""
    rows = []
    with torch.inference_mode():
        for source, target in zip(sources, targets, strict=True):
            ids = torch.tensor([source])
            rows.append(model(ids, torch.ones_like(ids, dtype=torch.bool), torch.tensor([target]))[0, -1].numpy())
    return np.stack(rows)


def check_logits(found: np.ndarray, sources: list[list[int]], targets: list[list[int]]) -> None:
    """Holds logits [N,V] against fp64: the same best tokens, and errors of the size of PyTorch's own in fp32."""
    exact, rounded = (reference_logits(model, sources, targets) for model in (EXACT_MODEL, MODEL))
    assert np.array_equal(found.argmax(-1), exact.argmax(-1))
    error, allowed = np.abs(found - exact).max(), ERROR_FACTOR * np.abs(rounded - exact).max()
    assert error <= allowed, f"logits err by {error:.2g}, allowed {allowed:.2g}"


def reference_greedy(model: Transformer, source: list[int], length: int) -> list[int]:
    tokens = [model.config.start_id]
    while len(tokens) <= length and tokens[-1] != model.config.end_id:
        tokens.append(int(reference_logits(model, [source], [tokens])[0].argmax()))
    return tokens[1:]

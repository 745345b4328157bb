"""A folder for a GPU machine without seq2engine: graphs, engines, scripts, inputs and expected outputs.

out/  README.md  requirements.txt         what to run, and what that needs
      package.json                        what is what: shapes of every input, hashes of all files, budgets
      graphs/{encoder,decoder_step}.onnx  as TensorRT gets them, with their weights
      graphs/candidates.onnx              after a step: the best tokens, so that logits stay on the GPU
      engines/<flavour>/                  what was built here, or what build.py builds there
      samples/*.npz                       inputs, and what the model in fp64 makes of them
      tokenizer/                          as the bundle has it; where it has one
      run_all.py  build.py  verify.py  decode.py   need numpy and TensorRT
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from seq2engine.common.atomic_folders import new_folder, sha256_of
from seq2engine.common.json_files import read_object
from seq2engine.common.progress import Progress, silent
from seq2engine.errors import BundleError, RequestError, SessionError
from seq2engine.export.artifact.bundle import Bundle, open_bundle
from seq2engine.export.artifact.default_precision import default_precision
from seq2engine.export.artifact.engines import passports_of
from seq2engine.export.artifact.passport import PASSPORT, Passport
from seq2engine.export.artifact.profiles import ShapeRanges, check_ranges, shapes_from_ranges
from seq2engine.export.contract import GRAPHS, GraphSpec, oracle_of
from seq2engine.export.device_graphs.of_engine import graphs_of_engine
from seq2engine.export.engines.to_engine import check_slots, default_ranges, graph_for_tensorrt
from seq2engine.export.to_onnx import versions
from seq2engine.model.tokenizers.base import ABOUT
from seq2engine.model.tokenizers.base import FOLDER as TOKENIZER
from seq2engine.packaging.decodes import decode_values, recorded_decodes, room_of, sample_sources, usual_margin
from seq2engine.packaging.golden_samples import STAGE, Recording, recorded
from seq2engine.packaging.readme import readme_text, requirements_text
from seq2engine.runtime.numerics.budgets import DIVERGENCE_FACTOR, FACTORS
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.text.sources import random_sources
from seq2engine.runtime.trt.selection import check_files, choose_engine

FORMAT = 4
PACKAGE = "package.json"
CANDIDATES = "candidates"  # the device graph that is included
SOURCES = 16  # with fewer, the ratio of errors varies too much to judge (see runtime/parity/run.py)
STEPS, LONGEST = 8, 24  # steps and source tokens of a sample: a few megabytes
SCRIPTS = (
    "run_all.py", "build.py", "verify.py", "decode.py", "engine_building.py", "timing.py",
    "report.py", "machine.py", "greedy.py", "beam.py", "engine_steps.py", "output_rules.py", "tokenizer.py",
    "model_engines.py", "trt_engine.py", "cuda_memory.py", "package_files.py",
)  # fmt: skip


@dataclass(frozen=True)
class PackageOptions:
    """The content of a package. Shapes are those of an engine of the bundle, or `ranges` and `slots` where none
    is included. `texts` are decoded here and on the GPU machine and compared; by default random sources.
    """

    precision: str | None = None  # default: the engine's, or what `build` would take
    engine: str | None = None  # which one, where the bundle holds several of a precision
    ranges: ShapeRanges | None = None
    slots: int | None = None  # length of a static cache; default: always enough
    texts: Sequence[str] = ()
    seed: int = 0  # of the sample sources
    threads: int | None = None  # CPU threads that record; default: all cores


@dataclass(frozen=True)
class Form:
    """The shapes that a package is made for; `built` are the engines in it."""

    profiles: tuple[ShapeRanges, ...]
    slots: int
    built: tuple[Path, Passport] | None


@dataclass(frozen=True)
class PackageResult:
    folder: Path
    precision: str
    engines: str  # flavour and version, or none
    checks: int
    megabytes: float

    def to_json(self) -> str:
        return json.dumps({**dataclasses.asdict(self), "folder": str(self.folder)}, indent=2)


def package_from_bundle(
    bundle: Bundle | str | os.PathLike[str],
    out: str | os.PathLike[str],
    options: PackageOptions | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> PackageResult:
    """Writes the folder `out`; with `force` it replaces a package that is there."""
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(bundle)
    check_takes_tokens(opened)
    options = options or PackageOptions()
    precision = options.precision or default_precision(opened, "tensorrt", options.engine)
    form = form_of(opened, precision, options.engine, options.ranges, options.slots)
    opened.check_graphs(precision)  # they are written last
    target = Path(out)
    with new_folder(target, force, marker=PACKAGE) as beside:
        recording, decode, decodes = recordings_for(opened, precision, form, options, progress)
        graphs = {name: written_graph(opened, precision, name, form, beside) for name in GRAPHS}
        graphs[CANDIDATES] = written_candidates(opened, precision, form, beside)
        values: dict[str, Any] = {
            "format": FORMAT,
            "made_by": versions(),
            "fingerprint": hashlib.sha256(json.dumps(graphs, sort_keys=True).encode()).hexdigest(),
            "model": dataclasses.asdict(opened.config),
            "end_id": opened.config.end_id,
            "precision": precision,
            "cache_form": opened.cache_form,
            "slots": form.slots,
            "ranges": [dataclasses.asdict(profile) for profile in form.profiles],
            "graphs": graphs,
            "beams": recording.beams,
            "steps": recording.steps,
            "factors": {**dataclasses.asdict(FACTORS[precision]), "margin": DIVERGENCE_FACTOR},
            "budgets": {name: dataclasses.asdict(budget) for name, budget in recording.budgets.items()},
            "outputs": recording.outputs,
            "samples": written_samples(recording, precision, beside),
            "decode": decode,
            "decodes": decodes,
            "tokenizer": written_tokenizer(opened, beside),
        }
        brought = "none" if form.built is None else f"{form.built[1].flavour} {form.built[1].version}"
        write_around(values, form, brought, beside)
        values["files"] = {path: sha256_of(beside / path) for path in files_in(beside)}
        if form.built is not None:
            write_engines(*form.built, values["fingerprint"], beside)
        (beside / PACKAGE).write_text(json.dumps(values, indent=1) + "\n")
        size = sum(path.stat().st_size for path in beside.rglob("*") if path.is_file())
    return PackageResult(target, precision, brought, len(recording.budgets) + 1, round(size / 1e6, 1))


def check_takes_tokens(bundle: Bundle) -> None:
    if bundle.config.takes_features:
        raise BundleError(
            f"{bundle.root} takes {bundle.config.source_kind}, and the scripts of a package take tokens; copy the "
            f"bundle to the GPU machine and run there: seq2engine build {bundle.root}"
        )


def form_of(bundle: Bundle, precision: str, engine: str | None, ranges: ShapeRanges | None, slots: int | None) -> Form:
    bundle.require(precision)
    if ranges is not None or slots is not None:
        if engine is not None:
            raise RequestError(f"engine {engine} has its own shape ranges; leave either --engine or the ranges out")
        widest = ranges or default_ranges(bundle.config, precision, bundle.cache_form)
        check_ranges(widest, bundle.config)
        return Form((widest,), check_slots(slots, widest, bundle.cache_form), None)
    if engine is None and all(p.precision != precision for p in passports_of(bundle).values()):
        widest = default_ranges(bundle.config, precision, bundle.cache_form)
        return Form((widest,), widest.slots, None)
    folder, passport = choose_engine(bundle, precision, engine)
    check_files(bundle, folder, passport)
    return Form(passport.profiles, passport.slots, (folder, passport))


def recordings_for(
    bundle: Bundle, precision: str, form: Form, options: PackageOptions, progress: Progress
) -> tuple[Recording, dict[str, Any], list[dict[str, Any]]]:
    """Inputs and outputs of both graphs, how decode.py decodes, and whole decodes."""
    widest = form.profiles[0]
    batch, beams = min(widest.batch.max, SOURCES), widest.beam.max
    room = form.slots // beams if bundle.cache_form == "static" else widest.target.max
    steps = min(STEPS, widest.target.max, room)
    count = batch * math.ceil(SOURCES / batch)  # full batches only: a smaller one may be below the engine's minimum
    sources = random_sources(bundle.config, count, options.seed, min(widest.source.max, LONGEST))
    if any(len(source) < widest.source.min for source in sources):
        sources = [(source * widest.source.min)[: max(len(source), widest.source.min)] for source in sources]
    with (
        open_session(bundle, "torch", oracle_of(precision), options.threads) as oracle,
        open_session(bundle, "torch", precision, options.threads) as reference,
    ):
        chosen = sample_sources(bundle, options.texts, sources, widest)  # checks the texts before the long work
        recording = recorded(oracle, reference, sources, batch, beams, steps, form.slots, progress)
        progress(STAGE, 1.0)
        decode = decode_values(oracle, room_of(widest, bundle.cache_form, form.slots), usual_margin(recording))
        return recording, decode, recorded_decodes(oracle, chosen, decode, progress)


def written_graph(bundle: Bundle, precision: str, name: str, form: Form, folder: Path) -> dict[str, Any]:
    """Writes a graph as a build gets it, its weights in a second file; returns what build.py and verify.py need."""
    source = bundle.graph_path(precision, name)
    path = folder / "graphs" / source.name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(graph_for_tensorrt(bundle, precision, name, form.profiles, form.slots))
    data = bundle.inside(bundle.graph(precision, name).data_path)
    shutil.copyfile(data, path.with_name(data.name))
    spec = bundle.specs(precision)[name]
    return {
        "file": f"graphs/{path.name}",
        "sha256": sha256_of(path),
        "data": f"graphs/{data.name}",
        "data_sha256": bundle.graph(precision, name).data_sha256,
        **tensors_of(spec),
        "profiles": [shapes_from_ranges(spec, one, bundle.cache_form, form.slots) for one in form.profiles],
    }


def written_candidates(bundle: Bundle, precision: str, form: Form, folder: Path) -> dict[str, Any]:
    """The same for the device graph that reduces a step's logits to the best tokens."""
    widest, step = form.profiles[0], bundle.specs(precision)["decoder_step"]
    model, spec = graphs_of_engine(step, bundle.cache_form, widest, form.slots)[CANDIDATES]
    path = folder / "graphs" / f"{CANDIDATES}.onnx"
    path.write_bytes(model.SerializeToString(deterministic=True))
    return {
        "file": f"graphs/{path.name}",
        "sha256": sha256_of(path),
        **tensors_of(spec),
        "profiles": [shapes_from_ranges(spec, one, bundle.cache_form, form.slots) for one in form.profiles],
    }


def tensors_of(spec: GraphSpec) -> dict[str, list[dict[str, Any]]]:
    return {
        side: [{"name": t.name, "dtype": t.dtype, "axes": list(t.axes)} for t in tensors]
        for side, tensors in (("inputs", spec.inputs), ("outputs", spec.outputs))
    }


def written_tokenizer(bundle: Bundle, folder: Path) -> str | None:
    """Copies the tokenizer's files; its kind, or None where the bundle has none."""
    paths = [path for path in bundle.manifest.companions if path.startswith(f"{TOKENIZER}/")]
    for path in paths:
        bundle.check_file(path, bundle.manifest.companions[path])
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(bundle.inside(path), folder / path)
    if not paths:
        return None
    bundle.tokenizer()  # raises if its files cannot be used
    return str(read_object(folder / TOKENIZER / ABOUT)["kind"])


def write_around(values: dict[str, Any], form: Form, brought: str, folder: Path) -> None:
    """Writes the scripts, README and requirements."""
    for name in SCRIPTS:
        (folder / name).write_bytes(script_bytes(name))
    built = None if form.built is None else (form.built[1].flavour, form.built[1].version)
    (folder / "README.md").write_text(readme_text(values, brought), encoding="utf-8")
    (folder / "requirements.txt").write_text(requirements_text(values["tokenizer"], built))


def script_bytes(name: str) -> bytes:
    """A script of the package; what sessions use as well is in seq2engine.common."""
    own = resources.files("seq2engine.export") / "gpu_package" / name
    return (own if own.is_file() else resources.files("seq2engine.common") / name).read_bytes()


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def written_samples(recording: Recording, precision: str, folder: Path) -> list[str]:
    exact = np.float64 if precision == "fp32" else np.float32  # their rounding is negligible compared with fp16
    samples = []
    (folder / "samples").mkdir()
    for number, arrays in enumerate(recording.batches):
        path = folder / "samples" / f"batch{number}.npz"
        kept = {name: array.astype(exact) if array.dtype == np.float64 else array for name, array in arrays.items()}
        with path.open("wb") as file:
            np.savez_compressed(file, **kept)  # type: ignore[arg-type]
        samples.append(f"samples/{path.name}")
    return samples


def write_engines(source: Path, passport: Passport, fingerprint: str, folder: Path) -> None:
    target = folder / "engines" / passport.flavour
    target.mkdir(parents=True)
    entries = {}
    for name in (*GRAPHS, CANDIDATES):
        entry = passport.engines[name]
        shutil.copyfile(source / entry.file, target / f"{name}.engine")
        if (sha256 := sha256_of(target / f"{name}.engine")) != entry.sha256:
            raise SessionError(f"{source / entry.file} changed while it was copied; run the command again")
        file = {"file": f"{name}.engine", "bytes": entry.bytes, "sha256": sha256}
        entries[name] = {**file, "seconds": round(entry.build_seconds, 1)}
    described = {
        "flavour": passport.flavour,
        "version": passport.version,
        "targets": list(passport.targets),
        "made_from": fingerprint,
        "built": "where the package was made",
        "passport": f"format {passport.format}, sha256 {sha256_of(source / PASSPORT)[:12]}",
        "engines": entries,
    }
    (target / "engines.json").write_text(json.dumps(described, indent=2) + "\n")

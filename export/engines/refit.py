"""Replaces the weights of an existing engine by others of the same architecture, without a build (`tensorrt` only).

old bundle: graph + weights A -> engine (built with --refit)
new bundle: the same graph + weights B ------------^----------> engine with weights B
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

import onnx

from seq2engine.common.atomic_folders import new_folder, sha256_of
from seq2engine.common.progress import Progress, silent
from seq2engine.common.tensorrt_module import collector_held, load_tensorrt
from seq2engine.errors import BuildError

from ..artifact.bundle import Bundle, open_bundle
from ..artifact.engines import ENGINES, engine_folders
from ..artifact.graph_files import graph_from_file
from ..artifact.passport import PASSPORT, EngineEntry, Passport, command_of_passport, read_passport
from ..artifact.profiles import shapes_from_ranges
from ..contract import DEVICE_GRAPHS, GRAPHS
from .build import logger_class, parse_errors
from .cache import engine_key
from .memory import peak_memory
from .reuse import facts_of
from .to_engine import engine_name, graph_for_tensorrt, name_of

FIXED = "tensorrt_rtx needs a CUDA driver to build weights that can be swapped"  # which its builds do without


def refit_engines(
    bundle: Bundle | str | os.PathLike[str],
    source: Bundle | str | os.PathLike[str],
    engine: str | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> Passport:
    """Refits the engines of `source` with the weights of `bundle`, adds them to it, and returns their passport."""
    new = bundle if isinstance(bundle, Bundle) else open_bundle(bundle)
    old = source if isinstance(source, Bundle) else open_bundle(source)
    folder, passport = refittable_engine(old, engine)
    check_refit(new, old, folder, passport)
    trt = load_tensorrt(passport.flavour)
    if trt.__version__ != passport.version:
        raise BuildError(
            f"engine {folder.name} was built with {passport.flavour} {passport.version}, installed is "
            f"{trt.__version__}; build it again with: {command_of_passport(new.root, passport, passport.targets)}"
        )
    keys = {graph: key_with_weights(new, passport, graph) for graph in GRAPHS}
    name = folder.name
    if name == name_of(passport):  # and not a name given with --name
        name = engine_name(passport.flavour, passport.targets, passport.precision, passport.ranges, keys)
    with new_folder(new.place(ENGINES, name), force, marker=PASSPORT) as beside:
        entries = {}
        for graph in GRAPHS:
            stage = f"refit: {graph} {passport.precision}"
            progress(stage, 0.0)
            entries[graph] = refitted(trt, new, folder, passport, graph, beside, keys[graph])
            progress(stage, 1.0)
        for graph in DEVICE_GRAPHS[passport.cache_form]:  # without weights: as they are
            entries[graph] = passport.engines[graph]
            shutil.copyfile(folder / entries[graph].file, beside / entries[graph].file)
        made = dataclasses.replace(passport, engines=entries)
        (beside / PASSPORT).write_text(made.to_json())
    return made


def refittable_engine(bundle: Bundle, name: str | None) -> tuple[Path, Passport]:
    """The named engine of a bundle, or the only one that was built to be refitted."""
    folders = {folder.name: folder for folder in engine_folders(bundle.root) if (folder / PASSPORT).exists()}
    if name is not None and name not in folders:
        raise BuildError(
            f"{bundle.root} has no engine {name!r}, only {', '.join(folders) or 'none at all'}; "
            f"see them with: seq2engine inspect {shlex.quote(str(bundle.root))}"
        )
    passports = {each: read_passport(folders[each] / PASSPORT) for each in ([name] if name else folders)}
    if name is None:
        passports = {each: passport for each, passport in passports.items() if passport.flags.refit}
    if not passports:
        rtx = [each for each in folders if read_passport(folders[each] / PASSPORT).flavour != "tensorrt"]
        why = f" ({', '.join(rtx)}: {FIXED})" if rtx else ""
        raise BuildError(
            f"{bundle.root} has no engine that can be refitted{why}; build one on a GPU machine with: "
            f"seq2engine build {shlex.quote(str(bundle.root))} --flavour tensorrt --refit"
        )
    if len(passports) > 1:
        raise BuildError(f"{bundle.root} has {len(passports)} such engines; choose one with: --engine {min(passports)}")
    ((found, passport),) = passports.items()
    return folders[found], passport


def check_refit(new: Bundle, old: Bundle, folder: Path, passport: Passport) -> None:
    """Refuses engines whose weights cannot be swapped, and weights that are not those of the engine's graphs."""
    rebuild = f"build it instead with: {command_of_passport(new.root, passport, passport.targets)}"
    if passport.flavour != "tensorrt":
        raise BuildError(f"engine {folder.name} cannot be refitted: {FIXED}; {rebuild}")
    if not passport.flags.refit:
        raise BuildError(f"engine {folder.name} was built without --refit, so its weights are fixed; {rebuild}")
    new.require(passport.precision)
    for entry in passport.engines.values():
        if not facts_of(entry).describe(folder / entry.file):
            raise BuildError(f"{folder / entry.file} is not the file its passport describes; {rebuild}")
    for graph in GRAPHS:
        if passport.engines[graph].onnx_fingerprint != old.graph(passport.precision, graph).fingerprint:
            raise BuildError(f"engine {folder.name} is stale: {old.root} now holds another {graph} graph; {rebuild}")
        if structure_of(new, passport.precision, graph) != structure_of(old, passport.precision, graph):
            raise BuildError(f"{new.root} is of another architecture than {old.root}: their {graph} differs; {rebuild}")


def structure_of(bundle: Bundle, precision: str, graph: str) -> bytes:
    """A graph with the names, types and sizes of its weights, but not their numbers: small ones are in the graph."""
    model = graph_from_file(bundle.graph_path(precision, graph))
    for weight in model.graph.initializer:
        shell = onnx.TensorProto(name=weight.name, dims=weight.dims, data_type=weight.data_type)
        weight.CopyFrom(shell)
    return model.SerializeToString(deterministic=True)


def key_with_weights(new: Bundle, passport: Passport, graph: str) -> str:
    """The key of an engine like that of the passport, with the new bundle's weights."""
    spec = new.specs(passport.precision)[graph]
    return engine_key(
        graph_for_tensorrt(new, passport.precision, graph, passport.profiles, passport.slots),
        new.graph(passport.precision, graph).data_sha256,
        passport.flavour,
        passport.version,
        passport.device,
        passport.targets,
        [shapes_from_ranges(spec, ranges, new.cache_form, passport.slots) for ranges in passport.profiles],
        passport.flags,
    )


@collector_held()
def refitted(
    trt: Any, new: Bundle, folder: Path, passport: Passport, graph: str, beside: Path, key: str
) -> EngineEntry:
    entry, graph_entry = passport.engines[graph], new.graph(passport.precision, graph)
    model = graph_for_tensorrt(new, passport.precision, graph, passport.profiles, passport.slots)
    path, started = new.inside(graph_entry.path), time.monotonic()
    with peak_memory() as peak:
        content = engine_with_weights(trt, folder / entry.file, model, path)
    file = beside / entry.file
    file.write_bytes(content)
    return dataclasses.replace(
        entry,
        bytes=len(content),
        sha256=sha256_of(file),
        onnx_fingerprint=graph_entry.fingerprint,
        build_seconds=round(time.monotonic() - started, 2),
        peak_memory=peak.bytes,
        key=key,
    )


def engine_with_weights(trt: Any, file: Path, model: bytes, path: Path) -> bytes:
    """The engine of a file with the weights of `model`, which are in the folder of `path`; it can be refitted again."""
    logger = logger_class(trt)()
    runtime = trt.Runtime(logger)  # must live longer than the engine
    engine = runtime.deserialize_cuda_engine(file.read_bytes())
    if engine is None:
        raise BuildError(f"{file} cannot be opened by {trt.__name__} {trt.__version__}: {logger.last()}")
    refitter = trt.Refitter(engine, logger)
    parser = trt.OnnxParserRefitter(refitter, logger)
    if not parser.refit_from_bytes(model, str(path)):
        raise BuildError(f"{path.name} does not fit {file}: {parse_errors(parser) or logger.last()}")
    if not refitter.refit_cuda_engine():
        missing = ", ".join(refitter.get_missing_weights()[:3])
        raise BuildError(f"{file} did not take the weights of {path.name} ({missing or logger.last()})")
    config = engine.create_serialization_config()
    if hasattr(trt.SerializationFlag, "INCLUDE_REFIT"):  # older versions stay refittable by default
        config.set_flag(trt.SerializationFlag.INCLUDE_REFIT)
    return bytes(engine.serialize_with_config(config))

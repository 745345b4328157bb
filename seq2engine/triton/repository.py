"""A Triton model repository of a bundle, ready for `tritonserver --model-repository REPO`.

    REPO/NAME/                 the model: text or ids in, text, tokens and scores out (backend.py)
         config.pbtxt  description.json  requirements.txt  1/model.py  1/bundle/
         NAME_encoder/         the graphs or engines alone, for those who write their own loop
         NAME_decoder_step/    config.pbtxt  1/model.onnx or 1/model.plan

Files of the bundle are hard links where the file system has them: bundles are never changed in place.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seq2engine import __version__
from seq2engine.common.atomic_folders import new_folder, sha256_of
from seq2engine.errors import BundleError, RequestError
from seq2engine.export.artifact.bundle import MANIFEST, Bundle
from seq2engine.export.artifact.default_precision import default_precision
from seq2engine.export.artifact.engines import ENGINES
from seq2engine.export.artifact.files import CONFIG
from seq2engine.export.artifact.passport import Passport
from seq2engine.export.artifact.profiles import Range, ShapeRanges
from seq2engine.export.contract import GRAPHS, TensorSpec
from seq2engine.export.engines.instances import InstancePlan, Machine, plan_instances, sizes_from_bundle
from seq2engine.export.engines.memory import available_memory
from seq2engine.runtime.defaults import defaults_of
from seq2engine.runtime.encoder_inputs import check_takes_text
from seq2engine.runtime.text.batching import BATCH
from seq2engine.runtime.threads import derived_speed, threads_for, usable_cores
from seq2engine.runtime.trt.selection import choose_engine

from .config_text import Tensor, Warmup, decoding_config, graph_config

DESCRIPTION = "description.json"  # describes the model; it marks a folder as ours
FORMAT = 1
PACKAGES = ("numpy", "onnxruntime", "sentencepiece", "tokenizers")  # whose versions the environment should have
WARM_SIZES = {"B": 1, "S": 8, "K": 1, "M": 8, "L": 8}  # of the requests that warm a graph up

MODEL_PY = '''"""Decodes with continuous batching across requests; all of it is seq2engine.triton.backend."""

try:
    from seq2engine.triton.backend import TritonPythonModel
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error.name} is not installed in this environment; install with: pip install -r requirements.txt "
        "(beside config.pbtxt), and start tritonserver with that environment's bin folder first in PATH"
    ) from None

__all__ = ["TritonPythonModel"]
'''


@dataclass(frozen=True)
class TritonOptions:
    """How the model runs in Triton. `instances` are on a CPU processes, on a GPU processes of each GPU.

    `rows` and `instances` None: as planned for this machine or, on a GPU, for `gpu_memory` bytes of each, if given.
    """

    name: str | None = None  # None: the bundle's folder
    backend: str = "onnxruntime"
    precision: str | None = None
    engine: str | None = None
    provider: str | None = None
    threads: int | None = None
    deterministic: bool = False
    rows: int | None = None
    queue: int = 256
    timeout: float = 60.0
    max_beams: int = 32
    instances: int | None = None
    gpu_memory: int | None = None
    ids: bool = False
    strings: bool = False  # text as BYTES too; not with numpy 2 on servers as old as 2.51

    @property
    def gpu(self) -> bool:
        return self.backend == "tensorrt" or self.provider not in (None, "cpu")


@dataclass(frozen=True)
class WrittenModels:
    """The folders, that of the model which decodes first, and how many instances it has."""

    folders: tuple[Path, ...]
    plan: InstancePlan


def repository_from_bundle(
    bundle: Bundle, repository: Path, options: TritonOptions, force: bool = False
) -> WrittenModels:
    """Writes the models of a bundle. Other models of the repository stay."""
    check_takes_text(bundle.config, bundle.root)
    if options.backend not in ("onnxruntime", "tensorrt"):
        raise RequestError(f"backend {options.backend} in Triton, expected onnxruntime or tensorrt")
    name = options.name or bundle.root.resolve().name
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or name.startswith("."):
        raise RequestError(f"model name {name!r}, expected letters, digits, _ - and .; give another with: --name")
    precision = options.precision or default_precision(bundle, options.backend, options.engine)
    chosen = dataclasses.replace(options, name=name, precision=precision)
    engine = choose_engine(bundle, precision, options.engine) if options.backend == "tensorrt" else None
    if engine is not None:
        chosen = dataclasses.replace(chosen, engine=engine[0].name)
    plan = plan_of(bundle, chosen, None if engine is None else engine[1])
    chosen = dataclasses.replace(chosen, rows=plan.rows, instances=plan.instances)
    written = [write_graph(bundle, repository, chosen, graph, engine, force) for graph in GRAPHS]
    target = repository / name
    with new_folder(target, force, DESCRIPTION) as folder:
        (folder / "config.pbtxt").write_text(decoding_config(name, plan.instances, chosen.gpu, options.strings))
        (folder / "requirements.txt").write_text("".join(f"{line}\n" for line in requirements(chosen)))
        version = folder / "1"
        version.mkdir()
        (version / "model.py").write_text(MODEL_PY)
        for relative in files_of(bundle, chosen):
            link(bundle.inside(relative), version / "bundle" / relative)
        described = {**description(chosen, sha256_of(version / "bundle" / MANIFEST)), "plan": plan.reason}
        (folder / DESCRIPTION).write_text(json.dumps(described, indent=2) + "\n")
    return WrittenModels((target, *(folder for folder in written if folder is not None)), plan)


def plan_of(bundle: Bundle, options: TritonOptions, passport: Passport | None) -> InstancePlan:
    """Instances and rows of the model, by the function that `seq2engine plan` calls."""
    assert options.precision is not None
    config, beam = bundle.config, defaults_of(bundle).values.get("beam", 1)
    one = Range(1, 1, 1)
    longest = [Range(1, most, most) for most in (config.max_source, config.max_target)]
    ranges = ShapeRanges(one, Range(beam, beam, beam), *longest) if passport is None else passport.ranges
    memory = options.gpu_memory if options.gpu else available_memory()
    return plan_instances(
        sizes_from_bundle(bundle, options.precision, ranges),
        Machine(usable_cores(), memory, options.gpu),
        threads_for(config, derived_speed(usable_cores())) if options.threads is None else options.threads,
        BATCH if passport is None else passport.ranges.batch.max,
        options.rows,
        options.instances,
    )


def description(options: TritonOptions, manifest: str) -> dict[str, Any]:
    made = {"seq2engine": __version__, "manifest_sha256": manifest}
    return {"format": FORMAT, **made, **dataclasses.asdict(options)}


def requirements(options: TritonOptions) -> Iterator[str]:
    """The packages of this environment, which Triton's Python must have as well."""
    yield f"seq2engine=={__version__}"
    for package in PACKAGES:
        yield f"{package}=={importlib.metadata.version(package)}"
    if options.gpu:
        yield "seq2engine[gpu]"


def files_of(bundle: Bundle, options: TritonOptions) -> Iterator[str]:
    """What a session of the bundle reads."""
    assert options.precision is not None
    yield from (MANIFEST, CONFIG, *bundle.manifest.companions)
    for graph in GRAPHS:
        entry = bundle.graph(options.precision, graph)
        yield from dict.fromkeys((entry.path, entry.data_path))
    if options.engine is not None:
        folder = bundle.root / ENGINES / options.engine
        yield from (str(path.relative_to(bundle.root)) for path in sorted(folder.rglob("*")) if path.is_file())


def write_graph(
    bundle: Bundle,
    repository: Path,
    options: TritonOptions,
    graph: str,
    engine: tuple[Path, Passport] | None,
    force: bool,
) -> Path | None:
    """One graph or engine as a model of its own; None for one of TensorRT-RTX, for which Triton has no backend."""
    assert options.name is not None
    assert options.precision is not None
    instances = options.instances or 1
    if engine is not None and engine[1].flavour != "tensorrt":
        return None
    target = repository / f"{options.name}_{graph}"
    with new_folder(target, force, DESCRIPTION) as folder:
        (folder / "1").mkdir()
        if engine is None:
            spec = bundle.specs(options.precision)[graph]
            inputs, outputs = tensors_of(spec.inputs), tensors_of(spec.outputs)
            warm = {tensor.name: tensor.shape(sizes_of(tensor, spec.inputs)) for tensor in spec.inputs}
            path = bundle.graph_path(options.precision, graph)
            entry = bundle.graph(options.precision, graph)
            link(path, folder / "1" / "model.onnx")
            link(bundle.inside(entry.data_path), folder / "1" / Path(entry.data_path).name)
            platform = "onnxruntime_onnx"
        else:
            entry_of = engine[1].engines[graph]
            inputs = tuple(Tensor(one.name, one.dtype, one.axes) for one in entry_of.inputs)
            outputs = tuple(Tensor(one.name, one.dtype, one.axes) for one in entry_of.outputs)
            warm = {one.name: one.shapes[0] for one in entry_of.inputs}
            link(engine[0] / entry_of.file, folder / "1" / "model.plan")
            platform = "tensorrt_plan"
        warmup = Warmup("smallest" if engine else "small", warm)
        text = graph_config(target.name, platform, inputs, outputs, instances, options.gpu, warmup)
        (folder / "config.pbtxt").write_text(text)
        (folder / DESCRIPTION).write_text(json.dumps(description(options, ""), indent=2) + "\n")
    return target


def tensors_of(specs: Iterable[TensorSpec]) -> tuple[Tensor, ...]:
    return tuple(Tensor(spec.name, spec.dtype, spec.axes) for spec in specs)


def sizes_of(tensor: TensorSpec, inputs: Iterable[TensorSpec]) -> dict[str, int]:
    """Sizes of every letter; a growing cache has one step less than its mask."""
    growing = any("M" in one.axes for one in inputs) and any("L" in one.axes for one in inputs)
    return {**WARM_SIZES, "L": WARM_SIZES["M"] - 1 if growing else WARM_SIZES["L"]}


def link(source: Path, target: Path) -> None:
    """A hard link or, across file systems, a copy."""
    if not source.is_file():
        raise BundleError(f"{source} is missing, though the bundle lists it; export it again")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)

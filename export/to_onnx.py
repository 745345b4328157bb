"""Model to bundle: the two graphs of the contract in every requested precision, checked before they are kept."""

from __future__ import annotations

import dataclasses
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import isfinite, isinf
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from seq2engine.common.atomic_folders import keep_files, new_folder, sha256_of
from seq2engine.common.progress import Progress, silent
from seq2engine.errors import BundleError, ExportError
from seq2engine.model.checkpoint import CONFIG, copy_companions, load_checkpoint, read_origin, write_checkpoint
from seq2engine.model.config import ModelConfig
from seq2engine.model.layers import KeyValue, append_slots, write_slots
from seq2engine.model.transformer import Transformer

from .artifact.bundle import (
    GENERATION,
    MANIFEST,
    REFERENCE,
    TOKENIZER,
    Bundle,
    GraphEntry,
    Manifest,
    open_bundle,
    write_text,
)
from .audit import audit_graph
from .contract import DEFAULT_PRECISIONS, GRAPHS, HALF, PRECISIONS, GraphSpec, check_choices, graph_specs, opset_for
from .lowering import onnx_from_module
from .precision.census import audit_precision, census_of
from .precision.fp32_nodes import Calibration, fp32_nodes_of
from .precision.passes import PASSES, SMOOTHED

Calibrate = Callable[[dict[str, onnx.ModelProto]], Calibration]  # decodes with the fp32 graphs, records magnitudes


class EncoderGraph(nn.Module):
    """`encode` with the outputs in the contract's order."""

    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model

    def forward(self, source: Tensor, source_mask: Tensor) -> tuple[Tensor, ...]:
        states, cross = self.model.encode(source, source_mask)
        return (*(tensor for pair in cross for tensor in pair), states)


class StaticStepGraph(nn.Module):
    """`decode_step` over a cache that is written in place. `others` are slot_position where the model has relative
    positions, source_mask, then cross_k.0, cross_v.0, ..., self_k.0, ..."""

    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, position: Tensor, write_index: Tensor, self_mask: Tensor, *others: Tensor
    ) -> tuple[Tensor, ...]:
        slot_position, source_mask, cross, cache = other_inputs(others, self.model)
        logits, updated = self.model.decode_step(
            tokens, position, write_index, self_mask, source_mask, cross, cache, record_write, slot_position
        )
        return (logits, *(tensor for pair in updated for tensor in pair))


class GrowingStepGraph(nn.Module):
    """`decode_step` over a cache that grows by K slots; it needs no place to write to."""

    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, position: Tensor, self_mask: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        slot_position, source_mask, cross, cache = other_inputs(others, self.model)
        logits, updated = self.model.decode_step(
            tokens, position, position, self_mask, source_mask, cross, cache, append_slots, slot_position
        )
        return (logits, *(tensor for pair in updated for tensor in pair))


STEP_GRAPHS = {"static": StaticStepGraph, "growing": GrowingStepGraph}


def other_inputs(
    others: Sequence[Tensor], model: Transformer
) -> tuple[Tensor | None, Tensor, list[KeyValue], list[KeyValue]]:
    """The flat tensors of the contract: slot_position, source_mask, cross pairs and cache pairs of every layer."""
    first, count = int(model.config.relative), len(model.decoder)
    places = range(first + 1, first + 1 + 4 * count, 2)
    pairs = [(others[place], others[place + 1]) for place in places]
    return others[0] if first else None, others[first], pairs[:count], pairs[count:]


def record_write(cache: Any, new: Any, write_index: Any) -> Any:
    """`write_slots` as one call of the traced graph (its arguments are torch.fx proxies): a TensorScatter later."""
    return cache.tracer.create_proxy("call_function", write_slots, (cache, new, write_index), {})


def graphs_from_model(model: Transformer, cache_form: str = "static") -> dict[str, onnx.ModelProto]:
    """Both graphs in fp32, in memory, audited against the contract."""
    specs = graph_specs(model.config, "fp32", cache_form)
    graphs = {name: graph_from_model(model, name, cache_form) for name in GRAPHS}
    for name in GRAPHS:
        audit_graph(graphs[name], specs[name])
    return graphs


def graph_from_model(model: Transformer, name: str, cache_form: str) -> onnx.ModelProto:
    """One graph in fp32, in memory, not audited. The same model gives the same bytes."""
    module = EncoderGraph(model) if name == "encoder" else STEP_GRAPHS[cache_form](model)
    spec = graph_specs(model.config, "fp32", cache_form)[name]
    return onnx_from_module(module, spec, opset_for(model.config, cache_form))


def onnx_from_model(
    model: Transformer,
    folder: str | os.PathLike[str],
    precisions: Sequence[str] = DEFAULT_PRECISIONS,
    cache_form: str = "static",
    force: bool = False,
    progress: Progress = silent,
    companions: Path | None = None,
    calibrate: Calibrate | None = None,
) -> Bundle:
    """Writes a bundle as `seq2engine.exporting` asks for it, which is how bundles for use are made, and opens it.

    An existing bundle of the same weights gets the missing precisions. With `force` it is replaced: only what
    an export writes. Engines, reports and other files stay; engines of other graphs than the new
    ones are stale and are not run.

    `companions` is the checkpoint's folder: its generation.json and its tokenizer go into the bundle. `calibrate` runs
    the fp32 graphs (runtime/ort/calibration.py) where a precision computes in fp16 or bf16: nodes whose numbers
    fp16 cannot hold stay in fp32. Without it, only weights are checked, and a model with RMS norms is refused. For w8a8
    it finds the channels that are smoothed; without it, none is.
    """
    check_request(model, precisions, cache_form)
    target = Path(folder)
    there = None if force else bundle_of(model, target, cache_form)
    if there is not None:
        refuse_if_complete(there, precisions)
        return added(there, model, precisions, progress, calibrate)

    def keep(beside: Path) -> None:
        keep_files(target, beside, partial(is_own, own_files(target)))

    with new_folder(target, force, marker=MANIFEST, keep=keep) as beside:
        progress("export: reference weights", 0.0)
        write_checkpoint(model, beside)
        copied = [] if companions is None else copy_companions(companions, beside)
        progress("export: reference weights", 1.0)
        made = graphs_in(model, precisions, cache_form, progress, calibrate)
        manifest = Manifest(
            config=model.config,
            cache_form=cache_form,
            checkpoint_sha256=sha256_of(beside / REFERENCE),
            companions={path.relative_to(beside).as_posix(): sha256_of(path) for path in copied},
            graphs={precision: made.write(precision, beside / "onnx" / precision) for precision in made.precisions},
            calibration=made.calibration,
            made_by=versions(),
            origin=read_origin(companions),
        )
        (beside / MANIFEST).write_text(manifest.to_json())
    return open_bundle(target)


def check_request(model: Transformer, precisions: Sequence[str], cache_form: str) -> None:
    if not precisions:
        raise ExportError(f"no precision asked for; name at least one of {', '.join(PRECISIONS)}")
    for precision in precisions:
        check_choices(precision, cache_form)
    if any(parameter.dtype != torch.float32 for parameter in model.parameters()):
        raise ExportError("only a model in float32 can be exported; precision is chosen with --precision")


def add_precisions(
    bundle: Bundle | str | os.PathLike[str],
    precisions: Sequence[str],
    progress: Progress = silent,
    calibrate: Calibrate | None = None,
) -> Bundle:
    """Adds graphs in further precisions to a bundle, from its own reference weights; touches nothing else in it."""
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(bundle)
    for precision in precisions:
        check_choices(precision, opened.cache_form)
    opened.reference_path()  # which checks the file
    return added(opened, load_checkpoint(opened.root), precisions, progress, calibrate)


def refuse_if_complete(bundle: Bundle, precisions: Sequence[str]) -> None:
    if set(precisions) <= set(bundle.precisions):
        held = " and ".join(precisions)
        raise BundleError(f"{bundle.root} holds {held} of this model already; add --force to write it anew")


def added(
    bundle: Bundle, model: Transformer, precisions: Sequence[str], progress: Progress, calibrate: Calibrate | None
) -> Bundle:
    """The same for a loaded model. The manifest is written last: until then the bundle is unchanged."""
    lacking = [precision for precision in precisions if precision not in bundle.precisions]
    if not lacking:
        return bundle
    made = graphs_in(model, lacking, bundle.cache_form, progress, calibrate)
    entries = dict(bundle.manifest.graphs)
    for precision in made.precisions:
        # Files that are not in the manifest were left by a killed export.
        with new_folder(bundle.place("onnx", precision), force=True, marker=f"{GRAPHS[0]}.onnx") as beside:
            entries[precision] = made.write(precision, beside)
    manifest = dataclasses.replace(
        bundle.manifest, graphs=entries, calibration=made.calibration or bundle.manifest.calibration
    )
    write_text(bundle.root / MANIFEST, manifest.to_json())
    return open_bundle(bundle.root)


def bundle_of(model: Transformer, folder: Path, cache_form: str) -> Bundle | None:
    """The bundle in a folder, if it is of the same model."""
    if not (folder / MANIFEST).is_file():
        return None
    with suppress(BundleError):  # one that cannot be used is ignored
        bundle = open_bundle(folder)
        if bundle.config == model.config and bundle.cache_form == cache_form:
            with tempfile.TemporaryDirectory() as beside:
                write_checkpoint(model, Path(beside))
                same = sha256_of(Path(beside) / REFERENCE) == bundle.manifest.checkpoint_sha256
            return bundle if same else None
    return None


def own_files(folder: Path) -> set[str] | None:
    """What an export wrote into a bundle, by its manifest; None if it has no readable manifest."""
    with suppress(BundleError):
        manifest = open_bundle(folder).manifest
        graphs = [entry for by_name in manifest.graphs.values() for entry in by_name.values()]
        files = [path for entry in graphs for path in (entry.path, entry.data_path)]
        return {MANIFEST, REFERENCE, CONFIG, *manifest.companions, *files}
    return None


def is_own(files: set[str] | None, path: Path) -> bool:
    """Whether a path in a bundle is an export's; without a manifest, by its place."""
    if files is not None:
        return path.as_posix() in files
    return path.parts[0] in (MANIFEST, REFERENCE, CONFIG, GENERATION, TOKENIZER, "onnx")


@dataclass(frozen=True)
class Graphs:
    """Both graphs of a model in fp32, and all it takes to write them in the precisions asked for."""

    config: ModelConfig
    cache_form: str
    precisions: tuple[str, ...]
    fp32: dict[str, onnx.ModelProto]
    fp32_nodes: dict[str, dict[str, str]]  # graph -> nodes that stay in fp32 where the rest is fp16 -> why
    channels: dict[str, dict[str, np.ndarray]]  # graph -> tensor -> the largest magnitude of each channel
    calibration: dict[str, Any]  # which decodes chose and measured them
    progress: Progress

    def write(self, precision: str, folder: Path) -> dict[str, GraphEntry]:
        """Writes both graphs in one precision into a folder, for `onnx/<precision>` of a bundle."""
        specs = graph_specs(self.config, precision, self.cache_form)
        folder.mkdir(parents=True, exist_ok=True)
        entries = {}
        for done, name in enumerate(GRAPHS):
            self.progress(f"export: {precision}", done / len(GRAPHS))
            kept = self.fp32_nodes[name] if PRECISIONS[precision] == "float16" else {}
            graph = PASSES[precision](self.fp32[name], kept, self.channels[name])
            entries[name] = write_graph(graph, specs[name], precision, folder, kept)
        self.progress(f"export: {precision}", 1.0)
        return entries


def graphs_in(
    model: Transformer, precisions: Sequence[str], cache_form: str, progress: Progress, calibrate: Calibrate | None
) -> Graphs:
    progress("export: graphs", 0.0)
    fp32 = graphs_from_model(model, cache_form)
    progress("export: graphs", 1.0)
    half = any(PRECISIONS[precision] in HALF for precision in precisions)
    if half and calibrate is None and model.config.norm_kind == "rms":  # T5's residual leaves fp16's range
        raise ExportError(
            f"{' '.join(precisions)} of a T5 without calibration: it is not known which of its values fp16 can hold; "
            "export it with seq2engine.onnx_from_model or: seq2engine export CHECKPOINT DIR"
        )
    found = calibrate(fp32) if calibrate is not None and needs_calibration(precisions) else None
    if found is not None and (lost := not_numbers(found, fp32)):
        raise ExportError(f"{lost} is not finite when the model decodes {found.corpus} in fp32; check its weights")
    fp32_nodes = {
        name: fp32_nodes_of(fp32[name], found.largest[name] if found else {}) if half else {} for name in GRAPHS
    }
    calibration = {"corpus": found.corpus, "sources": found.sources, "steps": found.steps} if found else {}
    once = tuple(dict.fromkeys(precisions))  # each precision is written once
    channels = {name: found.channels[name] if found else {} for name in GRAPHS}
    return Graphs(model.config, cache_form, once, fp32, fp32_nodes, channels, calibration, progress)


def needs_calibration(precisions: Sequence[str]) -> bool:
    """Whether magnitudes matter: fp16 may not hold them, and smoothing for int8 activations needs those of channels."""
    return any(PRECISIONS[precision] in HALF or precision in SMOOTHED for precision in precisions)


def not_numbers(calibration: Calibration, graphs: dict[str, onnx.ModelProto]) -> str:
    """A tensor that was infinite or NaN in fp32 already; '' if there is none. A bias of -inf masks tokens: no fault."""
    masked = {(graph, name) for graph, model in graphs.items() for name in masked_tensors(model)}
    measured = ((graph, name, size) for graph, found in calibration.largest.items() for name, size in found.items())
    lost = (
        f"{graph} {name}"
        for graph, name, size in measured
        if not (isfinite(size) or (isinf(size) and (graph, name) in masked))
    )
    return next(lost, "")


def masked_tensors(model: onnx.ModelProto) -> set[str]:
    """Sums with a weight that is -inf in places and a number elsewhere: -inf there, if the other term is finite."""
    biases = [weight for weight in model.graph.initializer if len(weight.dims) == 1]
    weights = {bias.name: numpy_helper.to_array(bias) for bias in biases}
    masks = {name for name, bias in weights.items() if (bias == -np.inf).any() and (bias < np.inf).all()}
    return {node.output[0] for node in model.graph.node if node.op_type == "Add" and masks & {*node.input}}


def write_graph(
    graph: onnx.ModelProto, spec: GraphSpec, precision: str, folder: Path, fp32_nodes: dict[str, str]
) -> GraphEntry:
    """One graph in one precision: audited, saved with its weights in a second file, checked as saved."""
    audit_graph(graph, spec)
    audit_precision(graph, precision, fp32_nodes)
    census = census_of(graph)
    path, data = folder / f"{spec.name}.onnx", folder / f"{spec.name}.onnx.data"
    saved = onnx.ModelProto()
    saved.CopyFrom(graph)  # saving moves the weights out of the message
    onnx.save_model(saved, path, save_as_external_data=True, location=data.name, size_threshold=1024)
    data.touch()  # of a model so small that all its weights are in the graph
    onnx.checker.check_model(path, full_check=True)
    return GraphEntry(
        path=f"onnx/{precision}/{path.name}",
        sha256=sha256_of(path),
        data_path=f"onnx/{precision}/{data.name}",
        data_sha256=sha256_of(data),
        opset=graph.opset_import[0].version,
        inputs=tuple(str(tensor) for tensor in spec.inputs),
        outputs=tuple(str(tensor) for tensor in spec.outputs),
        census=census,
        fp32_nodes=fp32_nodes,
    )


def versions() -> dict[str, str]:
    from seq2engine import __version__

    return {
        "seq2engine": __version__,
        "torch": torch.__version__,
        "onnx": onnx.__version__,
        "python": platform.python_version(),
    }

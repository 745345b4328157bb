"""Model to bundle: the two graphs of the contract in every asked precision, checked before they are kept."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from seq2engine.folders import new_folder, sha256_of
from seq2engine.progress import Progress, silent

from ..errors import ExportError
from ..model.checkpoint import copy_companions, write_checkpoint
from ..model.layers import append_slots, write_slots
from ..model.transformer import Transformer
from .audit import audit_graph
from .bundle import MANIFEST, REFERENCE, Bundle, GraphEntry, Manifest, open_bundle
from .census import audit_precision, census_of
from .contract import DEFAULT_PRECISIONS, GRAPHS, OPSET, PRECISIONS, GraphSpec, check_choices, graph_specs
from .islands import RangeScan, islands_of
from .lowering import onnx_from_module
from .precision import PASSES

Scan = Callable[[dict[str, onnx.ModelProto]], RangeScan]  # decodes with the fp32 graphs and notes what they held


class EncoderGraph(nn.Module):
    """`encode` with the outputs in the contract's order."""

    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model

    def forward(self, source_ids: Tensor, source_mask: Tensor) -> tuple[Tensor, ...]:
        states, cross = self.model.encode(source_ids, source_mask)
        return (*(tensor for pair in cross for tensor in pair), states)


class StaticStepGraph(nn.Module):
    """`decode_step` over a cache that is written in place; `layers` are cross_k.0, cross_v.0, ..., self_k.0, ..."""

    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model

    def forward(
        self,
        tokens: Tensor,
        position: Tensor,
        write_index: Tensor,
        self_mask: Tensor,
        source_mask: Tensor,
        *layers: Tensor,
    ) -> tuple[Tensor, ...]:
        cross, cache = layer_pairs(layers, len(self.model.decoder))
        logits, updated = self.model.decode_step(
            tokens, position, write_index, self_mask, source_mask, cross, cache, record_write
        )
        return (logits, *(tensor for pair in updated for tensor in pair))


class GrowingStepGraph(nn.Module):
    """`decode_step` over a cache that grows by K slots; it needs no place to write to."""

    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, position: Tensor, self_mask: Tensor, source_mask: Tensor, *layers: Tensor
    ) -> tuple[Tensor, ...]:
        cross, cache = layer_pairs(layers, len(self.model.decoder))
        logits, updated = self.model.decode_step(
            tokens, position, position, self_mask, source_mask, cross, cache, append_slots
        )
        return (logits, *(tensor for pair in updated for tensor in pair))


STEP_GRAPHS = {"static": StaticStepGraph, "growing": GrowingStepGraph}


def layer_pairs(layers: Sequence[Tensor], count: int) -> tuple[list[tuple[Tensor, Tensor]], ...]:
    """The flat tensors of the contract as cross pairs and cache pairs, one of each per decoder layer."""
    pairs = [(layers[2 * i], layers[2 * i + 1]) for i in range(2 * count)]
    return pairs[:count], pairs[count:]


def record_write(cache: Any, new: Any, write_index: Any) -> Any:
    """`write_slots` as one call of the traced graph (its arguments are torch.fx proxies): a TensorScatter later."""
    return cache.tracer.create_proxy("call_function", write_slots, (cache, new, write_index), {})


def graphs_from_model(model: Transformer, cache_form: str = "static") -> dict[str, onnx.ModelProto]:
    """Both graphs in fp32, in memory, audited against the contract."""
    specs = graph_specs(model.config, "fp32", cache_form)
    modules = {"encoder": EncoderGraph(model), "decoder_step": STEP_GRAPHS[cache_form](model)}
    graphs = {name: onnx_from_module(modules[name], specs[name], OPSET[cache_form]) for name in GRAPHS}
    for name in GRAPHS:
        audit_graph(graphs[name], specs[name])
    return graphs


def onnx_from_model(
    model: Transformer,
    folder: str | os.PathLike[str],
    precisions: Sequence[str] = DEFAULT_PRECISIONS,
    cache_form: str = "static",
    force: bool = False,
    progress: Progress = silent,
    companions: Path | None = None,
    scan: Scan | None = None,
) -> Bundle:
    """Writes a bundle with both graphs in each precision and the reference weights, and opens it.

    `companions` is the checkpoint's folder: its generation.json and its tokenizer go into the bundle. `scan` runs the
    fp32 graphs (runtime/range_scan.py has one) where a precision computes in fp16: what that could not hold stays in
    fp32. Without one, only weights are judged.
    """
    if not precisions:
        raise ExportError(f"no precision asked for; name at least one of {', '.join(PRECISIONS)}")
    for precision in precisions:
        check_choices(precision, cache_form)
    if any(parameter.dtype != torch.float32 for parameter in model.parameters()):
        raise ExportError("only a model in float32 can be exported; precision is chosen with --precision")
    target = Path(folder)
    with new_folder(target, force, marker=MANIFEST) as beside:
        progress("export: reference weights", 0.0)
        write_checkpoint(model, beside)
        copied = [] if companions is None else copy_companions(companions, beside)
        progress("export: reference weights", 1.0)
        progress("export: graphs", 0.0)
        graphs = graphs_from_model(model, cache_form)
        progress("export: graphs", 1.0)
        half = any(PRECISIONS[precision] == "float16" for precision in precisions)
        found = scan(graphs) if scan is not None and half else None
        islands = {
            name: islands_of(graphs[name], found.largest[name] if found else {}) if half else {} for name in GRAPHS
        }
        entries: dict[str, dict[str, GraphEntry]] = {}
        for precision in dict.fromkeys(precisions):  # one asked for twice is written once
            specs = graph_specs(model.config, precision, cache_form)
            entries[precision] = {}
            for done, name in enumerate(GRAPHS):
                progress(f"export: {precision}", done / len(GRAPHS))
                kept = islands[name] if PRECISIONS[precision] == "float16" else {}
                entries[precision][name] = write_graph(graphs[name], specs[name], precision, beside, kept)
            progress(f"export: {precision}", 1.0)
        manifest = Manifest(
            config=model.config,
            cache_form=cache_form,
            checkpoint_sha256=sha256_of(beside / REFERENCE),
            companions={path.relative_to(beside).as_posix(): sha256_of(path) for path in copied},
            graphs=entries,
            scan={"corpus": found.corpus, "sources": found.sources, "steps": found.steps} if found else {},
            made_by=versions(),
        )
        (beside / MANIFEST).write_text(manifest.to_json())
    return open_bundle(target)


def write_graph(
    fp32: onnx.ModelProto, spec: GraphSpec, precision: str, root: Path, islands: dict[str, str]
) -> GraphEntry:
    """One graph in one precision: rewritten, audited, saved with its weights beside it, checked as saved."""
    graph = PASSES[precision](fp32, islands)
    audit_graph(graph, spec)
    audit_precision(graph, precision, islands)
    census = census_of(graph)
    folder = root / "onnx" / precision
    folder.mkdir(parents=True, exist_ok=True)
    path, data = folder / f"{spec.name}.onnx", folder / f"{spec.name}.onnx.data"
    saved = onnx.ModelProto()
    saved.CopyFrom(graph)  # saving moves the weights out of the message
    onnx.save_model(saved, path, save_as_external_data=True, location=data.name, size_threshold=1024)
    onnx.checker.check_model(path, full_check=True)
    return GraphEntry(
        path=path.relative_to(root).as_posix(),
        sha256=sha256_of(path),
        data_path=data.relative_to(root).as_posix(),
        data_sha256=sha256_of(data),
        opset=graph.opset_import[0].version,
        inputs=tuple(str(tensor) for tensor in spec.inputs),
        outputs=tuple(str(tensor) for tensor in spec.outputs),
        census=census,
        islands=islands,
    )


def versions() -> dict[str, str]:
    from seq2engine import __version__

    return {
        "seq2engine": __version__,
        "torch": torch.__version__,
        "onnx": onnx.__version__,
        "python": platform.python_version(),
    }

"""Checks what a backend's form adds to a graph: screening tables, weights of a folded query.

Tensors that a form keeps must be the file's own. Those that it adds are checked by their purpose,
not by the code that made them: an int8 table by its distance to the original table, a folded matmul by its
results for some inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto

from seq2engine.errors import BuildError, ExportError, GraphError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.artifact.engines import engine_names, open_passport
from seq2engine.export.contract import FOR_CPUS, GRAPHS, Census
from seq2engine.export.engines.to_engine import graph_for_tensorrt
from seq2engine.export.ort_form import OrtForm
from seq2engine.export.ort_forms import int8_matmul
from seq2engine.export.ort_forms.gemm_projection import PACKED
from seq2engine.export.ort_forms.interface import MOST
from seq2engine.export.precision.census import check_engine

from ...ort.graphs import graph_in_form, model_from_bundle
from ...ort.session import OrtSettings
from ..levels.findings import Finding
from ..levels.weights import WeightResult
from .folded import folded_problems
from .stored import StoredGraph
from .structure import finding, module_of

FORMS = ("candidates/", "cross_rows/", "projection/", "row_products/", "screening/", "trt/")
COUNTING = ("trt/slots", "trt/beams")  # 0, 1, 2, ... along the last axis
SMALL = 64  # numbers: constants of a form that are shapes, axes and places
BLOCK = 2048  # tokens of a table that are compared at once
ULPS = 2.0**-20  # of fp32 norms and scales
BIAS_ROUNDINGS = 6  # a bias is divided, multiplied and added, in the rough sum and in the exact one


def derived_results(
    bundle: Bundle, precision: str, backend: str, settings: OrtSettings, engine: str | None
) -> Iterator[WeightResult]:
    """The graphs of a bundle as ONNX Runtime or the engines of this precision get them, and the engines' constants."""
    paths = {name: bundle.graph_path(precision, name) for name in GRAPHS}
    stored = {name: StoredGraph.from_file(path) for name, path in paths.items()}
    if backend == "onnxruntime":
        form = settings.form(model_from_bundle(bundle, precision)).by_nodes
        for name, path in paths.items():
            yield derived_result(name, "ONNX Runtime", stored[name], partial(ort_graph, name, path, form))
    elif precision not in FOR_CPUS:
        yield from engine_results(bundle, precision, engine, stored)


def engine_results(
    bundle: Bundle, precision: str, engine: str | None, stored: dict[str, StoredGraph]
) -> Iterator[WeightResult]:
    for folder in engine_names(bundle) if engine is None else [engine]:
        _, passport = open_passport(bundle, folder)
        if passport.precision != precision:
            continue
        for name in GRAPHS:
            profiles, slots = passport.profiles, passport.slots
            make = partial(graph_for_tensorrt, bundle, precision, name, profiles, slots)
            result = derived_result(name, f"TensorRT ({folder})", stored[name], make)
            held = passport.engines[name].weight_bytes
            yield with_engine_constants(result, held, bundle.graph(precision, name).census, precision)


def with_engine_constants(result: WeightResult, held: dict[str, int], census: Census, precision: str) -> WeightResult:
    """Adds a fault if the bytes of constants that were read from the engine are not the graph's; none: not readable."""
    if not held:
        return result
    try:
        check_engine(held, census, precision, result.name)
    except BuildError as error:
        fault = finding(result.graph, "", "", result.graph, "engine", str(error))
        return dataclasses.replace(result, faults=(*result.faults, fault))
    return result


def ort_graph(name: str, path: Path, form: OrtForm) -> bytes | None:
    made = graph_in_form(name, path, form)
    return None if made is None else made.graph


def derived_result(name: str, form: str, file: StoredGraph, make: Callable[[], bytes | None]) -> WeightResult:
    """One graph in a backend's form; a form that cannot be made is a fault."""
    try:
        made = make()
    except (GraphError, ExportError) as error:
        node = getattr(error, "node", "")
        fault = finding(name, node, "", module_of(node) or name, "crash", str(error))
        return WeightResult(name, form, len(file.model.graph.node), 0, 0, {}, (fault,))
    model = file.model if made is None else onnx.load_from_string(made)
    graph = StoredGraph(model, file.folder)
    kept = [one for one in graph.tensors if one in file.tensors]
    added = [one for one in graph.tensors if one not in file.tensors]
    faults = [fault for one in kept for fault in kept_faults(name, one, graph, file)]
    faults += added_faults(name, added, graph, file)
    numbers = sum(int(np.prod(tensor.dims)) for tensor in graph.tensors.values())
    passes = {"as in the file": len(kept)}
    return WeightResult(name, form, len(model.graph.node), len(added), numbers, passes, tuple(faults))


def kept_faults(graph: str, name: str, have: StoredGraph, file: StoredGraph) -> Iterator[Finding]:
    if have.tensors[name].SerializeToString() != file.tensors[name].SerializeToString():
        yield fault_of(graph, name, have, "a form has changed a tensor that it should keep")


def added_faults(graph: str, added: list[str], have: StoredGraph, file: StoredGraph) -> Iterator[Finding]:
    """What a form has made: screening tables, folded weights, and small constants."""
    known: set[str] = set()
    if "screening/int8" in added:
        known |= {f"screening/{name}" for name in ("int8", "scale", "bounds", "always", "bias", "least_bias")}
        yield from (fault_of(graph, name, have, problem) for name, problem in screening_problems(have))
    folded = [name for name in added if name.startswith("trt/") and name.count("/") > 1]
    if folded:
        problems, explained = folded_problems(folded, have, file)
        known |= explained
        yield from (fault_of(graph, name, have, problem) for name, problem in problems)
    aliases = [name for name in added if name.endswith(PACKED)]
    known |= set(aliases)
    yield from (
        fault_of(graph, name, have, "it is not another name of its tensor in the file")
        for name in aliases
        if place_of(have.tensors[name]) != place_of(file.tensors.get(name.removesuffix(PACKED)))
    )
    for name in added:
        if name not in known and (problem := constant_problem(name, have)):
            yield fault_of(graph, name, have, problem)


def place_of(tensor: TensorProto | None) -> bytes:
    """A tensor of a file but for its name: type, shape, and where its numbers are."""
    nameless = TensorProto()
    if tensor is not None:
        nameless.CopyFrom(tensor)
    nameless.name = ""
    return nameless.SerializeToString()


def row_constants() -> dict[str, np.ndarray]:
    """The rounding constants of int8 matmuls, by the activation function before them."""
    found = dict(int8_matmul.CONSTANTS)
    for steps in (int8_matmul.SIGNED, *int8_matmul.STEPS_OF.values()):
        found |= steps.constants()
    return found


def constant_problem(name: str, graph: StoredGraph) -> str:
    array = graph.array(name)
    if name.startswith("row_products/"):
        wanted = row_constants().get(name)
        return "" if wanted is not None and np.array_equal(array, wanted) else "it is not what int8 products divide by"
    if name.endswith("/nothing"):
        return "it is not zero" if array.any() else ""
    if name in COUNTING:
        counted = array.ndim > 0 and (array == np.arange(array.shape[-1])).all()
        return "" if counted else f"it does not count the {name.removeprefix('trt/')}"
    if not name.startswith(FORMS) or array.size > SMALL:
        return "it cannot be traced to a tensor of the file"
    return ""


def screening_problems(graph: StoredGraph) -> Iterator[tuple[str, str]]:
    """The int8 table must be within half a step of the table it screens, and its bounds must not be too low."""
    table, bias = screened_tensors(graph)
    steps, scale, bounds = (graph.array(f"screening/{name}") for name in ("int8", "scale", "bounds"))
    vocab, width = table.shape
    if (
        steps.shape != (width, vocab)
        or scale.shape != (vocab,)
        or bounds.shape
        != (
            3 if bias is None else 4,
            vocab,
        )
    ):
        yield "screening/int8", f"its shapes {steps.shape}, {scale.shape}, {bounds.shape} do not fit {table.shape}"
        return
    if not np.array_equal(graph.array("screening/always"), np.arange(vocab) < MOST):
        yield "screening/always", f"it does not let the first {MOST} tokens through"
    if bias is not None:
        yield from screened_bias_problems(graph, bias, bounds[3])
    for first in range(0, vocab, BLOCK):
        part = slice(first, first + BLOCK)
        rows = table[part].astype(np.float64)
        missed = rows - steps[:, part].T.astype(np.float64) * scale[part, None]
        far = (np.abs(missed) > scale[part, None] * (0.5 + ULPS)).any(axis=1)
        low = bounds[0, part] < np.linalg.norm(missed, axis=1) * (1 - ULPS)
        low |= bounds[1, part] < np.linalg.norm(rows, axis=1) * (1 - ULPS)
        low |= bounds[2, part] != 1.0
        for wrong, name, problem in ((far, "int8", "is not its row of the table, rounded"), (low, "bounds", "is low")):
            if wrong.any():
                yield f"screening/{name}", f"token {first + int(np.flatnonzero(wrong)[0])} {problem}"
                return


def screened_bias_problems(graph: StoredGraph, bias: np.ndarray, bounds: np.ndarray) -> Iterator[tuple[str, str]]:
    """The screening's own bias must be the projection's; in the bounds it must cover at least its rounding."""
    wide = BIAS_ROUNDINGS * 2.0**-24 * np.abs(bias.astype(np.float64))
    if not np.array_equal(graph.array("screening/bias"), bias[None]):
        yield "screening/bias", "it is not the bias of the output projection"
    if not (graph.array("screening/least_bias") <= bias - wide).all():
        yield "screening/least_bias", "it is more than the bias may be after rounding"
    if not (bounds >= wide).all():
        yield "screening/bounds", "those of the bias are low"


def screened_tensors(graph: StoredGraph) -> tuple[np.ndarray, np.ndarray | None]:
    """The table that the screening's exact products read, and the bias that is added to them, if there is one."""
    branches = [attribute.g for node in graph.model.graph.node if node.op_type == "If" for attribute in node.attribute]
    read = [node.input[0] for branch in branches for node in branch.node if node.op_type == "Gather"]
    kept = [name for name in read if name in graph.tensors and not name.startswith("screening/")]
    table = next(name for name in kept if len(graph.tensors[name].dims) == 2)
    bias = next((name for name in kept if len(graph.tensors[name].dims) == 1), None)
    return graph.array(table), None if bias is None else graph.array(bias)


def fault_of(graph: str, name: str, have: StoredGraph, problem: str) -> Finding:
    reader = have.reader(name)
    node = "" if reader is None else reader.name
    return finding(graph, node, name, module_of(node) or name, "constant", problem)

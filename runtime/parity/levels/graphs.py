"""The first level of parity: do a bundle's graphs match the contract? Nothing is run."""

from __future__ import annotations

from dataclasses import dataclass

from seq2engine.errors import ExportError, GraphError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.artifact.graph_files import graph_from_file
from seq2engine.export.audit import audit_graph
from seq2engine.export.contract import GRAPHS, Census
from seq2engine.export.precision.census import audit_precision, census_of


@dataclass(frozen=True)
class GraphResult:
    """One graph file: inputs, outputs, its census (the file's, not the manifest's), and what is wrong with it."""

    graph: str
    opset: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    census: Census
    problem: str = ""

    @property
    def reason(self) -> str:
        return f"{self.graph}: {self.problem}" if self.problem else ""

    def __bool__(self) -> bool:
        return not self.problem


def graphs_of(bundle: Bundle, precision: str) -> tuple[GraphResult, ...]:
    """Both graphs, checked by ONNX's checker and against the contract (names, types, axes, shapes) and precision."""
    return tuple(graph_result(bundle, precision, name) for name in GRAPHS)


def graph_result(bundle: Bundle, precision: str, name: str) -> GraphResult:
    path, entry = bundle.graph_path(precision, name), bundle.graph(precision, name)
    problem = ""
    census = Census(nodes=0, weight_bytes={}, tensors={}, products={}, product_weights={}, attentions=0)
    try:
        model = graph_from_file(path, weights=True)
    except GraphError as error:
        return GraphResult(name, entry.opset, entry.inputs, entry.outputs, census, str(error))
    census["nodes"] = len(model.graph.node)
    try:
        census = census_of(model)
        audit_graph(model, bundle.specs(precision)[name])
        audit_precision(model, precision, entry.fp32_nodes)
    except ExportError as error:
        problem = " ".join(str(error).split())
    except KeyError as error:  # shape inference does not know what a node makes
        problem = f"the type of {error.args[0]} is not known"
    return GraphResult(
        graph=name,
        opset=next(used.version for used in model.opset_import if used.domain in ("", "ai.onnx")),
        inputs=tuple(value.name for value in model.graph.input),
        outputs=tuple(value.name for value in model.graph.output),
        census=census,
        problem=problem,
    )

"""The first level of parity, which needs no sample: every number and node of a bundle's graphs is accounted for."""

from __future__ import annotations

import dataclasses

import onnx

from seq2engine.common.progress import Progress, silent
from seq2engine.errors import GraphError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.contract import GRAPHS
from seq2engine.export.precision.passes import PASSES, SMOOTHED
from seq2engine.export.precision.smoothing import graph_with_factors, kept_factors
from seq2engine.export.to_onnx import graph_from_model
from seq2engine.model.checkpoint import load_checkpoint
from seq2engine.model.transformer import Transformer

from ...ort.session import DEFAULT_SETTINGS, OrtSettings
from ..levels.weights import WeightResult
from .account import Reference, account_of, unread_faults
from .derived import derived_results
from .stored import StoredGraph
from .structure import unreadable


def weights_of(
    bundle: Bundle,
    precision: str,
    progress: Progress = silent,
    backend: str = "",
    settings: OrtSettings = DEFAULT_SETTINGS,
    engine: str | None = None,
) -> tuple[WeightResult, ...]:
    """Both graphs of one precision against the bundle's reference, then the forms that a backend gives them.

    One graph is in memory at a time. `settings` are those of ONNX Runtime's session; `engine` names TensorRT's.
    """
    bundle.reference_path()  # checks the hash
    model = load_checkpoint(bundle.root)
    reference = Reference(model)
    found = []
    for done, name in enumerate(GRAPHS):
        progress("parity: weights", done / len(GRAPHS))
        path = bundle.graph_path(precision, name)
        try:
            have = StoredGraph.from_file(path)
        except GraphError as error:
            return (unreadable(name, error),)
        want = StoredGraph(expected_graph(model, bundle, precision, have, name))
        found.append(account_of(name, have, want, reference))
    if unread := unread_faults(reference):
        found[-1] = dataclasses.replace(found[-1], faults=(*found[-1].faults, *unread.values()))
    del model, reference
    if backend:
        found += derived_results(bundle, precision, backend, settings, engine)
    progress("parity: weights", 1.0)
    return tuple(found)


def expected_graph(model: Transformer, bundle: Bundle, precision: str, have: StoredGraph, name: str) -> onnx.ModelProto:
    """A new export of the reference, in memory, with the factors that the file's calibration chose."""
    fp32 = graph_from_model(model, name, bundle.cache_form)
    if precision in SMOOTHED:
        fp32 = graph_with_factors(fp32, kept_factors(fp32, have.smoothing))
    return PASSES[precision](fp32, bundle.graph(precision, name).fp32_nodes)

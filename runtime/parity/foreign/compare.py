"""Another exporter's graphs against our reference of the same checkpoint: encoder states, teacher-forced logits.

Each graph gets its inputs (encoder states, keys and values so far) from PyTorch in fp32, so that it is judged by
itself; errors are against fp64 with PyTorch's budgets, as for our own graphs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from seq2engine.common.progress import Progress, silent
from seq2engine.errors import GraphError
from seq2engine.export.artifact.bundle import Bundle

from ...encoder_inputs import encoder_inputs, listed_sources
from ...generate import generate
from ...numerics.budgets import ErrorTally, TensorResult
from ...numerics.teacher_forcing import ForcedRun, forced_tokens
from ...ort.graphs import run_arrays
from ...search.options import SearchOptions
from ...text.sources import random_sources
from ...torch_session import TorchSession, model_with_weights_of
from ..levels.findings import Finding
from ..levels.result import ParityResult, Stopped
from ..levels.weights import stored_fault, structure_fault
from ..weights.structure import finding
from .roles import NUMPY, ForeignGraph, foreign_graph
from .weights import matched_weights

SOURCES = 16
STEPS = 12


def foreign_parity(
    bundle: Bundle,
    paths: Sequence[Path],
    sources: Sequence[Sequence[int]] | None = None,
    max_length: int = STEPS,
    threads: int | None = None,
    progress: Progress = silent,
) -> list[ParityResult]:
    """One result for each graph, over the bundle's reference weights. Our own graphs are not used."""
    model = model_with_weights_of(bundle, "")
    graphs = [foreign_graph(path, bundle.config, threads) for path in paths]
    rows = listed_sources(sources or random_sources(bundle.config, SOURCES), bundle.config)[:SOURCES]
    steps = min(max_length, bundle.config.max_target)
    found = []
    for done, graph in enumerate(graphs):
        progress("parity: graphs", done / len(graphs))
        oracle = TorchSession(model, "fp64", bundle.cache_form, threads=threads)
        reference = TorchSession(model, graph.precision, bundle.cache_form, threads=threads)
        found.append(graph_result(graph, oracle, reference, model, rows, steps))
    progress("parity: graphs", 1.0)
    return found


def graph_result(
    graph: ForeignGraph,
    oracle: TorchSession,
    reference: TorchSession,
    model: torch.nn.Module,
    rows: list[list[int]],
    steps: int,
) -> ParityResult:
    weights = (matched_weights(graph, model, oracle.config.heads),)
    tensors: tuple[TensorResult, ...] = ()
    stopped = None
    try:
        tensors = tuple(compared(graph, oracle, reference, rows, steps))
    except GraphError as error:
        stopped = Stopped("steps", f"{graph.path} stopped: {error}", graph.name, error.node)
    result = ParityResult(
        f"{graph.path} ({graph.role})",
        graph.precision,
        "foreign",
        len(rows),
        steps,
        tensors,
        (),
        weights=weights,
        baseline=f"PyTorch {graph.precision}",
        stopped=stopped,
    )
    return result if result else with_finding(result)


def with_finding(result: ParityResult) -> ParityResult:
    fault = stored_fault(result.weights) or structure_fault(result.weights) or unexplained(result)
    return dataclasses.replace(result, finding=fault)


def unexplained(result: ParityResult) -> Finding:
    """The finding for a graph whose weights are right: where it stopped, or which steps are wrong."""
    name = result.weights[0].graph
    if result.stopped is not None:
        node = result.stopped.node
        return finding(name, node, "", node.partition("/")[0] or name, "crash", result.stopped.reason)
    wrong = [tensor.step for tensor in result.tensors if not tensor and tensor.step is not None]
    kept = "every stored tensor that is like one of the reference's is equal to it"
    at = f"; logits are wrong at steps {', '.join(map(str, wrong))}" if wrong else ""
    baked = ": a length or a position may be baked in" if wrong and len(wrong) < result.max_length - 1 else ""
    return finding(name, "", "", name, "unknown", f"{kept}{at}{baked}")


@torch.inference_mode()
def compared(
    graph: ForeignGraph, oracle: TorchSession, reference: TorchSession, rows: list[list[int]], steps: int
) -> Iterator[TensorResult]:
    source, mask = encoder_inputs(rows, oracle.config)
    if graph.role == "encoder":
        tally = ErrorTally(graph.precision)
        exact, rounded = (who.tensor(who.encode(source, mask), "encoder_states") for who in (oracle, reference))
        given = fed(graph, {"source_ids": source, "source_mask": mask})
        tally.add(*(array.astype(np.float64)[mask] for array in (exact, rounded, given)))
        yield tally.result("encoder", "encoder_states")
        return
    options = SearchOptions(max_length=steps)
    targets = [nbest[0].tokens for nbest in generate(oracle, rows, options)]
    tokens, counts = forced_tokens(targets, oracle.config)
    runs = [ForcedRun(who, rows, tokens.shape[1]) for who in (oracle, reference)]
    state = runs[1].state
    whole = graph.role in ("decoder", "whole", "merged")
    answers = given_at_once(graph, state, source, mask, tokens) if whole else None
    total = ErrorTally(graph.precision)
    single = []
    for step in range(tokens.shape[1]):
        caches = {name: reference.tensor(state, name)[:, :, :step] for name in state if name.startswith("self_")}
        exact, rounded = (run.step(tokens[:, step]).astype(np.float64) for run in runs)
        here = ErrorTally(graph.precision)
        live = counts[:, step]
        if answers is not None:
            here.add_logits(exact[live], rounded[live], answers[:, step][live].astype(np.float64))
        if graph.role in ("with past", "merged") and step:
            found = given_step(graph, state, caches, mask, tokens[:, step : step + 1], step, reference)
            here.add_logits(exact[live], rounded[live], found[live].astype(np.float64))
        if here.rows:
            single.append(here.result("steps", "logits", step))
            total.merge(here)
    yield total.result("steps", "logits")
    yield from (result for result in single if not result)


def given_at_once(
    graph: ForeignGraph, state: Any, source: np.ndarray, mask: np.ndarray, tokens: np.ndarray
) -> np.ndarray:
    """Logits [B,T,V] of all steps in one call. A merged graph's caches are empty then."""
    feeds = {
        "ids": tokens,
        "source_ids": source,
        "source_mask": mask,
        "target_mask": np.ones_like(tokens),
        "states": state["encoder_states"].float().numpy(),
        "positions": np.arange(tokens.shape[1]),
        "branch": np.array([False]),
    }
    batch, heads = len(tokens), state["cross_k.0"].shape[1]
    nothing = np.zeros((batch, heads, 1, state["cross_k.0"].shape[3]), dtype=np.float32)
    return fed(graph, {**feeds, **{kind: nothing for kind in graph.inputs.values() if "_k." in kind or "_v." in kind}})


def given_step(
    graph: ForeignGraph,
    state: Any,
    caches: dict[str, np.ndarray],
    mask: np.ndarray,
    tokens: np.ndarray,
    step: int,
    reference: TorchSession,
) -> np.ndarray:
    """Logits [B,V] of one step over PyTorch's own keys and values."""
    cross = {name: reference.tensor(state, name) for name in state if name.startswith("cross_")}
    feeds = {
        "ids": tokens,
        "source_mask": mask,
        "target_mask": np.ones((len(tokens), step + 1), dtype=np.int64),
        "states": state["encoder_states"].float().numpy(),
        "positions": np.array([step]),
        "branch": np.array([True]),
        **cross,
        **caches,
    }
    return fed(graph, feeds)[:, -1]


def fed(graph: ForeignGraph, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """The graph's output; every input in the type that it has."""
    given = {}
    for name, kind in graph.inputs.items():
        dtype = NUMPY[graph.types[name]]
        array: np.ndarray = feeds[kind].astype(dtype)
        rank = len(next(value for value in graph.session.get_inputs() if value.name == name).shape)
        if kind == "positions" and rank == 2:
            array = np.broadcast_to(array, (len(feeds["ids"]), len(array)))
        given[name] = np.ascontiguousarray(array)
    return run_arrays(graph.session, [graph.output], given, graph.name)[0]

"""Every token id of both vocabularies and every position is looked up once, in the form that ONNX Runtime runs.

The graph is cut after its tables (embeddings with their scale and positions; rotary angles; biases of distances), so
that tens of thousands of ids need no layer to run. They are compared with the same modules in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx
import torch

from seq2engine.export.artifact.graph_files import graph_from_file
from seq2engine.export.debug_outputs import cut_graph
from seq2engine.export.ort_form import FormedGraph
from seq2engine.model.transformer import Transformer

from ...numerics.budgets import ErrorTally, TensorResult
from ...ort.graphs import GraphKind, Placement, graph_in_form, inference_session, run_arrays
from ...ort.session import OrtSession
from ...session import Session
from ...torch_session import TorchSession

LEVEL = "coverage"
NUMBERS = 1 << 21  # looked up at once; compared in fp64, with some ten arrays of that size
Feeds = dict[str, np.ndarray]


@dataclass(frozen=True)
class Lookup:
    """A tensor computed from tables alone, its inputs in parts, and its computation in PyTorch."""

    graph: str
    tensor: str
    module: str
    parts: list[Feeds]
    expected: Callable[[Transformer, Feeds], torch.Tensor]


@torch.inference_mode()
def lookup_results(oracle: Session, reference: Session, candidate: Session) -> tuple[TensorResult, ...]:
    """One result for each table of a session of ONNX Runtime on the CPU; none for other backends, whose graphs cannot
    be cut."""
    if not isinstance(candidate, OrtSession) or not candidate.settings.host:
        return ()
    if not isinstance(oracle, TorchSession) or not isinstance(reference, TorchSession):
        return ()
    found = []
    for lookup in lookups_of(candidate):
        tally = ErrorTally(candidate.precision)
        given = looked_up(candidate, lookup)
        for feeds, array in zip(lookup.parts, given, strict=True):
            exact, rounded = (lookup.expected(who.model, feeds) for who in (oracle, reference))
            rows = exact.shape[-1]
            three = (exact.double().numpy(), rounded.double().numpy(), array.astype(np.float64))
            tally.add(*(one.reshape(-1, rows) for one in three))
        found.append(tally.result(LEVEL, f"{lookup.module}, every id and position"))
    return tuple(found)


def looked_up(candidate: OrtSession, lookup: Lookup) -> Iterator[np.ndarray]:
    path = candidate.model.graphs[lookup.graph]
    made = graph_in_form(lookup.graph, path, candidate.form.by_nodes)
    model = graph_from_file(path) if made is None else onnx.load_from_string(made.graph)
    cut = cut_graph(model, [lookup.tensor])
    kind = GraphKind(kernels=candidate.form.kernels)
    session = inference_session(path, Placement(candidate.threads), kind, FormedGraph(cut.SerializeToString()))
    names = [given.name for given in session.get_inputs()]
    for feeds in lookup.parts:
        yield run_arrays(session, [lookup.tensor], {name: feeds[name] for name in names}, lookup.graph)[0]


def lookups_of(candidate: OrtSession) -> Iterator[Lookup]:
    """What of a model is looked up. A table of relative positions or rotary angles has no ids, only positions."""
    config, files = candidate.config, candidate.model.graphs
    nodes = {name: graph_from_file(path).graph.node for name, path in files.items()}
    beams = candidate.form.beam_positions
    if not config.takes_features and (tensor := last_of(nodes["encoder"], "source_embedding")):
        parts = source_parts(config.source_vocab, min(candidate.limits.source, config.max_source), config.d_model)
        yield Lookup("encoder", tensor, "source_embedding", parts, source_embedding)
    if tensor := last_of(nodes["decoder_step"], "target_embedding"):
        parts = target_parts(config.target_vocab, config.max_target, config.d_model, beams)
        yield Lookup("decoder_step", tensor, "target_embedding", parts, target_embedding)
    for graph, part in (("encoder", mask_part(config.max_source)), ("decoder_step", step_part(config.max_target))):
        for node in nodes[graph]:
            if node.op_type == "Gather" and node.input[0] == "rotary":
                yield Lookup(graph, node.output[0], "rotary", [part], rotary_rows)
    yield from distance_lookups("encoder", nodes["encoder"], mask_part(config.max_source), encoder_distances)
    yield from distance_lookups("decoder_step", nodes["decoder_step"], slots_part(config.max_target), decoder_distances)


def distance_lookups(
    graph: str,
    nodes: Sequence[onnx.NodeProto],
    part: Feeds,
    expected: Callable[[Transformer, Feeds], Sequence[torch.Tensor]],
) -> Iterator[Lookup]:
    """The biases of one table for all layers, or of one for each."""
    module = f"{graph[:7]}_distances"
    made = [node.output[0] for node in nodes if node.name.startswith(f"{module}/") and node.op_type == "Transpose"]
    for layer, tensor in enumerate(made):
        name = module if len(made) == 1 else f"{module} of layer {layer}"
        yield Lookup(graph, tensor, name, [part], partial(of_layer, layer, expected))


def of_layer(
    layer: int, expected: Callable[[Transformer, Feeds], Sequence[torch.Tensor]], model: Transformer, feeds: Feeds
) -> torch.Tensor:
    return expected(model, feeds)[layer]


def last_of(nodes: list[onnx.NodeProto], module: str) -> str:
    """The output tensor of a module."""
    made = [node.output[0] for node in nodes if node.name.startswith((f"{module}/", f"{module}."))]
    return made[-1] if made else ""


def source_parts(vocab: int, length: int, width: int) -> list[Feeds]:
    """ids [B,S] of full length, so that every position comes with every row."""
    rows = -(-vocab // length)
    ids = (np.arange(rows * length) % vocab).reshape(rows, length)
    at_once = max(1, NUMBERS // (length * width))
    return [
        {"source_ids": part, "source_mask": np.ones(part.shape, dtype=bool)}
        for part in (ids[first : first + at_once] for first in range(0, rows, at_once))
    ]


def target_parts(vocab: int, length: int, width: int, beam_positions: bool) -> list[Feeds]:
    """tokens [B,K]: a row for every position, as many beams as it takes to have every token."""
    beams = -(-vocab // length)
    tokens = (np.arange(length * beams) % vocab).reshape(length, beams)
    position = np.arange(length)
    at_once = max(1, NUMBERS // (beams * width))
    parts = []
    for first in range(0, length, at_once):
        rows = slice(first, first + at_once)
        wide = np.repeat(position[rows, None], beams, axis=1) if beam_positions else position[rows]
        parts.append({"tokens": tokens[rows], "position": wide})
    return parts


def mask_part(length: int) -> Feeds:
    return {"source_mask": np.ones((1, length), dtype=bool)}


def step_part(length: int) -> Feeds:
    return {"position": np.arange(length)}


def slots_part(length: int) -> Feeds:
    """The last position attends to all others."""
    return {"position": np.array([length - 1]), "slot_position": np.arange(length)[None]}


def source_embedding(model: Transformer, feeds: Feeds) -> torch.Tensor:
    ids = torch.from_numpy(feeds["source_ids"])
    return model.source_embedding(ids, torch.arange(ids.shape[1])[None])


def target_embedding(model: Transformer, feeds: Feeds) -> torch.Tensor:
    position = torch.from_numpy(feeds["position"])
    return model.target_embedding(
        torch.from_numpy(feeds["tokens"]), position if position.dim() > 1 else position[:, None]
    )


def rotary_rows(model: Transformer, feeds: Feeds) -> torch.Tensor:
    if "position" in feeds:
        position = torch.from_numpy(feeds["position"])[:, None]
    else:
        position = torch.arange(feeds["source_mask"].shape[1])[None]
    angles = model.rotations(position)
    assert angles is not None
    return angles


def encoder_distances(model: Transformer, feeds: Feeds) -> Sequence[torch.Tensor]:
    positions = torch.arange(feeds["source_mask"].shape[1])[None]
    assert model.encoder_distances is not None
    return model.encoder_distances(positions, positions)


def decoder_distances(model: Transformer, feeds: Feeds) -> Sequence[torch.Tensor]:
    assert model.decoder_distances is not None
    position, slots = (torch.from_numpy(feeds[name]) for name in ("position", "slot_position"))
    return model.decoder_distances(position[:, None], slots)

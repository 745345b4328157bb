"""The stored tensors of another exporter's graph, matched with our reference by their values, as names differ.

A tensor is one of the reference's, unchanged or transposed, or a part of a joined one (q|k|v, k|v, gate|up).
One that resembles a tensor of the reference but differs is a fault with a cause; other constants are only counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import nn

from seq2engine.errors import GraphError

from ..levels.findings import Finding
from ..levels.weights import WeightResult
from ..weights.causes import Case, weight_fault
from ..weights.stored import StoredGraph
from ..weights.structure import finding, unreadable
from .roles import ForeignGraph

SMALLEST = 16  # numbers; smaller ones are constants of nodes
ALIKE = 0.5  # correlation from which on a tensor is taken for one of the reference's


@dataclass(frozen=True)
class Known:
    """A tensor of the reference, or a part of it."""

    name: str
    array: np.ndarray
    passes: str


def matched_weights(graph: ForeignGraph, model: nn.Module, heads: int) -> WeightResult:
    try:
        stored = StoredGraph.from_file(graph.path)
    except GraphError as error:
        return unreadable(graph.name, error)
    known = list(known_tensors(model))
    by_bytes = {(one.array.shape, one.array.tobytes()): one for one in known}
    passes: Counter[str] = Counter()
    constants, numbers = 0, 0
    faults: list[Finding] = []
    for name in stored.tensors:
        array = stored.array(name)
        numbers += array.size
        if array.size < SMALLEST or array.dtype.kind != "f":
            constants += 1
            continue
        wide = np.ascontiguousarray(array.astype(np.float32))
        same = by_bytes.get((wide.shape, wide.tobytes())) or rounded_match(array, known)
        if same is not None:
            passes[same.passes + (f", cast {array.dtype.name}" if array.dtype.name != "float32" else "")] += 1
        elif nearest := nearest_of(wide, known):
            reader = stored.reader(name)
            node = "" if reader is None else reader.name
            module, _, what = nearest.name.rpartition(".")
            case = Case(nearest.array, wide, what or "weight", module, heads)
            cause, detail = weight_fault(case)
            faults.append(finding(graph.name, node, name, module or name, cause, f"of {nearest.name}: {detail}"))
        else:
            constants += 1
    nodes = len(stored.model.graph.node)
    return WeightResult(graph.name, "", nodes, constants, numbers, dict(passes), tuple(faults))


def known_tensors(model: nn.Module) -> Iterator[Known]:
    """Every tensor of the reference, its parts, and both transposed."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in tensors.items():
        array = tensor.detach().numpy()
        module = name.rpartition(".")[0].rpartition(".")[2]
        counts = {"qkv": (1, 3), "kv": (1, 2), "up": (1, 2)}.get(module, (1,))
        for count in counts:
            for place, part in enumerate(np.split(array, count) if len(array) % count == 0 else ()):
                label = name if count == 1 else f"{name} (part {place + 1} of {count})"
                split = "" if count == 1 else ", split"
                yield Known(label, np.ascontiguousarray(part), f"copy{split}")
                if part.ndim == 2:
                    yield Known(label, np.ascontiguousarray(part.T), f"transpose{split}")


def rounded_match(array: np.ndarray, known: list[Known]) -> Known | None:
    """The tensor that an array in fp16 is, rounded."""
    if array.dtype != np.float16:
        return None
    alike = (one for one in known if one.array.shape == array.shape)
    return next((one for one in alike if np.array_equal(one.array.astype(np.float16), array)), None)


def nearest_of(array: np.ndarray, known: list[Known]) -> Known | None:
    """The tensor of the reference with the same shape and the highest correlation; None if there is none.

    Sums of rows and columns are compared as well, so that a permuted tensor is still recognised.
    """
    best, most = None, ALIKE
    for one in (one for one in known if one.array.shape == array.shape):
        pairs = [(one.array, array), (np.sort(one.array, axis=None), np.sort(array, axis=None))]
        same = sum(np.array_equal(a, b) for a, b in pairs[1:])
        values = [abs(correlation(*pairs[0])), 1.0 if same else 0.0]
        if max(values) > most:
            best, most = one, max(values)
    return best


def correlation(first: np.ndarray, second: np.ndarray) -> float:
    a, b = (array.astype(np.float64).ravel() - array.mean() for array in (first, second))
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / size if size else 0.0

"""Checks every stored number of a graph file: against a new export of the reference, and by an independent trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np
from torch import Tensor

from seq2engine.model.transformer import Transformer

from ..levels.findings import Finding
from ..levels.weights import WeightResult
from .causes import Case, alike, weight_fault
from .stored import StoredGraph, StoredWeight
from .structure import finding, module_of, structure_faults
from .trace import passes_of, untraced


class Reference:
    """The tensors of the reference by the names that its export gives them; `read` are those that a graph has."""

    def __init__(self, model: Transformer):
        self.config = model.config
        parameters: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self.computed = dict(model.named_buffers(remove_duplicate=False))
        self.tensors = {**parameters, **self.computed}
        self.read: set[int] = set()

    def array(self, name: str) -> np.ndarray:
        tensor = self.tensors[name]
        self.read.add(tensor.data_ptr())
        return tensor.detach().numpy()

    def unread(self) -> list[str]:
        """Weights that no graph has."""
        return [name for name, tensor in self.tensors.items() if tensor.data_ptr() not in self.read]


def account_of(name: str, have: StoredGraph, want: StoredGraph, reference: Reference) -> WeightResult:
    """A graph file against the graph that an export of the reference makes: faults in the order of its nodes."""
    passes: Counter[str] = Counter()
    faults: list[Finding] = []
    weighed: set[str] = set()
    for weight in have.weights():
        weighed |= set(weight.parts)
        if weight.name in reference.tensors:
            passes[passes_of(have, weight)] += 1
        faults += weight_faults(name, weight, have, want, reference)
    constants = [one for one in have.tensors if one not in weighed]
    faults += [fault for one in constants for fault in constant_faults(name, one, have, want)]
    faults += [lost_fault(name, one, want) for one in want.tensors if one not in have.tensors]
    order = {node.name: place for place, node in enumerate(want.model.graph.node)}
    faults.sort(key=lambda fault: order.get(fault.node, len(order)))
    faults += structure_faults(name, have.model, want.model)
    numbers = sum(int(np.prod(tensor.dims)) for tensor in have.tensors.values())
    return WeightResult(name, "", len(have.model.graph.node), len(constants), numbers, dict(passes), tuple(faults))


def weight_faults(
    graph: str, weight: StoredWeight, have: StoredGraph, want: StoredGraph, reference: Reference
) -> Iterator[Finding]:
    node = "" if weight.reader is None else weight.reader.name
    if weight.name not in reference.tensors or any(part not in want.tensors for part in weight.parts):
        detail = "it cannot be traced to a tensor of the reference"
        yield finding(graph, node, weight.name, module_of(node) or weight.name, "structure", detail)
        return
    module, _, what = weight.name.rpartition(".")
    module, what = module or weight.name, what if what in ("weight", "bias") else "table"
    computed = weight.name in reference.computed
    for part, kind in zip(weight.parts, (what, "scale"), strict=False):
        theirs, ours = have.array(part), want.array(part)
        if not computed and not alike(theirs, ours):
            cause, detail = weight_fault(case_of(part, module, kind, theirs, ours, weight, want, reference))
            yield finding(graph, node, weight.name, module, cause, detail)
            return
    original = reference.array(weight.name)
    if weight.product in want.smoothing:  # powers of two, so that dividing by them rounds nothing
        original = original / want.smoothing[weight.product]
    if problem := untraced(have, weight, original, computed):
        case = case_of(weight.parts[0], module, what, theirs, ours, weight, want, reference)
        cause, detail = ("export", problem) if alike(theirs, ours) else weight_fault(case)
        yield finding(graph, node, weight.name, module, cause, detail)


def case_of(
    part: str,
    module: str,
    what: str,
    theirs: np.ndarray,
    ours: np.ndarray,
    weight: StoredWeight,
    want: StoredGraph,
    reference: Reference,
) -> Case:
    """Both as the reference has them, in a type that numpy can compute with."""
    turned = weight.transposed and theirs.ndim == 2
    others = {
        name: (lambda name=name: plain(want.array(name).T if turned else want.array(name)))
        for name, tensor in want.tensors.items()
        if name != part and tuple(tensor.dims) == theirs.shape and tensor.data_type == want.tensors[part].data_type
    }
    pair = [plain(array.T if turned else array) for array in (ours, theirs)]
    return Case(pair[0], pair[1], what, module, reference.config.heads_of(module), others)


def plain(array: np.ndarray) -> np.ndarray:
    """bf16, fp8 and int4 as numpy's own types, which can be sorted and rounded."""
    if array.dtype.name in ("bfloat16", "float8_e4m3fn", "float16"):
        return array.astype(np.float32)
    return array.astype(np.int8) if array.dtype.name == "int4" else array


def constant_faults(graph: str, name: str, have: StoredGraph, want: StoredGraph) -> Iterator[Finding]:
    """Constants that are not weights: shapes, axes, scales, the value of a masked score."""
    reader = have.reader(name)
    node = "" if reader is None else reader.name
    if name not in want.tensors:
        detail = f"no export has the constant {name}"
        yield finding(graph, node, "", module_of(node) or name, "constant", detail)
        return
    theirs, ours = have.array(name), want.array(name)
    if theirs.dtype != ours.dtype or not alike(theirs, ours):
        values = [" ".join(f"{number:.9g}" for number in array.ravel()[:8].tolist()) for array in (theirs, ours)]
        detail = f"the constant {name} is {values[0]}, expected {values[1]}"
        yield finding(graph, node, "", module_of(node) or name, "constant", detail)


def lost_fault(graph: str, name: str, want: StoredGraph) -> Finding:
    reader = want.reader(name)
    node = "" if reader is None else reader.name
    return finding(graph, node, "", module_of(node) or name, "structure", f"{name} is not stored")


def unread_faults(reference: Reference) -> Mapping[str, Finding]:
    """Tensors of the reference that no graph of the bundle has."""
    return {
        name: finding("", "", name, name.rpartition(".")[0] or name, "structure", "no graph of the bundle stores it")
        for name in reference.unread()
    }

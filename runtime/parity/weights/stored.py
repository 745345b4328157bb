"""An ONNX file's stored tensors, read one by one, and how its nodes read them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto, TensorProto

from seq2engine.export.artifact.graph_files import array_of, unchecked_graph
from seq2engine.export.graph_index import readers_of
from seq2engine.export.precision.smoothing import SUFFIX, smoothing_from_graph


@dataclass(frozen=True)
class StoredWeight:
    """A weight of the model in a graph: its initializer, or numbers and scales with the node that multiplies them.

    `transposed`: stored [in, out], as a product reads it, where the reference has [out, in].
    """

    name: str  # as the model has it
    parts: tuple[str, ...]
    reader: NodeProto | None
    transposed: bool
    restoring: NodeProto | None = None

    @property
    def product(self) -> str:
        return self.name.removesuffix(".weight")


class StoredGraph:
    """A graph and its tensors; external data is read on demand."""

    def __init__(self, model: onnx.ModelProto, folder: Path | None = None):
        self.model, self.folder = model, folder
        self.tensors: dict[str, TensorProto] = {one.name: one for one in model.graph.initializer}
        self.readers = readers_of(model.graph.node)
        self.smoothing = smoothing_from_graph(model, folder)  # product -> what its input is multiplied by

    @classmethod
    def from_file(cls, path: Path) -> StoredGraph:
        """Raises GraphError if the file holds no graph with all its weights."""
        return cls(unchecked_graph(path), path.parent)

    def array(self, name: str) -> np.ndarray:
        return array_of(self.tensors[name], Path() if self.folder is None else self.folder)

    def reader(self, name: str) -> NodeProto | None:
        """The first node that reads a tensor, as it is or restored."""
        found = self.readers.get(name, [])
        if found and found[0].op_type in ("DequantizeLinear", "Cast", "Transpose"):
            return self.reader(found[0].output[0]) or found[0]
        return found[0] if found else None

    def weights(self) -> Iterator[StoredWeight]:
        """Every initializer that is a weight, or numbers or scales of one; constants of nodes are left out."""
        restored = {n.input[0]: n for n in self.model.graph.node if n.op_type == "DequantizeLinear"}
        scales = {node.input[1] for node in restored.values()}
        for name in self.tensors:
            node = restored.get(name)
            if node is not None and node.input[1] in self.tensors:
                made = node.output[0]
                yield StoredWeight(made, tuple(node.input[:2]), self.reader(name), self.multiplied(made), node)
            elif name not in scales and not name.startswith("const/") and not name.endswith(SUFFIX):
                yield StoredWeight(name, (name,), self.reader(name), self.multiplied(name))

    def multiplied(self, name: str) -> bool:
        """Whether a product reads a tensor as its second factor, in which columns are outputs."""
        return any(
            (node.op_type == "MatMul" and list(node.input).index(name) == 1)
            or (node.op_type == "Cast" and self.multiplied(node.output[0]))
            for node in self.readers.get(name, [])
        )  # fmt: skip

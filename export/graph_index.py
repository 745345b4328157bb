"""Producers and consumers of tensors, copies of graphs, and the basic edits that all graph passes use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx
from onnx import NodeProto, numpy_helper


def copy_of(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy to edit; the weights are copied as far as they are loaded."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    return made


def makers_of(nodes: Iterable[NodeProto]) -> dict[str, NodeProto]:
    """Tensor -> the node that makes it."""
    return {name: node for node in nodes for name in node.output}


def readers_of(nodes: Iterable[NodeProto]) -> dict[str, list[NodeProto]]:
    """Tensor -> the nodes that read it."""
    readers: dict[str, list[NodeProto]] = {}
    for node in nodes:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    return readers


def names_read(nodes: Iterable[NodeProto]) -> set[str]:
    return {name for node in nodes for name in node.input}


def rename_inputs(nodes: Iterable[NodeProto], renamed: Mapping[str, str]) -> None:
    """Renames inputs of nodes, in place: old name -> new name."""
    for node in nodes:
        node.input[:] = [renamed.get(name, name) for name in node.input]


def rename_outputs(nodes: Iterable[NodeProto], renamed: Mapping[str, str]) -> None:
    """Renames outputs of nodes, in place: old name -> new name."""
    for node in nodes:
        node.output[:] = [renamed.get(name, name) for name in node.output]


def replace_nodes(graph: onnx.GraphProto, nodes: Iterable[NodeProto]) -> None:
    """Gives a graph other nodes, some of which may be its own, in place."""
    kept = list(nodes)
    del graph.node[:]
    graph.node.extend(kept)


def drop_unread_weights(graph: onnx.GraphProto) -> None:
    """Removes weights that no node reads, in place."""
    read = names_read(graph.node)
    kept = [weight for weight in graph.initializer if weight.name in read]
    del graph.initializer[:]
    graph.initializer.extend(kept)


@dataclass(frozen=True)
class PrimitiveAttention:
    """softmax(where(mask, (q * scale) @ k^T + bias, masked)) @ v, as the indices of its nodes and the names of its
    inputs; `bias` is empty where nothing is added."""

    nodes: tuple[int, ...]
    q: str
    k: str
    v: str
    mask: str
    bias: str
    scale: float
    output: str

    @property
    def is_self(self) -> bool:
        return ".self_attn/" in self.output


def find_attentions(model: onnx.ModelProto) -> list[PrimitiveAttention]:
    """Every primitive attention of a graph that our export wrote."""
    nodes = model.graph.node
    maker = {name: i for i, node in enumerate(nodes) for name in node.output}
    reader = {name: i for i, node in enumerate(nodes) for name in node.input}
    constants = {w.name: w for w in model.graph.initializer}
    found = []
    for i, node in enumerate(nodes):
        if node.op_type != "Softmax":
            continue
        where = maker[node.input[0]]
        scores = maker[nodes[where].input[1]]
        adding = [scores] if nodes[scores].op_type == "Add" else []  # of relative positions
        if adding:
            scores = maker[nodes[scores].input[0]]
        transposed, product = maker[nodes[scores].input[1]], reader[node.output[0]]
        chain = [nodes[j].op_type for j in (transposed, scores, where, product)]
        assert chain == ["Transpose", "MatMul", "Where", "MatMul"], f"{node.name}: not an attention of ours: {chain}"
        q = nodes[scores].input[0]
        scaling = [maker[q]] if nodes[maker[q]].op_type == "Mul" else []  # by its weights, where it is folded
        found.append(
            PrimitiveAttention(
                nodes=(*scaling, transposed, scores, *adding, where, i, product),
                q=nodes[scaling[0]].input[0] if scaling else q,
                k=nodes[transposed].input[0],
                v=nodes[product].input[1],
                mask=nodes[where].input[0],
                bias=nodes[adding[0]].input[1] if adding else "",
                scale=float(numpy_helper.to_array(constants[nodes[scaling[0]].input[1]])) if scaling else 1.0,
                output=nodes[product].output[0],
            )
        )
    return found

"""The output projection of a decoder step as one Gemm: a form for ONNX Runtime on the CPU, in fp32.

    x [B,K,D] --MatMul with Transpose(table)--Add bias--> logits [B,K,V]                  as it was
    x [B,K,D] --Reshape--> [B*K,D] --Gemm with table, bias--> logits [B*K,V]

Gemm adds the bias where it sums the products; Add reads and writes all logits once more. Gemm also reads the table as
it is stored: while a session opens there is no transposed copy of it. ONNX Runtime fuses the two itself only in 2-D.
The output `logits` stays in 2-D: a Reshape to an output copies it, one to the nodes that reduce the logits does not.

ONNX Runtime packs the table for Gemm and then unmaps the stored one, unless another node reads that: an embedding looks
up some rows. So an external table that others read has a second name, for Gemm alone; both name the same place in the
file, and of the other only the pages that are looked up are ever in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from ..graph_index import copy_of, makers_of, names_read, replace_nodes

LOGITS = ("logits", "all/logits")  # in the graph, and in the branch of a screened one
BEST_LOGITS = "best/logits"  # in its other branch: of candidates alone
FLAT = "projection/flat"  # [-1, D]
WIDTH = "projection/vocab"  # [V]
PACKED = "/packed"  # after the name of a table: its second name


def gemm_projection(model: onnx.ModelProto) -> onnx.ModelProto:
    """A decoder step in fp32, after all other forms -> the same; a branch may make the logits (screened_argmax.py)."""
    made = copy_of(model)
    graph = made.graph
    stored = {weight.name: tuple(weight.dims) for weight in graph.initializer}
    transposed = {
        node.output[0]: node.input[0]
        for node in graph.node
        if node.op_type == "Transpose" and len(stored.get(node.input[0], ())) == 2
    }
    for part in (graph, *branches_of(graph)):
        found = matmul_of(part, stored, transposed)
        if found is not None:
            product, last, bias = found
            table = transposed.get(product.input[1], product.input[1])
            by_rows = table != product.input[1]
            width, vocab = stored[table][::-1] if by_rows else stored[table]
            before, logits = list(part.node).index(product), last.output[0]
            others = [node for node in part.node if node not in (product, last)]
            for node in others:
                node.input[:] = [of_projection(logits, "by_beam") if name == logits else name for name in node.input]
            gemm = projection(product.input[0], packed_name(graph, table), bias, logits, int(by_rows))
            replace_nodes(part, [*others[:before], *gemm, *others[before:]])
            declare_flat(graph, vocab)
            sizes = {FLAT: [-1, width], WIDTH: [vocab]}
            graph.initializer.extend(numpy_helper.from_array(np.array(size), name) for name, size in sizes.items())
    read = names_read(graph.node).union(*(names_read(part.node) for part in branches_of(graph)))
    replace_nodes(graph, [node for node in graph.node if node.output[0] not in transposed or node.output[0] in read])
    return made


def packed_name(graph: onnx.GraphProto, table: str) -> str:
    """The name of a table for Gemm alone: a second one of the same place in the file, if it is in a file."""
    (weight,) = [weight for weight in graph.initializer if weight.name == table]
    if weight.data_location != TensorProto.EXTERNAL:
        return table
    second = graph.initializer.add()
    second.CopyFrom(weight)
    second.name = f"{table}{PACKED}"
    return second.name


def matmul_of(
    part: onnx.GraphProto, stored: Mapping[str, tuple[int, ...]], transposed: Mapping[str, str]
) -> tuple[NodeProto, NodeProto, str | None] | None:
    """The product with a stored weight that makes all logits, the last node of them and its bias, where it has one."""
    last = next((node for node in part.node if node.output[0] in LOGITS), None)
    if last is None:
        return None
    bias = next((name for name in last.input if name in stored), None) if last.op_type == "Add" else None
    makers = makers_of(part.node)
    product = last if bias is None else makers.get(next(name for name in last.input if name != bias))
    if product is None or product.op_type != "MatMul":
        return None
    return (product, last, bias) if transposed.get(product.input[1], product.input[1]) in stored else None


def branches_of(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    for node in graph.node:
        if node.op_type == "If":
            yield from (attribute.g for attribute in node.attribute)


def of_projection(logits: str, name: str) -> str:
    """The name of a tensor around the product that makes these logits."""
    return f"{logits.removesuffix('logits')}projection/{name}"


def projection(x: str, table: str, bias: str | None, logits: str, transposed: int) -> list[NodeProto]:
    flat, beams, shape, by_beam = (of_projection(logits, name) for name in ("x", "beams", "shape", "by_beam"))
    return [
        op("Reshape", [x, FLAT], flat),  # [B, K, D] -> [B*K, D]
        op("Gemm", [flat, table, *([] if bias is None else [bias])], logits, transB=transposed),
        op("Shape", ["tokens"], beams),
        op("Concat", [beams, WIDTH], shape, axis=0),
        op("Reshape", [logits, shape], by_beam),  # [B*K, V] -> [B, K, V]
    ]


def declare_flat(graph: onnx.GraphProto, vocab: int) -> None:
    """The output `logits` in 2-D, in every branch."""
    (output,) = [value for value in graph.output if value.name == "logits"]
    branches = list(branches_of(graph))
    output.CopyFrom(helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["R", "W" if branches else vocab]))
    for part in branches:
        for node in part.node:
            if node.output[0] == BEST_LOGITS:  # [B, K, C] -> [B*K, C]
                node.CopyFrom(op("Flatten", list(node.input), BEST_LOGITS, axis=2))


def op(kind: str, inputs: list[str], output: str, **attributes: Any) -> NodeProto:
    return helper.make_node(kind, inputs, [output], name=f"{output}/{kind}", **attributes)

"""The decoder step that drafts tokens for its own fp32 session in speculative decoding: a form for ONNX Runtime's CPU.

    x --MatMul with a weight--> y             becomes   x --MatMulNBits, weight in 8 bits--> y      in every layer
    x --MatMul with the table--> logits       becomes   x --MatMulNBits, table in 4 bits--> rough [B,K,V]
                                                        the 16 best of them: x * their rows of the table, in fp32
                                                        the best of these: best_logits, best_tokens [B,K,1]

A step of one row spends its time on reading weights, and these are a quarter and an eighth as large. Layers need 8
bits: with 4, one draft in twenty is wrong, with 8 one in a hundred. The vocabulary does not: its 4 bits only have to
put the right token among the first 16. A table that is not stored by rows is not looked up in, and has 8 bits.

A large table is narrowed later (narrow_table.py): until then the step also puts out its states x [B,K,D].
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from ..artifact.graph_files import array_of
from ..graph_index import copy_of, drop_unread_weights, makers_of, names_read, replace_nodes
from . import narrow_table as narrowing
from .int8_matmul import CONTRIB
from .interface import CANDIDATES, STATES
from .narrow_table import NarrowTable
from .top_candidates import vocab_of

BLOCKS = (128, 64, 32, 16)  # inputs that share a scale: the first that divides their number
LEAST = 16_384  # numbers of a weight; a smaller one stays as it is
WORTH_NARROWING = 16_000_000  # numbers of a table, 8 MB in 4 bits: reading it is a part of a draft that one notices
REFINED = 16  # roughly best tokens that are multiplied again
ROWS = 2048  # of a weight that are packed at a time: what is in between would be larger than the weight
INT8_SUMS = 4  # accuracy level of MatMulNBits: activations are rounded to int8, too


def path(name: str) -> str:
    return f"drafting/{name}"


def draft_graph(model: onnx.ModelProto, folder: Path, narrow: NarrowTable | None = None) -> onnx.ModelProto:
    """A decoder step in fp32 -> the same that puts out the best token of every beam alone, nearly always the right one.

    Weights that are not loaded are in `folder`. With a `narrow` table, that one makes the rough logits.
    """
    made = copy_of(model)
    graph = made.graph
    vocab = vocab_of(made)
    stored = {weight.name: weight for weight in graph.initializer}
    by_rows = {
        node.output[0]: node.input[0]
        for node in graph.node
        if node.op_type == "Transpose" and len(stored[node.input[0]].dims if node.input[0] in stored else ()) == 2
    }
    last, product, bias = projection_of(graph, set(stored))
    x, table, rough = product.input[0], by_rows.get(product.input[1]), path("rough")
    last.output[0] = rough
    nodes: list[NodeProto] = []
    for node in graph.node:
        weight = by_rows.get(node.input[1], node.input[1]) if node.op_type == "MatMul" else ""
        if weight not in stored or np.prod(stored[weight].dims) < LEAST:
            nodes.append(node)
            continue
        fine = node.name == product.name and table is not None
        if fine and narrow is not None:
            nodes += narrow_product(graph, node, narrow)
            continue
        array = array_of(stored[weight], folder)
        rows = array if node.input[1] in by_rows else np.ascontiguousarray(array.T)  # [out, in]
        nodes += packed_product(graph, node, rows, 4 if fine else 8)
    nodes += best_of(rough) if table is None else refined(rough, x, table, bias)
    read = names_read(nodes)
    replace_nodes(graph, [node for node in nodes if node.output[0] not in by_rows or node.output[0] in read])
    refined_tokens = REFINED if narrow is None else narrowing.REFINED
    constants = {"count": [min(refined_tokens, vocab)], "last": [-1], "one": [1]}
    graph.initializer.extend(numpy_helper.from_array(np.array(value), path(name)) for name, value in constants.items())
    drop_unread_weights(graph)
    declare_outputs(graph)
    if narrow is None and table is not None and np.prod(stored[table].dims) >= WORTH_NARROWING:
        declare_states(graph, x, stored[table].dims[1])
    made.opset_import.append(helper.make_opsetid(CONTRIB, 1))
    return made


def projection_arrays(model: onnx.ModelProto, folder: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """The output table [V,D] of a decoder step that stores it by rows, and its bias [V]."""
    stored = {weight.name: weight for weight in model.graph.initializer}
    _, product, bias = projection_of(model.graph, set(stored))
    table = makers_of(model.graph.node)[product.input[1]].input[0]
    return array_of(stored[table], folder), None if bias is None else array_of(stored[bias], folder)


def projection_of(graph: onnx.GraphProto, stored: set[str]) -> tuple[NodeProto, NodeProto, str | None]:
    """The node that makes the logits, their product, and the bias between the two, where there is one."""
    makers = makers_of(graph.node)
    last = makers["logits"]
    bias = next((name for name in last.input if name in stored), None) if last.op_type == "Add" else None
    return last, last if bias is None else makers[next(name for name in last.input if name != bias)], bias


def packed_product(graph: onnx.GraphProto, node: NodeProto, rows: np.ndarray, bits: int) -> list[NodeProto]:
    """The product with weights [out, in] in so many bits; the product as it is, where no block divides its inputs."""
    outputs, inputs = rows.shape
    block = next((size for size in BLOCKS if inputs % size == 0), None)
    if block is None:
        return [node]
    names = [path(f"{node.name}/{part}") for part in ("numbers", "scales")]
    graph.initializer.extend(
        numpy_helper.from_array(array, name) for array, name in zip(packed(rows, bits, block), names, strict=True)
    )
    sizes = {"K": inputs, "N": outputs, "bits": bits, "block_size": block, "accuracy_level": INT8_SUMS}
    made = helper.make_node(
        "MatMulNBits", [node.input[0], *names], list(node.output), name=node.name, domain=CONTRIB, **sizes
    )
    return [made]


def narrow_product(graph: onnx.GraphProto, node: NodeProto, narrow: NarrowTable) -> list[NodeProto]:
    """The product with the table as one with a few columns and one with the narrow table in 4 bits."""
    before, columns = path("before"), path("columns")
    graph.initializer.append(numpy_helper.from_array(narrow.before, before))
    after = NodeProto()
    after.CopyFrom(node)
    after.input[0] = columns
    return [op("MatMul", [node.input[0], before], "columns"), *packed_product(graph, after, narrow.table, 4)]


def packed(weights: np.ndarray, bits: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights [out, in] as MatMulNBits reads them: numbers [out, blocks, block * bits / 8], scales [out, blocks].

    A number n stands for (n - half) * scale. The scale has the sign that puts a block's extreme at the end of the range
    that has one step more.
    """
    outputs, inputs = weights.shape
    half = 1 << (bits - 1)
    numbers = np.empty((outputs, inputs // block, block * bits // 8), dtype=np.uint8)
    scales = np.empty(numbers.shape[:2], dtype=np.float32)
    for first in range(0, outputs, ROWS):
        part = slice(first, first + ROWS)
        rows = weights[part].reshape(-1, inputs // block, block)
        most, least = rows.max(axis=-1), rows.min(axis=-1)
        extreme = np.where(most > -least, most, least)
        scales[part] = np.where(extreme == 0, 1, extreme / -half)
        steps = rows / scales[part, :, None]
        np.rint(steps, out=steps)
        steps += half
        found = np.clip(steps, 0, 2 * half - 1, out=steps).astype(np.uint8)
        numbers[part] = found if bits == 8 else found[..., 0::2] | found[..., 1::2] << 4
    return numbers, scales


def refined(rough: str, x: str, table: str, bias: str | None) -> list[NodeProto]:
    """The best token by its fp32 logit, of those with the best rough ones."""
    exact = path("exact") if bias is None else path("products")
    with_bias = [
        op("Gather", ["" if bias is None else bias, path("likely")], "likely_bias"),
        op("Add", [exact, path("likely_bias")], "exact"),
    ]
    return [
        op("TopK", [rough, path("count")], "roughly_best", "likely", axis=-1),
        op("Gather", [table, path("likely")], "rows"),  # [B, K, C, D]
        op("Unsqueeze", [x, path("last")], "column"),
        op("MatMul", [path("rows"), path("column")], "column_of_products"),
        op("Squeeze", [path("column_of_products"), path("last")], exact.removeprefix(path(""))),
        *([] if bias is None else with_bias),
        op("TopK", [path("exact"), path("one")], "best", "place", axis=-1),
        op("GatherElements", [path("likely"), path("place")], "token", axis=-1),
        *named(path("best"), path("token")),
    ]


def best_of(rough: str) -> list[NodeProto]:
    return [
        op("TopK", [rough, path("one")], "best", "token", axis=-1),
        *named(path("best"), path("token")),
    ]


def named(best: str, token: str) -> list[NodeProto]:
    """The outputs that every step has; a sum over one candidate is 1."""
    one = numpy_helper.from_array(np.ones(1, dtype=np.float32))
    outputs = {"logits": best, "best_logits": best, "best_tokens": token}
    return [
        *(helper.make_node("Identity", [made], [name], name=path(name)) for name, made in outputs.items()),
        op("Shape", ["tokens"], "shape"),
        helper.make_node("ConstantOfShape", [path("shape")], ["exp_sum"], name=path("exp_sum"), value=one),
    ]


def op(kind: str, inputs: list[str], *outputs: str, **attributes: Any) -> NodeProto:
    made = [path(name) for name in outputs]
    return helper.make_node(kind, inputs, made, name=f"{made[0]}/{kind}", **attributes)


def declare_states(graph: onnx.GraphProto, x: str, width: int) -> None:
    graph.node.append(helper.make_node("Identity", [x], [STATES], name=path(STATES)))
    graph.output.append(helper.make_tensor_value_info(STATES, TensorProto.FLOAT, ["B", "K", width]))


def declare_outputs(graph: onnx.GraphProto) -> None:
    (logits,) = [value for value in graph.output if value.name == "logits"]
    logits.CopyFrom(helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", "K", 1]))
    for tensor in CANDIDATES:
        element = helper.np_dtype_to_tensor_dtype(np.dtype(tensor.dtype))
        graph.output.append(helper.make_tensor_value_info(tensor.name, element, tensor.axes))

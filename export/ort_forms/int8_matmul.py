"""int8 matrix products on the CPU: activations are rounded to int8 too, each row by its own scale.

    x [.., in] --Abs-ReduceMax--> m [.., 1]
    x / m -----QuantizeLinear---> u8 --MatMulIntegerToFloat with weight.int8, weight.scale--> * m --> y [.., out]

The portable graph dequantises the weights and multiplies in fp32; this form is made when a session opens. A row's scale
is its own largest magnitude, so a source's output depends on no other source. Weights of `w8a8` stay within +-63: sums
of two products then fit the 16 bits in which processors without VNNI add them.

Of a table that is gathered from, only the rows that are read are dequantised.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from ..graph_index import copy_of, names_read, replace_nodes

CONTRIB = "com.microsoft"
STEPS = 127  # an activation is one of so many steps to either side of ZERO
ZERO = 128
CONSTANTS = {
    "last": np.array([-1]),
    "step": np.array(1 / STEPS, dtype=np.float32),
    "zero": np.array(ZERO, dtype=np.uint8),
}


def row_products(model: onnx.ModelProto) -> onnx.ModelProto:
    """A graph with int8 weights, loaded or not -> the same graph with int8 products; names of tensors stay."""
    made = copy_of(model)
    graph = made.graph
    restored = {node.output[0]: node for node in graph.node if node.op_type == "DequantizeLinear"}
    transposed = {
        node.output[0]: node for node in graph.node if node.op_type == "Transpose" and node.input[0] in restored
    }
    rounded: set[str] = set()
    positive = {node.output[0] for node in graph.node if node.op_type == "Relu"}
    nodes: list[NodeProto] = []
    for node in graph.node:
        weight = node.input[1] if node.op_type == "MatMul" else node.input[0] if node.op_type == "Gather" else ""
        if node.op_type == "MatMul" and weight in restored:
            stored, scale = restored[weight].input[:2]
            nodes += product(node, stored, scale, rounded, node.input[0] in positive)
        elif node.op_type == "MatMul" and weight in transposed:
            stored, scale = restored[transposed[weight].input[0]].input[:2]
            name = f"{stored}/transposed"
            if name not in rounded:  # the same tensor for every product that reads it
                nodes.append(helper.make_node("Transpose", [stored], [name], name=f"{name}/Transpose", perm=[1, 0]))
                rounded.add(name)
            nodes += product(node, name, scale, rounded, node.input[0] in positive)
        elif node.op_type == "Gather" and weight in restored:
            nodes += gathered(node, *restored[weight].input[:2])
        else:
            nodes.append(node)
    for unread in (transposed, restored):  # a transposed weight reads a restored one
        read = names_read(nodes)
        nodes = [node for node in nodes if node.output[0] not in unread or node.output[0] in read]
    replace_nodes(graph, nodes)
    graph.initializer.extend(numpy_helper.from_array(array, path(name)) for name, array in CONSTANTS.items())
    made.opset_import.append(helper.make_opsetid(CONTRIB, 1))
    return made


def path(name: str) -> str:
    return f"row_products/{name}"


def product(node: NodeProto, weight: str, scale: str, rounded: set[str], positive: bool) -> list[NodeProto]:
    x, y = node.input[0], node.output[0]
    made = []
    if x not in rounded:  # q|k|v of one x, or several products of it, share its rounding
        rounded.add(x)
        made += rounding(x, positive)
    inputs = [f"{x}/uint8", weight, path("step"), scale, path("zero")]
    return [
        *made,
        op("MatMulIntegerToFloat", inputs, f"{y}/unit", domain=CONTRIB),
        op("Mul", [f"{y}/unit", f"{x}/scale"], y),
    ]


def rounding(x: str, positive: bool = False) -> list[NodeProto]:
    """x -> x/scale, the largest of every row; x/unit, divided by that; x/uint8, rounded to steps.

    A row of zeros has the scale 0 and becomes some integers, which times 0 are zeros again.
    """
    return [
        *([] if positive else [op("Abs", [x], f"{x}/size")]),
        op("ReduceMax", [x if positive else f"{x}/size", path("last")], f"{x}/scale", keepdims=1),
        op("Div", [x, f"{x}/scale"], f"{x}/unit"),
        op("QuantizeLinear", [f"{x}/unit", path("step"), path("zero")], f"{x}/uint8"),
    ]


def gathered(node: NodeProto, table: str, scale: str) -> list[NodeProto]:
    ids, y = node.input[1], node.output[0]
    return [
        op("Gather", [table, ids], f"{y}/int8"),
        op("Cast", [f"{y}/int8"], f"{y}/steps", to=TensorProto.FLOAT),
        op("Gather", [scale, ids], f"{y}/scales"),
        op("Unsqueeze", [f"{y}/scales", path("last")], f"{y}/scale"),
        op("Mul", [f"{y}/steps", f"{y}/scale"], y),
    ]


def op(kind: str, inputs: list[str], output: str, **attributes: Any) -> NodeProto:
    return helper.make_node(kind, inputs, [output], name=f"{output}/{kind}", **attributes)

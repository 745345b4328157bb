"""int8 matrix products on the CPU: activations are rounded to int8 too, each row by its own scale.

    x [.., in] --Abs-ReduceMax--> m [.., 1]
    x / m -----QuantizeLinear---> u8 --MatMulIntegerToFloat with weight.int8, weight.scale--> * m --> y [.., out]

The portable graph dequantises the weights and multiplies in fp32; this form is made when a session opens. A row's scale
is its own largest magnitude, so a source's output depends on no other source. No two neighbouring weights of an output
exceed 128 together (precision/quantise.py): sums of two products then fit the 16 bits in which processors without VNNI
add them. The output of an activation function has few negative numbers or none, so most steps are positive.

Of a table that is gathered from, only the rows that are read are dequantised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from ..graph_index import copy_of, makers_of, names_read, replace_nodes

CONTRIB = "com.microsoft"


def path(name: str) -> str:
    return f"row_products/{name}"


@dataclass(frozen=True)
class Steps:
    """How a row is quantised: `above` steps from 0 to its largest number, `zero` steps below 0.

    `lowest` is the lowest output of the activation function, which must be representable; None: there is no bound,
    and a row's largest magnitude is its scale.
    """

    name: str
    above: int
    zero: int
    lowest: float | None = None

    @property
    def least(self) -> float:
        """The scale that a row has at least, so that the lowest number fits."""
        return -self.lowest * self.above / self.zero if self.lowest else 0.0

    def constants(self) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {
            "step": np.array(1 / self.above, dtype=np.float32),
            "zero": np.array(self.zero, dtype=np.uint8),
        }
        if self.least:
            found["least"] = np.array([self.least], dtype=np.float32)
        return {self.path(name): array for name, array in found.items()}

    def path(self, name: str) -> str:
        return path(f"{self.name}{name}")


SIGNED = Steps("", above=127, zero=128)
# A quarter of the steps below zero: finer steps than with half of them, even for rows of small numbers.
STEPS_OF = {
    "Relu": Steps("relu/", above=255, zero=0, lowest=0.0),
    "Gelu": Steps("gelu/", above=191, zero=64, lowest=-0.1701),
    "Silu": Steps("silu/", above=191, zero=64, lowest=-0.2785),  # Mul(x, Sigmoid(x))
}
CONSTANTS = {path("last"): np.array([-1])}


def row_products(model: onnx.ModelProto) -> onnx.ModelProto:
    """A graph with int8 weights, loaded or not -> the same graph with int8 products; names of tensors stay."""
    made = copy_of(model)
    graph = made.graph
    restored = {node.output[0]: node for node in graph.node if node.op_type == "DequantizeLinear"}
    transposed = {
        node.output[0]: node for node in graph.node if node.op_type == "Transpose" and node.input[0] in restored
    }
    rounded: set[str] = set()
    activations = activations_of(graph)
    used = {SIGNED} | set(activations.values())
    nodes: list[NodeProto] = []
    for node in graph.node:
        weight = node.input[1] if node.op_type == "MatMul" else node.input[0] if node.op_type == "Gather" else ""
        if node.op_type == "MatMul" and weight in restored:
            stored, scale = restored[weight].input[:2]
            nodes += product(node, stored, scale, rounded, activations.get(node.input[0], SIGNED))
        elif node.op_type == "MatMul" and weight in transposed:
            stored, scale = restored[transposed[weight].input[0]].input[:2]
            name = f"{stored}/transposed"
            if name not in rounded:  # the same tensor for every product that reads it
                nodes.append(helper.make_node("Transpose", [stored], [name], name=f"{name}/Transpose", perm=[1, 0]))
                rounded.add(name)
            nodes += product(node, name, scale, rounded, activations.get(node.input[0], SIGNED))
        elif node.op_type == "Gather" and weight in restored:
            nodes += gathered(node, *restored[weight].input[:2])
        else:
            nodes.append(node)
    for unread in (transposed, restored):  # a transposed weight reads a restored one
        read = names_read(nodes)
        nodes = [node for node in nodes if node.output[0] not in unread or node.output[0] in read]
    replace_nodes(graph, nodes)
    constants = dict(CONSTANTS)
    for steps in used:
        constants |= steps.constants()
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    made.opset_import.append(helper.make_opsetid(CONTRIB, 1))
    return made


def activations_of(graph: onnx.GraphProto) -> dict[str, Steps]:
    """Tensor -> its steps, of the tensors that an activation function makes."""
    makers = makers_of(graph.node)
    found = {node.output[0]: STEPS_OF[node.op_type] for node in graph.node if node.op_type in STEPS_OF}
    for node in graph.node:
        gate = makers.get(node.input[1]) if node.op_type == "Mul" else None
        if gate is not None and gate.op_type == "Sigmoid" and gate.input[0] == node.input[0]:
            found[node.output[0]] = STEPS_OF["Silu"]
    return found


def product(node: NodeProto, weight: str, scale: str, rounded: set[str], steps: Steps) -> list[NodeProto]:
    x, y = node.input[0], node.output[0]
    made = []
    if x not in rounded:  # q|k|v of one x, or several products of it, share its rounding
        rounded.add(x)
        made += rounding(x, steps)
    inputs = [f"{x}/uint8", weight, steps.path("step"), scale, steps.path("zero")]
    return [
        *made,
        op("MatMulIntegerToFloat", inputs, f"{y}/of_unit", domain=CONTRIB),
        op("Mul", [f"{y}/of_unit", f"{x}/scale"], y),
    ]


def rounding(x: str, steps: Steps = SIGNED) -> list[NodeProto]:
    """x -> x/scale, the largest of every row; x/unit, divided by that; x/uint8, rounded to steps.

    A row of zeros has the scale 0; its integers are arbitrary, and times 0 they are zeros again.
    """
    size = x if steps.lowest is not None else f"{x}/size"
    largest = f"{x}/largest" if steps.least else f"{x}/scale"
    return [
        *([] if size == x else [op("Abs", [x], size)]),
        op("ReduceMax", [size, path("last")], largest, keepdims=1),
        *([op("Max", [largest, steps.path("least")], f"{x}/scale")] if steps.least else []),
        op("Div", [x, f"{x}/scale"], f"{x}/unit"),
        op("QuantizeLinear", [f"{x}/unit", steps.path("step"), steps.path("zero")], f"{x}/uint8"),
    ]


def gathered(node: NodeProto, table: str, scale: str) -> list[NodeProto]:
    """A row of the table; its names must not collide with those of a matmul that reads it directly."""
    ids, y = node.input[1], node.output[0]
    return [
        op("Gather", [table, ids], f"{y}/int8"),
        op("Cast", [f"{y}/int8"], f"{y}/steps", to=TensorProto.FLOAT),
        op("Gather", [scale, ids], f"{y}/scales"),
        op("Unsqueeze", [f"{y}/scales", path("last")], f"{y}/row_scale"),
        op("Mul", [f"{y}/steps", f"{y}/row_scale"], y),
    ]


def op(kind: str, inputs: list[str], output: str, **attributes: Any) -> NodeProto:
    return helper.make_node(kind, inputs, [output], name=f"{output}/{kind}", **attributes)

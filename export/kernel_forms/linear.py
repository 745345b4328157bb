"""Products with stored weights, and what follows them, as one operator each.

    [norm ->] x [* smoothing] -> MatMul(weight) -> Add(bias) -> activation -> Add(residual) -> norm        becomes
    x -> Linear(weight, bias, smoothing, residual, norms) -> y

Every part but the product is optional. A node is fused only if it alone reads what is before it. So the norm of a
pre-norm layer, whose sum the next skip connection reads as well, goes with the product behind it. Weights in int8 make
LinearInt8, which rounds rows of x as ort_forms/int8_matmul.py does.

    weight.int8, weight.scale -> DequantizeLinear -> weight        is read by the operator as it is stored
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx
from onnx import NodeProto

from ..ort_forms.int8_matmul import SIGNED, Steps, activations_of
from . import ops
from .graph_view import Fusion, GraphView, Mismatch, attributes_of, drop_unread_nodes, replace_fused, require
from .shapes import shapes_of
from .weights import stored_weight

NORMS = ("LayerNormalization", "RMSNormalization")
EPSILON = 1e-5  # ONNX's default


@dataclass
class Chain:
    """A product and what is fused to it so far: its nodes, the tensor that the last one makes, the operator's inputs
    and attributes, and the product's width."""

    nodes: list[NodeProto]
    end: str
    width: int
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Link:
    """Nodes that follow a chain, the last of which makes its new end, and what they are as arguments."""

    nodes: list[NodeProto]
    arguments: dict[str, Any]


def fuse_products(model: onnx.ModelProto, *, quantised: bool = False, outputs: bool = True) -> None:
    """Replaces all products with stored weights [in, out], in place. `quantised`: as in ops.linear. Not `outputs`:
    but for those whose result, with its bias, is an output of the graph."""
    graph = model.graph
    view, activations = GraphView(graph, shapes_of(model)), activations_of(graph)
    taken: set[str] = set()  # the first outputs of nodes that are fused
    fusions = []
    for product in [node for node in graph.node if node.op_type == "MatMul"]:
        try:
            chain = chain_of(view, product, activations, quantised)
        except Mismatch:
            continue
        before = input_norm(view, chain)
        if before is not None and taken.isdisjoint(before.nodes[0].output):
            chain.nodes = [*before.nodes, *chain.nodes]
            chain.arguments |= before.arguments
        for follow in (bias, activation, residual, norm):
            try:
                link = follow(view, chain)
                require(taken.isdisjoint(node.output[0] for node in link.nodes))
            except Mismatch:
                continue
            chain.nodes += link.nodes
            chain.end = link.nodes[-1].output[0]
            chain.arguments |= link.arguments
        if not outputs and chain.end in view.outputs:
            continue
        taken.update(node.output[0] for node in chain.nodes)
        fusions.append(Fusion(tuple(chain.nodes), ops.linear(product.name, chain.end, **chain.arguments)))
    replace_fused(graph, fusions)
    drop_unread_nodes(graph)  # DequantizeLinear


def chain_of(view: GraphView, product: NodeProto, activations: Mapping[str, Steps], quantised: bool) -> Chain:
    """A product with a stored weight, after the smoothing of its input."""
    x, weight = product.input[0], stored_weight(view, product.input[1], outputs=1)
    require(x not in view.weights)
    inputs, width = weight.dims
    arguments: dict[str, Any] = {"x": x, "weight": weight.name}
    # Rows are rounded after smoothing: only what an activation function makes itself has its steps.
    rounding = {"scale": weight.scale, "steps": activations.get(x, SIGNED)}
    arguments |= rounding if weight.scale else {"quantised": quantised}
    smooth = smoothing_of(view, x, inputs)
    if smooth is None:
        return Chain([product], product.output[0], width, arguments)
    arguments |= {"x": smooth.input[0], "smoothing": smooth.input[1]}
    return Chain([smooth, product], product.output[0], width, arguments)


def smoothing_of(view: GraphView, x: str, inputs: int) -> NodeProto | None:
    """The node that multiplies every channel of a product's input, for this product alone."""
    try:
        smooth = view.maker(x, "Mul")
        view.reader(x, "MatMul")
    except Mismatch:
        return None
    fits = view.is_weight(smooth.input[1], inputs) and view.shapes.get(smooth.input[0], ())[-1:] == (inputs,)
    return smooth if fits else None


def input_norm(view: GraphView, chain: Chain) -> Link | None:
    """The norm of a product's input, for this product alone."""
    x = chain.arguments["x"]
    try:
        node = view.maker(x, *NORMS)
        require(len(view.readers[x]) == 1 and x not in view.outputs)
        arguments = norm_arguments(view, node, view.shapes.get(x, ())[-1:])
    except Mismatch:
        return None
    return Link([node], {"x": node.input[0], **{f"input_{name}": value for name, value in arguments.items()}})


def bias(view: GraphView, chain: Chain) -> Link:
    add = view.reader(chain.end, "Add")
    name = view.other(add, chain.end)
    require(view.is_weight(name, chain.width))
    return Link([add], {"bias": name})


def activation(view: GraphView, chain: Chain) -> Link:
    """Relu, the exact Gelu, or Mul(x, Sigmoid(x))."""
    if len(view.readers.get(chain.end, [])) == 2:
        return silu(view, chain)
    node = view.reader(chain.end, "Relu", "Gelu")
    if node.op_type == "Relu":
        return Link([node], {"activation": ops.RELU})
    require(attributes_of(node).get("approximate", b"none") == b"none")
    return Link([node], {"activation": ops.GELU})


def silu(view: GraphView, chain: Chain) -> Link:
    require(chain.end not in view.outputs)
    gates = [node for node in view.readers[chain.end] if node.op_type == "Sigmoid"]
    require(len(gates) == 1)
    gate = gates[0].output[0]
    product = view.reader(gate, "Mul")
    require(view.other(product, gate) == chain.end)
    return Link([gates[0], product], {"activation": ops.SILU})


def residual(view: GraphView, chain: Chain) -> Link:
    """Another tensor of the same shape. It cannot depend on the chain, of which nobody else reads anything."""
    add = view.reader(chain.end, "Add")
    name = view.other(add, chain.end)
    shape = view.shapes.get(chain.end)
    require(name not in view.weights and shape is not None and view.shapes.get(name) == shape)
    return Link([add], {"residual": name})


def norm(view: GraphView, chain: Chain) -> Link:
    node = view.reader(chain.end, *NORMS)
    require(node.input[0] == chain.end)
    return Link([node], norm_arguments(view, node, (chain.width,)))


def norm_arguments(view: GraphView, node: NodeProto, width: tuple[int | str | None, ...]) -> dict[str, Any]:
    """A norm over the last axis, of that width, as arguments of ops.linear."""
    found = attributes_of(node)
    weights = [name for name in node.input[1:] if name]
    require(len(node.output) == 1 and found.get("axis", -1) == -1 and len(width) == 1 and isinstance(width[0], int))
    require(all(view.is_weight(name, int(width[0] or 0)) for name in weights))
    arguments = dict(zip(("norm_weight", "norm_bias"), weights, strict=False))
    return {**arguments, "epsilon": found.get("epsilon", EPSILON), "rms": node.op_type == NORMS[1]}

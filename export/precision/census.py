"""Counts the types of a graph, and checks that they match its precision and that a built engine kept them.

Precision is never taken from a name: the census is counted from the graph, kept in the manifest, and compared with the
constants inside every built engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

import onnx
from onnx import helper, shape_inference

from seq2engine.errors import BuildError, ExportError

from ..contract import PRECISIONS, STORED, VOCABULARY, Census
from ..graph_index import makers_of

HEAD = "output/MatMul"  # the product whose weight is the vocabulary's
SMALL = 1024  # bytes; constants below this stay in the graph while shapes are inferred
FEWEST = 0.9  # share of the graph's bytes of a type that an engine must have; small constants become part of kernels
MOST = 2.0  # multiple of the graph's bytes of a type that an engine may have: weights in two layouts
SLACK = 0.01  # share of all bytes that may be of any type


def dtype_of(element: int) -> str:
    return helper.tensor_dtype_to_np_dtype(element).name


def without_weight_data(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its large weights as inputs of fixed shape, so that inference need not copy them."""
    probe = onnx.ModelProto()
    probe.CopyFrom(onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import))
    probe.graph.name = model.graph.name
    probe.graph.node.extend(model.graph.node)
    probe.graph.input.extend(model.graph.input)
    probe.graph.output.extend(model.graph.output)
    for weight in model.graph.initializer:
        if len(weight.raw_data) < SMALL:
            probe.graph.initializer.append(weight)
        else:
            probe.graph.input.append(helper.make_tensor_value_info(weight.name, weight.data_type, list(weight.dims)))
    return probe


def types_of(model: onnx.ModelProto) -> dict[str, int]:
    """The element type of every tensor of a graph, weights included."""
    graph = shape_inference.infer_shapes(without_weight_data(model)).graph
    values = (*graph.input, *graph.value_info, *graph.output)
    weights = {weight.name: weight.data_type for weight in model.graph.initializer}
    return {**{value.name: value.type.tensor_type.elem_type for value in values}, **weights}


def stored_types(model: onnx.ModelProto) -> dict[str, str]:
    """Product -> the type its weight is stored in, before DequantizeLinear, Transpose and Cast.

    Products of two activations are left out.
    """
    weights = {weight.name: weight for weight in model.graph.initializer}
    makers = makers_of(model.graph.node)
    found = {}
    for node in model.graph.node:
        if node.op_type == "MatMul":
            name = node.input[1]
            while name in makers and makers[name].op_type in ("DequantizeLinear", "Transpose", "Cast"):
                name = makers[name].input[0]
            if name in weights:
                found[node.name] = dtype_of(weights[name].data_type)
    return found


def census_of(model: onnx.ModelProto) -> Census:
    """Bytes of weights and tensors by type, products by the type they compute in and that of their weights."""
    weights: Counter[str] = Counter()
    for weight in model.graph.initializer:
        weights[dtype_of(weight.data_type)] += len(weight.raw_data)
    types = types_of(model)
    nodes = model.graph.node
    return {
        "nodes": len(nodes),
        "weight_bytes": dict(weights),
        "tensors": dict(Counter(dtype_of(types[name]) for node in nodes for name in node.output)),
        "products": dict(Counter(dtype_of(types[node.output[0]]) for node in nodes if node.op_type == "MatMul")),
        "product_weights": dict(Counter(stored_types(model).values())),
        "attentions": sum(node.op_type == "Softmax" for node in nodes),
    }


def audit_precision(model: onnx.ModelProto, precision: str, fp32_nodes: Collection[str] = ()) -> None:
    """Raises an ExportError unless every product is of the precision; fp32 fallback nodes are exempt."""
    types, stored = types_of(model), stored_types(model)
    computes, wanted = PRECISIONS[precision], STORED[precision]
    problems = []
    for node in model.graph.node:
        if node.op_type != "MatMul":
            continue
        kind = dtype_of(types[node.output[0]])
        if kind != ("float32" if node.name in fp32_nodes else computes):
            problems.append(f"{node.name} computes in {kind}")
        allowed = {VOCABULARY[precision] if node.name == HEAD else wanted}
        if node.name in fp32_nodes and wanted == computes:
            allowed = allowed | {"float32"}
        if stored.get(node.name, wanted) not in allowed:
            problems.append(f"{node.name} reads weights in {stored[node.name]}")
    if problems:
        shown = "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")
        raise ExportError(f"graph {model.graph.name} is not {precision}: {shown}")


def check_engine(weights: Mapping[str, int], census: Census, precision: str, what: str) -> None:
    """Raises a BuildError if an engine's constants, bytes by type, are not those of the graph it was built from.

    A missing type was converted; an unexpected one shows what it was converted to. Weights of the precision's
    own type may be there twice, in two layouts.
    """
    meant: dict[str, int] = {
        name: size for name, size in census["weight_bytes"].items() if not name.startswith("int64")
    }
    total = sum(meant.values())
    lost = [n for n, size in meant.items() if size > SLACK * total and weights.get(n, 0) < FEWEST * size]
    own = STORED[precision]
    gained = [n for n, size in weights.items() if n != own and size > MOST * meant.get(n, 0) + SLACK * total]
    if lost or gained:
        have, want = (", ".join(f"{size} bytes of {n}" for n, size in w.items()) for w in (weights, meant))
        raise BuildError(
            f"{what} was built in another precision than {precision}: it holds {have or 'nothing'}, expected {want}; "
            "it was not kept: build again, and if it fails again choose another --precision"
        )

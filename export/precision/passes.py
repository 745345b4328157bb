"""Precision passes: a graph in fp32 to the same graph in another precision. Precision lives in the graph.

Each pass takes a model and its fp32 fallback nodes and returns a new model that keeps the contract of its precision:
the logits leave in fp32, ids, masks and audio features stay as they are.

    fp16, bf16         weights, constants, activations and caches in that type
    int8, int4, fp8    weights of products and embeddings in that type (quantise.py), all the rest in fp16
    w8a8               weights in int8, all the rest in fp32, for CPUs, which quantise activations to int8 as well;
                       their large channels are smoothed first (smoothing.py)

A fallback node stays in fp32 because fp16 cannot hold its numbers (fp32_nodes.py); its inputs and outputs are cast:

    x(fp16) -> Cast -> [MatMul -> Relu -> MatMul](fp32) -> Cast -> y(fp16)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from types import MappingProxyType
from typing import Protocol

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ..graph_index import copy_of, readers_of, rename_inputs, rename_outputs, replace_nodes
from .census import types_of
from .quantise import quantised_graph
from .smoothing import smoothed_graph

KEPT_FLOAT = ("logits", "features")  # output and input that are fp32 whatever the graph computes in
NOT_MEASURED: Mapping[str, np.ndarray] = MappingProxyType({})
LABEL: dict[int, str] = {TensorProto.FLOAT: "fp32", TensorProto.FLOAT16: "fp16", TensorProto.BFLOAT16: "bf16"}
Channels = Mapping[str, np.ndarray]  # tensor -> the largest magnitude of each of its channels, by calibration


class Pass(Protocol):
    def __call__(
        self, model: onnx.ModelProto, fp32_nodes: Collection[str] = (), channels: Channels = NOT_MEASURED
    ) -> onnx.ModelProto: ...


def keep_fp32(
    model: onnx.ModelProto, fp32_nodes: Collection[str] = (), channels: Channels = NOT_MEASURED
) -> onnx.ModelProto:
    return model


def fp16_from_fp32(
    model: onnx.ModelProto, fp32_nodes: Collection[str] = (), channels: Channels = NOT_MEASURED
) -> onnx.ModelProto:
    return typed(model, TensorProto.FLOAT16, fp32_nodes)


def bf16_from_fp32(
    model: onnx.ModelProto, fp32_nodes: Collection[str] = (), channels: Channels = NOT_MEASURED
) -> onnx.ModelProto:
    """bf16 has the range of fp32, so it needs no fallback nodes."""
    return typed(model, TensorProto.BFLOAT16, ())


def weights_from_fp32(
    form: str, model: onnx.ModelProto, fp32_nodes: Collection[str] = (), channels: Channels = NOT_MEASURED
) -> onnx.ModelProto:
    """Weights in this form, all the rest in fp16."""
    return typed(quantised_graph(model, form), TensorProto.FLOAT16, fp32_nodes)


def w8a8_from_fp32(
    model: onnx.ModelProto, fp32_nodes: Collection[str] = (), channels: Channels = NOT_MEASURED
) -> onnx.ModelProto:
    return quantised_graph(smoothed_graph(model, channels), "w8a8")


SMOOTHED = ("w8a8",)  # precisions whose pass reads channels
PASSES: dict[str, Pass] = {
    "fp32": keep_fp32,
    "fp16": fp16_from_fp32,
    "bf16": bf16_from_fp32,
    "int8": partial(weights_from_fp32, "int8"),
    "int4": partial(weights_from_fp32, "int4"),
    "fp8": partial(weights_from_fp32, "fp8"),
    "w8a8": w8a8_from_fp32,
}


def typed(model: onnx.ModelProto, element: int, fp32_nodes: Collection[str]) -> onnx.ModelProto:
    """The graph in another type, its fallback nodes in fp32, with a Cast wherever two types meet."""
    made = copy_of(model)
    graph = made.graph
    floats = {name for name, kind in types_of(model).items() if kind == TensorProto.FLOAT}
    computes = {node.name: element for node in graph.node} | dict.fromkeys(
        with_makers(graph, fp32_nodes), TensorProto.FLOAT
    )
    readers = readers_of(graph.node)
    kinds: dict[str, int] = {}
    for weight in graph.initializer:
        if weight.name in floats:
            wide = {computes[node.name] for node in readers.get(weight.name, ())} == {TensorProto.FLOAT}
            kinds[weight.name] = TensorProto.FLOAT if wide else element
            if kinds[weight.name] == element:
                array = rounded(numpy_helper.to_array(weight), element)
                weight.CopyFrom(numpy_helper.from_array(array, weight.name))
    for value in (*graph.input, *graph.output):
        if value.name in floats and value.name not in KEPT_FLOAT:
            value.type.tensor_type.elem_type = element
    kinds.update((value.name, value.type.tensor_type.elem_type) for value in graph.input if value.name in floats)
    nodes: list[onnx.NodeProto] = []
    casts: dict[tuple[str, int], str] = {}
    for node in graph.node:
        wanted = computes[node.name]
        for place, name in enumerate(node.input):
            if name in kinds and kinds[name] != wanted:
                if (name, wanted) not in casts:
                    casts[name, wanted] = f"{name}/{LABEL[wanted]}"
                    nodes.append(cast(name, casts[name, wanted], wanted))
                node.input[place] = casts[name, wanted]
        kinds.update((name, wanted) for name in node.output if name in floats)
        nodes.append(node)
    for value in graph.output:
        want = value.type.tensor_type.elem_type
        if value.name in floats and kinds[value.name] != want:
            inner = f"{value.name}/{LABEL[kinds[value.name]]}"
            rename_outputs(nodes, {value.name: inner})
            rename_inputs(nodes, {value.name: inner})
            nodes.append(cast(inner, value.name, want, value.name))
    replace_nodes(graph, nodes)
    return made


def cast(name: str, to_name: str, element: int, label: str | None = None) -> onnx.NodeProto:
    return helper.make_node("Cast", [name], [to_name], name=f"{label or to_name}/Cast", to=element)


def with_makers(graph: onnx.GraphProto, fp32_nodes: Collection[str]) -> set[str]:
    """Fallback nodes, and nodes that prepare weights for them alone: a DequantizeLinear or a Transpose of a weight."""
    weights = {weight.name for weight in graph.initializer}
    weights |= {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    readers = readers_of(graph.node)
    found = set(fp32_nodes)
    for node in reversed(graph.node):
        makes_weights = node.op_type in ("DequantizeLinear", "Transpose") and node.input[0] in weights
        if makes_weights and found.issuperset(reader.name for reader in readers.get(node.output[0], ())):
            found.add(node.name)
    return found


def rounded(array: np.ndarray, element: int) -> np.ndarray:
    if element == TensorProto.FLOAT16:
        return to_half(array)
    return array.astype(helper.tensor_dtype_to_np_dtype(element))


def to_half(array: np.ndarray) -> np.ndarray:
    """Rounds to fp16; what is too large for it becomes its largest number, not infinity."""
    limit = np.finfo(np.float16).max
    return np.clip(array, -limit, limit).astype(np.float16)

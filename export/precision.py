"""Precision passes: a graph in fp32 to the same graph in another precision. Precision lives in the graph.

Each pass takes a model and returns a new one that keeps the contract of its precision: the logits leave in fp32, ids
and masks stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

KEPT_FLOAT = ("logits",)  # outputs that leave in fp32 whatever the graph computes in


def keep_fp32(model: onnx.ModelProto) -> onnx.ModelProto:
    return model


def fp16_from_fp32(model: onnx.ModelProto) -> onnx.ModelProto:
    """Weights, constants, activations and caches in fp16; logits are cast back at the end.

    ... -> MatMul(fp16) -> Cast -> logits(fp32)
    """
    half = onnx.ModelProto()
    half.CopyFrom(model)
    graph = half.graph
    for weight in graph.initializer:
        if weight.data_type == TensorProto.FLOAT:
            weight.CopyFrom(numpy_helper.from_array(to_half(numpy_helper.to_array(weight)), weight.name))
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT and value.name not in KEPT_FLOAT:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    for output in [o.name for o in graph.output if o.name in KEPT_FLOAT]:
        inner = f"{output}/fp16"
        for node in graph.node:
            node.output[:] = [inner if name == output else name for name in node.output]
            node.input[:] = [inner if name == output else name for name in node.input]
        graph.node.append(helper.make_node("Cast", [inner], [output], name=f"{output}/Cast", to=TensorProto.FLOAT))
    return half


def to_half(array: np.ndarray) -> np.ndarray:
    """Rounds to fp16; what is too large for it becomes its largest number, not infinity."""
    limit = np.finfo(np.float16).max
    return np.clip(array, -limit, limit).astype(np.float16)


PASSES: dict[str, Callable[[onnx.ModelProto], onnx.ModelProto]] = {"fp32": keep_fp32, "fp16": fp16_from_fp32}

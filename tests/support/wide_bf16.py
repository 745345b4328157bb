"""Graphs in bf16 as ONNX Runtime's CPU can run them: computed in fp32, with inputs and outputs that stay bf16."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

BF16, FP32 = TensorProto.BFLOAT16, TensorProto.FLOAT


def widened(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph with fp32 in every place of bf16; one without bf16 as it is. Weights are in the message."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == BF16:
            value.type.tensor_type.elem_type = FP32
    for weight in graph.initializer:
        widen(weight)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name in ("to", "output_dtype") and attribute.i == BF16:
                attribute.i = FP32
            elif attribute.HasField("t"):
                widen(attribute.t)
    return made


def widen(tensor: TensorProto) -> None:
    if tensor.data_type == BF16:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))


def run_wide(session: Any, outputs: dict[str, Any], feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Runs a widened graph on arrays of its own types; `outputs` have the type of each as `dtype`."""
    wide = {name: array.astype(np.float32) if is_bf16(array.dtype) else array for name, array in feed.items()}
    results = session.run(list(outputs), wide)
    return [
        result.astype(tensor.dtype) if is_bf16(tensor.dtype) else result
        for result, tensor in zip(results, outputs.values(), strict=True)
    ]


def is_bf16(dtype: np.dtype) -> bool:
    return dtype.name == "bfloat16"

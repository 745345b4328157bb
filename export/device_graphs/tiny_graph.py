"""Builds a device graph: nodes between the tensors of a GraphSpec, and constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from ..contract import GraphSpec, TensorSpec

OPSET = 20  # of the growing cache; no op here is younger
ELEMENT = {
    "float32": TensorProto.FLOAT,
    "float64": TensorProto.DOUBLE,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int64": TensorProto.INT64,
    "bool": TensorProto.BOOL,
}


def tiny_graph(
    spec: GraphSpec, nodes: Sequence[NodeProto], constants: Mapping[str, np.ndarray] | None = None
) -> onnx.ModelProto:
    """The graph of a spec; `constants` by name."""
    graph = helper.make_graph(
        nodes,
        spec.name,
        [value_info(tensor) for tensor in spec.inputs],
        [value_info(tensor) for tensor in spec.outputs],
        [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="seq2engine")
    made.ir_version = helper.find_min_ir_version_for(made.opset_import)
    return made


def value_info(tensor: TensorSpec) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(tensor.name, ELEMENT[tensor.dtype], tensor.axes)

"""Checks a graph against the contract: names, types, axes, op set, weights stored once, no baked-in sizes."""

from __future__ import annotations

from math import prod

import numpy as np
import onnx
from onnx import numpy_helper, shape_inference

from seq2engine.errors import ExportError

from .contract import GraphSpec, TensorSpec
from .precision.census import SMALL, dtype_of, without_weight_data

# Sizes that no layer has and that differ from each other and between the two sets: an axis that was exported as a
# constant cannot match both. The second set is large, because truncation to some length shows only beyond it.
PROBES = (
    {"B": 2, "K": 3, "S": 5, "F": 10, "L": 23, "M": 26},
    {"B": 1009, "K": 97, "S": 10007, "F": 20014, "L": 100003, "M": 100100},
)
FORBIDDEN = {"If": "branches do not build in TensorRT", "Loop": "the decode loop is ours", "Scan": "the loop is ours"}


def audit_graph(model: onnx.ModelProto, spec: GraphSpec) -> None:
    """Raises one ExportError that lists every way in which the graph breaks the contract."""
    problems = [
        *compare_tensors("input", list(model.graph.input), spec.inputs),
        *compare_tensors("output", list(model.graph.output), spec.outputs),
        *node_problems(model),
        *weight_problems(model),
    ]
    if not problems:
        for sizes in PROBES:
            problems += shape_problems(model, spec, sizes | dict(spec.fixed))
    if problems:
        shown = "; ".join(problems[:6]) + (f"; and {len(problems) - 6} more" if len(problems) > 6 else "")
        raise ExportError(f"graph {spec.name} breaks the contract: {shown}")


def compare_tensors(side: str, have: list[onnx.ValueInfoProto], want: tuple[TensorSpec, ...]) -> list[str]:
    names = [value.name for value in have]
    wanted = [tensor.name for tensor in want]
    if names != wanted:
        missing, extra = sorted(set(wanted) - set(names)), sorted(set(names) - set(wanted))
        return [
            f"{side}s differ: missing {missing}, unexpected {extra}" if missing or extra else f"{side}s out of order"
        ]
    problems = []
    for value, tensor in zip(have, want, strict=True):
        described = TensorSpec(value.name, dtype_of(value.type.tensor_type.elem_type), axes_of(value))
        if described != tensor:
            problems.append(f"{side} {described}, expected {tensor}")
    return problems


def axes_of(value: onnx.ValueInfoProto) -> tuple[str | int, ...]:
    return tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim)


def node_problems(model: onnx.ModelProto) -> list[str]:
    problems = []
    for node in model.graph.node:
        if node.op_type in FORBIDDEN:
            problems.append(f"{node.name} is an {node.op_type} ({FORBIDDEN[node.op_type]})")
        if node.domain not in ("", "ai.onnx"):
            problems.append(f"{node.name} is of {node.domain}, expected standard ops only")
    return problems


def weight_problems(model: onnx.ModelProto) -> list[str]:
    """Large weights must not be stored twice, not even transposed, as happens easily with a tied head."""
    first: dict[tuple[int, int], onnx.TensorProto] = {}
    problems = []
    for weight in model.graph.initializer:
        if len(weight.raw_data) < SMALL:
            continue  # such constants may repeat
        array = numpy_helper.to_array(weight)
        total = int(array.view(f"u{array.itemsize}").sum(dtype=np.uint64))  # cheap, and independent of the order
        twin = first.setdefault((len(weight.raw_data), total), weight)
        if twin is not weight and same_weights(array, numpy_helper.to_array(twin)):
            problems.append(f"{weight.name} stores the same weights as {twin.name}")
    return problems


def same_weights(a: np.ndarray, b: np.ndarray) -> bool:
    if (a == a.flat[0]).all():
        return False  # norms and biases before training: equal, but not each other's copy
    return np.array_equal(a, b) or np.array_equal(a, b.T)


def shape_problems(model: onnx.ModelProto, spec: GraphSpec, sizes: dict[str, int]) -> list[str]:
    """Infers the outputs' shapes for inputs of these sizes; a size baked in anywhere on the way shows."""
    probe = without_weight_data(model)
    for value, tensor in zip(probe.graph.input, spec.inputs, strict=False):  # weights follow the contract's inputs
        set_shape(value, tensor.shape(sizes))
    for value in probe.graph.output:
        value.type.tensor_type.ClearField("shape")
    try:
        inferred = shape_inference.infer_shapes(probe, check_type=True, strict_mode=True, data_prop=True)
    except shape_inference.InferenceError as error:
        line = " ".join(str(error).split())
        return [f"at {sizes} the graph does not fit together ({line})"]
    problems = reshape_problems(inferred, sizes)
    for value, tensor in zip(inferred.graph.output, spec.outputs, strict=True):
        have, want = axes_of(value), tensor.shape(sizes)
        if have != want:
            problems.append(
                f"output {tensor} has shape {list(have)} at {sizes}, expected {list(want)}: an axis is baked in"
            )
    return problems


def reshape_problems(inferred: onnx.ModelProto, sizes: dict[str, int]) -> list[str]:
    """Inference lets a Reshape change the number of elements, and broadcasting then hides a size baked in as 1."""
    graph = inferred.graph
    shapes = {value.name: axes_of(value) for value in (*graph.input, *graph.value_info, *graph.output)}
    problems = []
    for node in graph.node:
        if node.op_type == "Reshape":
            before, after = shapes[node.input[0]], shapes[node.output[0]]
            known = all(isinstance(axis, int) for axis in (*before, *after))
            if known and prod(map(int, before)) != prod(map(int, after)):
                problems.append(f"{node.name} makes {list(after)} of {list(before)} at {sizes}: an axis is baked in")
    return problems


def set_shape(value: onnx.ValueInfoProto, shape: tuple[int, ...]) -> None:
    for dim, size in zip(value.type.tensor_type.shape.dim, shape, strict=True):
        dim.dim_value = size

"""Quantised weights: each weight of a matmul or an embedding becomes small integers (or fp8) and scales.

    weight -> numbers (int8, int4 or fp8), scales -> DequantizeLinear -> consumers of the weight

Scales belong to one output of the product (int8, fp8), or to a block of inputs of one output (int4). A table that is
embedding and output projection at once is quantised once, per row, which is per output of the projection as well.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from seq2engine.errors import ExportError

from ..contract import STORED, VOCABULARY
from ..graph_index import copy_of, replace_nodes
from .smoothing import smoothing_from_graph

MINIMUM_OPSET = {"int4": 21}  # the first whose DequantizeLinear takes it; the others have been there for longer
BLOCKS = (32, 16)  # inputs that share a scale in int4: the first that divides their number. docs/LOG.md has the errors


@dataclass(frozen=True)
class Scheme:
    """A type for weights: its largest number, and the most a weight may move, as a share of its scale's largest."""

    element: int
    largest: float
    rounding: float
    paired: bool = False  # neighbouring inputs of an output must not exceed the largest together either


SCHEMES = {
    "int8": Scheme(TensorProto.INT8, 127.0, 0.5 / 127),
    "int4": Scheme(TensorProto.INT4, 7.0, 0.5 / 7),
    "float8_e4m3fn": Scheme(TensorProto.FLOAT8E4M3FN, 448.0, 1 / 16),
}
# A CPU without VNNI adds the products of inputs 2i and 2i+1 in 16 bits (int8_matmul.py): 255 times the sum of their
# weights must fit. Where no two neighbours are large, weights have all of int8.
PAIRED = ("w8a8",)
HEAD = "output.weight"


def quantised_graph(model: onnx.ModelProto, precision: str) -> onnx.ModelProto:
    """The fp32 graph with quantised weights; it still computes in fp32. Tensors keep their names."""
    made = copy_of(model)
    graph = made.graph
    multiplied = {node.input[1] for node in graph.node if node.op_type == "MatMul"}
    weights = [w for w in graph.initializer if len(w.dims) == 2 and w.name.endswith(".weight")]
    restored = []
    for weight in weights:
        summed = 0 if weight.name in multiplied else 1  # a product's weight is stored [in, out], a table [out, in]
        layer = weight.name in multiplied and weight.name != HEAD
        scheme = (STORED if layer else VOCABULARY)[precision]
        array = numpy_helper.to_array(weight)
        blocked = block_of(weight.name, array.shape[summed]) if scheme == "int4" else None
        numbers, scales = quantised(array, summed, scheme_of(precision, scheme), blocked)
        names = [f"{weight.name}.{scheme}", f"{weight.name}.scale"]
        where: dict[str, Any] = {"axis": summed, "block_size": blocked} if blocked else {"axis": 1 - summed}
        restored.append(
            helper.make_node("DequantizeLinear", names, [weight.name], name=f"{weight.name}/DequantizeLinear", **where)
        )
        graph.initializer.remove(weight)
        graph.initializer.extend(numpy_helper.from_array(a, n) for a, n in zip((numbers, scales), names, strict=True))
    replace_nodes(graph, [*restored, *graph.node])
    for opset in made.opset_import:
        opset.version = max(opset.version, MINIMUM_OPSET.get(precision, 0))
    made.ir_version = helper.find_min_ir_version_for(made.opset_import)
    return made


def scheme_of(precision: str, stored: str) -> Scheme:
    """How weights of a type are rounded in a precision."""
    return dataclasses.replace(SCHEMES[stored], paired=precision in PAIRED)


def block_of(name: str, inputs: int) -> int:
    for block in BLOCKS:
        if inputs % block == 0:
            return block
    raise ExportError(
        f"{name} has {inputs} inputs, which is not a multiple of {BLOCKS[-1]}, so int4 cannot share scales among them; "
        "export with --precision int8"
    )


def quantised(
    array: np.ndarray, summed: int, scheme: Scheme, block: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """A weight as numbers of its shape and scales: one for each output, or one for each block of inputs of it.

    Scales are fp16 numbers, rounded up, so that no weight is clipped, whatever type the scales are stored in.
    """
    parts = blocks_of(array, summed, block)
    wanted = magnitudes(parts, summed + 1, scheme.paired) / scheme.largest
    scales = np.maximum(wanted, 2.0**-24).astype(np.float16)  # the least number of fp16, for weights that are all zero
    scales = np.where(scales < wanted, np.nextafter(scales, np.float16(np.inf)), scales).astype(np.float32)
    steps = parts / scales
    kind = helper.tensor_dtype_to_np_dtype(scheme.element)
    numbers = (np.rint(steps) if scheme.element != TensorProto.FLOAT8E4M3FN else steps).astype(kind)
    scales = scales.squeeze(summed + 1)
    return numbers.reshape(array.shape), scales if block else scales.reshape(-1)


def magnitudes(parts: np.ndarray, summed: int, paired: bool) -> np.ndarray:
    """What a scale must cover: the largest weight, or sum of two neighbours, which rounding may raise by one step."""
    found = np.abs(parts).max(axis=summed, keepdims=True)
    if not paired:
        return found
    inputs = parts.shape[summed]
    even, odd = (parts.take(np.arange(first, inputs - inputs % 2, 2), axis=summed) for first in (0, 1))
    return np.maximum(found, np.abs(even + odd).max(axis=summed, keepdims=True, initial=0.0))


def blocks_of(array: np.ndarray, summed: int, block: int | None) -> np.ndarray:
    """[in, out] -> [blocks, block, out]; [out, in] -> [out, blocks, block]. Without a block all inputs are one."""
    size = block or array.shape[summed]
    return array.reshape(*array.shape[:summed], array.shape[summed] // size, size, *array.shape[summed + 1 :])


def restored(numbers: np.ndarray, scales: np.ndarray, axis: int, block: int) -> np.ndarray:
    """What DequantizeLinear makes of numbers and scales, in fp32. No block is 0."""
    return numbers.astype(np.float32) * spread(scales, axis, block)


def spread(scales: np.ndarray, axis: int, block: int) -> np.ndarray:
    """Scales in a shape that multiplies the numbers they belong to."""
    wide = scales.astype(np.float32)
    return wide.repeat(block, axis=axis) if block else np.expand_dims(wide, 1 - axis)


@dataclass(frozen=True)
class StoredWeight:
    """A weight that a quantised graph computes with, in fp32, as the reference model stores it: [out, in].

    `furthest` is how far rounding may have moved each of its numbers.
    """

    array: np.ndarray
    furthest: np.ndarray


def weights_from_graph(model: onnx.ModelProto) -> dict[str, StoredWeight]:
    """The weights of a quantised graph, by the names they have in the reference model."""
    arrays = {weight.name: weight for weight in model.graph.initializer}
    multiplied = {node.input[1] for node in model.graph.node if node.op_type == "MatMul"}
    smoothing = smoothing_from_graph(model)
    found = {}
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear":
            where = {attribute.name: attribute.i for attribute in node.attribute}
            numbers, scales = (numpy_helper.to_array(arrays[name]) for name in node.input)
            place = where["axis"], where.get("block_size", 0)
            array, steps = restored(numbers, scales, *place), spread(scales, *place)
            scheme = next(s for s in SCHEMES.values() if s.element == arrays[node.input[0]].data_type)
            furthest = scheme.rounding * scheme.largest * steps
            name = node.output[0]
            if name in multiplied:
                array, furthest = array.T, furthest.T
            factors = smoothing.get(name.removesuffix(".weight"))
            if factors is not None:
                array, furthest = array * factors, furthest * factors
            found[name] = StoredWeight(array, furthest)
    return found

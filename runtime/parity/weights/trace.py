"""Traces a stored weight back to the reference's tensor: dequantised, transposed, and within the rounding of its type.

It does not use the passes that wrote the weight, so it finds faults of the passes as well:

    fp32              the same bits
    fp16, bf16        the nearest number of that type, as PyTorch rounds; fp16 ends at its largest number
    int8, int4        number * scale is within half a scale of the weight: nothing was cut off
    w8a8              as int8; a weight whose input is multiplied by factors (smoothing.py) is divided by them
    fp8               within 1/16 of the weight, or half the least number times the scale
"""

from __future__ import annotations

import numpy as np
import torch
from onnx import helper

from .stored import StoredGraph, StoredWeight

BLOCK = 1 << 22  # numbers compared at once
DIGITS = 1.0 + 2.0**-20  # rounding of number * scale in fp32, with a margin
FP8 = "float8_e4m3fn"


def passes_of(graph: StoredGraph, weight: StoredWeight) -> str:
    """The named passes between the reference's tensor and what is stored."""
    tensor = graph.tensors[weight.parts[0]]
    kind = helper.tensor_dtype_to_np_dtype(tensor.data_type).name
    steps = ["transpose"] if weight.transposed else []
    if weight.product in graph.smoothing:
        steps.append("smooth")
    if weight.restoring is not None:
        steps.append(f"quantise {kind}")
        steps.append(f"scale {helper.tensor_dtype_to_np_dtype(graph.tensors[weight.parts[1]].data_type).name}")
    elif kind != "float32":
        steps.append(f"cast {kind}")
    return ", ".join(steps) or "copy"


def untraced(graph: StoredGraph, weight: StoredWeight, reference: np.ndarray, computed: bool) -> str:
    """Why a stored weight does not match the reference's within the rounding of its type; '' if it does.

    A `computed` tensor (a table of sines) may differ by one unit in the last place: another CPU computed it.
    """
    expected = reference.T if weight.transposed else reference
    if weight.restoring is not None:
        return unrestored(graph, weight, expected)
    stored = graph.array(weight.parts[0])
    if stored.shape != expected.shape:
        return f"it is {list(stored.shape)}, expected {list(expected.shape)}"
    for block in blocks_of(stored):
        found, wanted = stored[block].astype(np.float32), cast(expected[block], stored.dtype.name)
        wrong = np.abs(found - wanted) > np.spacing(np.abs(wanted)) * ulps(stored.dtype.name) if computed else (
            found != wanted
        )  # fmt: skip
        if (wrong & ~(np.isnan(found) & np.isnan(wanted))).any():
            return f"{int(wrong.sum())} numbers or more are not the reference's in {stored.dtype.name}"
    return ""


def cast(array: np.ndarray, kind: str) -> np.ndarray:
    """Rounded to a type, by PyTorch, as fp32."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if kind == "float16":
        tensor = tensor.clamp(-65504.0, 65504.0)
    return tensor.to(getattr(torch, kind)).float().numpy()


def ulps(kind: str) -> float:
    """A unit in the last place of a type, in those of fp32."""
    return {"float32": 1.0, "float16": 2.0**13, "bfloat16": 2.0**16}[kind]


def unrestored(graph: StoredGraph, weight: StoredWeight, expected: np.ndarray) -> str:
    assert weight.restoring is not None
    where = {attribute.name: attribute.i for attribute in weight.restoring.attribute}
    axis, size = where.get("axis", 1), where.get("block_size", 0)
    numbers, scales = (graph.array(name) for name in weight.parts)
    if numbers.shape != expected.shape:
        return f"it is {list(numbers.shape)}, expected {list(expected.shape)}"
    wide = scales.astype(np.float32)
    wide = wide.repeat(size, axis=axis) if size else np.expand_dims(wide, 1 - axis)
    if np.broadcast_shapes(wide.shape, numbers.shape) != numbers.shape:
        return f"its scales {list(scales.shape)} do not fit {list(numbers.shape)}"
    wide = np.broadcast_to(wide, numbers.shape)
    for block in blocks_of(numbers):
        scale = wide[block]
        error = np.abs(numbers[block].astype(np.float32) * scale - expected[block])
        allowed = scale * 0.5
        if numbers.dtype.name == FP8:
            allowed = np.maximum(np.abs(expected[block]) / 16, scale * 2.0**-10)
        wrong = ~(error <= allowed * DIGITS)
        if wrong.any():
            return f"{int(wrong.sum())} numbers or more are further than their rounding from the reference's"
    return ""


def blocks_of(array: np.ndarray) -> list[slice | tuple[()]]:
    """Parts along the first axis; a number without axes is one part."""
    if not array.ndim:
        return [()]
    rows = max(1, BLOCK // max(1, array[:1].size))
    return [slice(first, first + rows) for first in range(0, len(array), rows)]

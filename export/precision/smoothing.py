"""Smoothing before activations are rounded to int8: channels that are much larger than the others are divided by a
factor, and the weights that read them are multiplied by it.

    norm -> x ------------------> MatMul(weight)          a channel of x reaches 64, the others 3: 120 of 127 steps
    norm -> x -> Mul(smoothing) -> MatMul(weight * 1 / smoothing)                     are for the one channel

Both are the same function. A row of activations has one scale, so its largest channel decides how coarse all others
become. Only products that read the residual stream are smoothed, which is a norm's output, or the sum that embeddings
are: there such channels are in the same place whatever the text, so a calibration with random sources finds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ..artifact.graph_files import array_of
from ..graph_index import copy_of, makers_of, replace_nodes

NORMS = ("LayerNormalization", "RMSNormalization")
STREAM = (*NORMS, "Add")  # ops whose result is the residual stream
HEAD = "output.weight"  # stays as it is: shortlists and screening take rows of it
SUFFIX = ".smoothing"  # appended to the matmul's name: the vector that x is multiplied by
WORTH_IT = 0.75  # of the rounding error's power that may be left: less than a quarter gained is not worth a node
LEAST = 1e-5  # of a channel's and a weight's magnitude: one that is always zero has no factor of its own


def smoothed_inputs(model: onnx.ModelProto) -> dict[str, str]:
    """Weight -> the tensor it multiplies, for every product that reads the residual stream."""
    makers = makers_of(model.graph.node)
    weights = {weight.name for weight in model.graph.initializer}
    return {
        node.input[1]: node.input[0]
        for node in model.graph.node
        if node.op_type == "MatMul"
        and node.input[1] in weights - {HEAD}
        and node.input[0] in makers
        and makers[node.input[0]].op_type in STREAM
    }


def smoothed_graph(model: onnx.ModelProto, channels: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """The same function with smoothed inputs of products. `channels`: tensor -> the largest magnitude of each channel.

    Where it would gain little, and where a tensor was not measured, the product stays as it is.
    """
    stored = {weight.name: weight for weight in model.graph.initializer}
    chosen: dict[str, np.ndarray] = {}
    for name, tensor in smoothed_inputs(model).items():
        if tensor in channels:
            weight = numpy_helper.to_array(stored[name])  # [in, out]
            factors = factors_of(channels[tensor], weight)
            if error_left(channels[tensor], weight, factors) < WORTH_IT:
                chosen[name] = factors
    return graph_with_factors(model, chosen)


def graph_with_factors(model: onnx.ModelProto, chosen: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """The same function; `chosen`: weight -> what each channel of its product's input is divided by."""
    made = copy_of(model)
    for stored in made.graph.initializer:
        if stored.name in chosen:
            weight = numpy_helper.to_array(stored)  # [in, out]
            stored.CopyFrom(numpy_helper.from_array(weight * chosen[stored.name][:, None], stored.name))
    nodes = []
    for node in made.graph.node:
        if node.op_type == "MatMul" and node.input[1] in chosen:
            product = node.input[1].removesuffix(".weight")
            inverse = (1.0 / chosen[node.input[1]]).astype(np.float32)
            made.graph.initializer.append(numpy_helper.from_array(inverse, f"{product}{SUFFIX}"))
            smoothed = f"{product}/smoothed"
            nodes.append(
                helper.make_node("Mul", [node.input[0], f"{product}{SUFFIX}"], [smoothed], name=f"{product}/Smooth")
            )
            node.input[0] = smoothed
        nodes.append(node)
    replace_nodes(made.graph, nodes)
    return made


def factors_of(channels: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """What each channel is divided by: activation and weight meet half way, as in SmoothQuant with an exponent of 0.5.

    Powers of two, so that dividing one and multiplying the other rounds nothing.
    """
    sizes, weights = np.maximum(channels, LEAST), np.maximum(np.abs(weight).max(axis=1), LEAST)
    logarithms = 0.5 * (np.log2(sizes) - np.log2(weights))
    return np.exp2(np.rint(logarithms - np.median(logarithms))).astype(np.float32)


def kept_factors(model: onnx.ModelProto, smoothing: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Factors of a graph that is being checked, of its `smoothing` (`smoothing_from_graph`): those that an export could
    have chosen for this fp32 graph. Which ones it did choose is a matter of its calibration."""
    sizes = {weight.name: weight.dims[0] for weight in model.graph.initializer if weight.dims}
    found = {}
    for name in smoothed_inputs(model):
        inverse = smoothing.get(name.removesuffix(".weight"))
        if inverse is not None and inverse.dtype == np.float32 and inverse.shape == (sizes[name],):
            powers = np.frexp(inverse)[0] == 0.5  # of two, which also leaves out zero, NaN and what is negative
            if powers.all():
                found[name] = 1.0 / inverse
    return found


def error_left(channels: np.ndarray, weight: np.ndarray, factors: np.ndarray) -> float:
    """The power of the error that rounding leaves in the product, as a share of what it is without smoothing.

    An error is as large as a step, which is a share of the row's largest channel, times the weights it meets.
    """
    power = np.square(weight, dtype=np.float64).sum(axis=1)
    without = channels.max() ** 2 * power.sum()
    return float((channels / factors).max() ** 2 * (power * factors**2).sum() / without) if without else 1.0


def smoothing_from_graph(model: onnx.ModelProto, folder: Path | None = None) -> dict[str, np.ndarray]:
    """Product such as `decoder.0.feed_forward.up` -> what its input is multiplied by, of the products that have it.

    Weights that are not loaded are in `folder`.
    """
    return {
        weight.name.removesuffix(SUFFIX): array_of(weight, folder or Path())
        for weight in model.graph.initializer
        if weight.name.endswith(SUFFIX)
    }

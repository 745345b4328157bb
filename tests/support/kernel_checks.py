"""Whether a graph of fused operators computes what the graph before it does: node by node, and as a whole.

A fused node reads tensors that the graph before it has too, and makes one that it has too, under the same names. So
every fused node is run on what ONNX Runtime computes there, and held to the tensors that it computes from them. All
other nodes must be nodes of the graph before. Together that is the whole graph, and the error allowed is that of one
operator: nothing is amplified by layers that follow, and int8 rows are rounded from the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnxruntime
from onnx import NodeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.shape_inference import infer_shapes

from seq2engine.export.graph_index import copy_of, makers_of
from support.kernel_ops import DOMAIN, OPS, activated, heads_of, int8_product, rounded_rows
from support.rounding import EXP, FP32, apart, exp_sum_error, passes, sum_error

Arrays = Mapping[str, np.ndarray]
SLOPE = 1.13  # the steepest of an activation function: that of Gelu
SCALED = apart([(6, FP32)])  # an exact sum becomes a float and is multiplied by three scales, two of them quotients
INPUTS = {
    "Linear": ("x", "weight", "scale", "bias", "smoothing", "residual", "norm_weight", "norm_bias"),
    "SelfAttention": ("q", "k", "v", "write_index", "mask"),
    "CrossAttention": ("q", "k", "v", "mask"),
    "EncoderAttention": ("q", "mask"),
    "Candidates": ("x", "weight", "scale", "bias", "wanted", "smoothing"),
    "Embedding": ("tokens", "table", "scale", "positions", "place"),
    "SourceHeads": ("kv",),
}


def fused_nodes(model: onnx.ModelProto) -> list[NodeProto]:
    return [node for node in model.graph.node if node.domain == DOMAIN]


def attributes(node: NodeProto) -> dict:
    return {one.name: helper.get_attribute_value(one) for one in node.attribute}


def run_kernels(model: onnx.ModelProto, feeds: Arrays) -> dict[str, np.ndarray]:
    """Outputs of a graph with fused operators, by name."""
    names = [value.name for value in model.graph.output]
    return dict(zip(names, ReferenceEvaluator(model, new_ops=OPS).run(names, dict(feeds)), strict=True))


def run_node(node: NodeProto, given: Arrays) -> dict[str, np.ndarray]:
    """Outputs of one fused node, by name."""
    names = [name for name in dict.fromkeys(node.input) if name]
    values = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(given[name].dtype), None) for name in names
    ]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in node.output]
    graph = helper.make_graph([node], "node", values, outputs)
    imports = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)]
    evaluator = ReferenceEvaluator(helper.make_model(graph, opset_imports=imports), new_ops=OPS)
    found = evaluator.run(None, {name: given[name] for name in names})
    return dict(zip(node.output, found, strict=True))


def tensors_of(plain: onnx.ModelProto, names: set[str], feeds: Arrays) -> dict[str, np.ndarray]:
    """Inputs, weights, and these tensors as ONNX Runtime makes them."""
    made = copy_of(plain)
    shown = {value.name for value in made.graph.output}
    kinds = {value.name: value.type.tensor_type.elem_type for value in infer_shapes(plain).graph.value_info}
    made.graph.output.extend(
        helper.make_tensor_value_info(name, kinds.get(name, TensorProto.FLOAT), None) for name in sorted(names - shown)
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(made.SerializeToString(), options, providers=["CPUExecutionProvider"])
    asked = [value.name for value in made.graph.output]
    weights = {weight.name: numpy_helper.to_array(weight) for weight in made.graph.initializer}
    return {**weights, **feeds, **dict(zip(asked, session.run(asked, dict(feeds)), strict=True))}


def check_nodes(plain: onnx.ModelProto, made: onnx.ModelProto, feeds: Arrays) -> None:
    """Every fused node makes what the plain graph makes of the same inputs. Both graphs' products are int8 or float."""
    makers = makers_of(plain.graph.node)
    fused = fused_nodes(made)
    read = {name for node in fused for name in (*node.input, *node.output) if name in makers}
    given = tensors_of(plain, read, {name: feeds[name] for name in feeds if name != "wanted"}) | dict(feeds)
    for node in fused:
        inputs = {place: given[name] for place, name in zip(places_of(node), node.input, strict=False) if name}
        for name, array in run_node(node, given).items():
            if name not in makers:
                continue  # candidates, which only the fused graph has
            assert array.dtype == given[name].dtype, f"{node.name}: {name}"
            assert array.shape == given[name].shape, f"{node.name}: {name}"
            allowed = error_of(node, inputs)
            np.testing.assert_allclose(array, given[name], rtol=0, atol=allowed, err_msg=f"{node.name}: {name}")


def check_rest(plain: onnx.ModelProto, made: onnx.ModelProto) -> None:
    """All that is not fused is as it was: nodes, weights, inputs and outputs."""
    before = {node.SerializeToString(deterministic=True) for node in plain.graph.node}
    others = [node for node in made.graph.node if node.domain != DOMAIN]
    assert all(node.SerializeToString(deterministic=True) in before for node in others)
    stored = {weight.name: weight.SerializeToString(deterministic=True) for weight in plain.graph.initializer}
    for weight in made.graph.initializer:
        assert weight.SerializeToString(deterministic=True) == stored[weight.name], weight.name
    read = {name for node in made.graph.node for name in node.input}
    assert all(weight.name in read for weight in made.graph.initializer)
    shared = list(made.graph.input)[: len(plain.graph.input)]
    assert shared == list(plain.graph.input)
    names = [value.name for value in made.graph.output]
    assert names[: len(plain.graph.output)] == [value.name for value in plain.graph.output]


def places_of(node: NodeProto) -> tuple[str, ...]:
    return INPUTS[node.op_type.removesuffix("Int8")]


def error_of(node: NodeProto, given: Arrays) -> float:
    """How far rounding may set what two computations of a node make of the same inputs."""
    if node.op_type.startswith(("Embedding", "SourceHeads")):
        return 0.0  # the same operations, one by one, or none at all
    if node.op_type.endswith("Attention"):
        return attention_error(node, given)
    return product_error(node, given)


def product_error(node: NodeProto, given: Arrays) -> float:
    """Of a product, and what is added, activated and normalised after it."""
    options = attributes(node)
    weight = given["weight"].T if options.get("by_rows") else given["weight"]
    x = given["x"] * given.get("smoothing", 1)
    if "scale" in given:
        steps = (options["above"], options["zero"], options["least"])
        product = int8_product(x, weight, given["scale"], *steps)
        error = SCALED * np.abs(product).max()
        assert np.isfinite(rounded_rows(x, *steps)[1]).all()
    else:
        product = x.astype(np.float64) @ weight.astype(np.float64)
        error = sum_error(len(weight)) * np.linalg.norm(x, axis=-1).max() * np.linalg.norm(weight, axis=0).max()
    added = [np.abs(given[place]).max() for place in ("bias", "residual") if place in given]
    largest = np.abs(product).max() + sum(added)
    error = SLOPE * error + apart([(EXP + 4, FP32)]) * largest  # an addition, an activation, another addition
    if "norm_weight" not in given:
        return float(error)
    total = activated(product + given.get("bias", 0), options["activation"].decode()) + given.get("residual", 0)
    centred = total if options["rms"] else total - total.mean(axis=-1, keepdims=True)
    spread = np.sqrt(np.square(centred).mean(axis=-1) + options["epsilon"]).min()
    factor = np.abs(given["norm_weight"]).max() / spread
    sums = apart([(2 * passes(total.shape[-1]) + 4, FP32)])  # of the mean and of squares
    shifted = np.abs(given["norm_bias"]).max() if "norm_bias" in given else 0.0
    return float(2 * error * factor + sums * (np.abs(total).max() * factor + shifted))


def attention_error(node: NodeProto, given: Arrays) -> float:
    """A score's error is the relative one of its weight, and of the sum that all weights are divided by."""
    options = attributes(node)
    if node.op_type == "EncoderAttention":
        _, k, v = np.split(heads_of(given["q"], 3 * options["heads"]), 3, axis=1)
        given = {**given, "k": k, "v": v}
    transposed = bool(options.get("transposed"))
    width = given["k"].shape[2 if transposed else 3]
    keys = given["v"].shape[2]
    longest = np.abs(given["q"]).max() * np.sqrt(width)  # of q, and of the keys that are written with it
    norms = np.linalg.norm(given["k"], axis=2 if transposed else 3).max()
    score = abs(options["scale"]) * sum_error(width) * longest * max(norms, longest)
    relative = 2 * score + exp_sum_error(keys) + sum_error(keys) + apart([(EXP + 2, FP32)])
    values = max(np.abs(given["v"]).max(), np.abs(given["q"]).max(), 1.0)  # weights are at most 1
    return float(relative * values)

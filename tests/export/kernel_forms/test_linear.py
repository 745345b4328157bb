"""Products and what follows them as one node: what is fused, in which order, and what must stay a node of its own."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from support.kernel_checks import attributes, check_nodes, check_rest, fused_nodes

from seq2engine.export.kernel_forms.linear import fuse_products
from seq2engine.export.ort_forms.int8_matmul import SIGNED, STEPS_OF, row_products

IN, OUT = 8, 6
SIZES = {"weight": (IN, OUT), "bias": (OUT,), "norm.weight": (OUT,), "norm.bias": (OUT,), "smoothing": (IN,)}
FEEDS = {
    name: np.random.default_rng(1).normal(size=(2, 3, width)).astype(np.float32)
    for name, width in (("x", IN), ("skip", OUT))
}
NAMES = ("x", "weight", "scale", "bias", "smoothing", "residual", "norm_weight", "norm_bias")


def model_of(graph_of, body: str, outputs: str = f"float[B,K,{OUT}] y", **weights) -> onnx.ModelProto:
    """A graph of x [B,K,IN] and skip [B,K,OUT]; dots in names of weights are underscores here."""
    text = f"linear (float[B,K,{IN}] x, float[B,K,{OUT}] skip) => ({outputs}) {{ {body} }}"
    sizes = {name.replace(".", "_"): size for name, size in SIZES.items()} | weights
    model = graph_of(text, **sizes)
    read = {name for node in model.graph.node for name in node.input}
    kept = [weight for weight in model.graph.initializer if weight.name in read]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    return model


def fused(model: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, str], dict]:
    """The fused graph; inputs by their names in the specification, and attributes of its one fused node."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    fuse_products(made)
    nodes = fused_nodes(made)
    assert len(nodes) == 1
    inputs = {place: name for place, name in zip(NAMES, nodes[0].input, strict=False) if name}
    check_rest(model, without_unread(made))
    check_nodes(model, made, FEEDS)
    return made, inputs, attributes(nodes[0])


def without_unread(model: onnx.ModelProto) -> onnx.ModelProto:
    made = onnx.ModelProto()
    made.CopyFrom(model)
    read = {name for node in made.graph.node for name in node.input}
    kept = [weight for weight in made.graph.initializer if weight.name in read]
    del made.graph.initializer[:]
    made.graph.initializer.extend(kept)
    return made


ACTIVATIONS = {
    "": "",
    "relu": "a = Relu(b)",
    "gelu": "a = Gelu(b)",
    "silu": "g = Sigmoid(b) a = Mul(b, g)",
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("norm", ["", "LayerNormalization", "RMSNormalization"])
@pytest.mark.parametrize("smoothed", [False, True], ids=["", "smoothed"])
def test_all_parts_become_one_node(graph_of, activation, norm, smoothed):
    smooth = "s = Mul(x, smoothing)" if smoothed else ""
    last = "a" if activation else "b"
    weights = "norm_weight, norm_bias" if norm.startswith("Layer") else "norm_weight"
    product = f"{smooth} p = MatMul({'s' if smoothed else 'x'}, weight) b = Add(p, bias) {ACTIVATIONS[activation]}"
    normed = f"y = {norm} <axis = -1, epsilon = 0.01> (r, {weights})" if norm else ""
    body = f"{product} {'r' if norm else 'y'} = Add(skip, {last}) {normed}"
    made, inputs, found = fused(model_of(graph_of, body))
    assert len(made.graph.node) == 1
    expected = {"x": "x", "weight": "weight", "bias": "bias", "residual": "skip"}
    expected |= {"smoothing": "smoothing"} if smoothed else {}
    expected |= {"norm_weight": "norm_weight"} if norm else {}
    expected |= {"norm_bias": "norm_bias"} if norm.startswith("Layer") else {}
    assert inputs == expected
    assert made.graph.node[0].output == ["y"]
    assert made.graph.node[0].name == "module/p", "that of the product"
    assert found["activation"] == activation.encode()
    assert found["rms"] == norm.startswith("RMS")
    assert found["epsilon"] == (np.float32(0.01) if norm else 0)
    assert found["quantised"] == 0


STAYING = {
    "a sum that broadcasts": ("p = MatMul(x, weight) one = ReduceMax <keepdims = 1> (skip, axis) y = Add(p, one)", 3),
    "a sum with a constant": ("p = MatMul(x, weight) y = Add(p, shift)", 2),
    "another activation": ("p = MatMul(x, weight) y = Tanh(p)", 2),
    "an approximate Gelu": ('p = MatMul(x, weight) y = Gelu <approximate = "tanh"> (p)', 2),
    "a gate of another": ("p = MatMul(x, weight) g = Sigmoid(skip) y = Mul(p, g)", 3),
    "a gate for another": ("p = MatMul(x, weight) g = Sigmoid(p) m = Mul(skip, g) y = Add(p, m)", 4),
    "a product with itself": ("p = MatMul(x, weight) y = Mul(p, p)", 2),
    "a sum with itself": ("p = MatMul(x, weight) y = Add(p, p)", 2),
    "a norm over two axes": ("p = MatMul(x, weight) y = LayerNormalization <axis = 1> (p, norm_weight)", 2),
    "a norm with a wide weight": ("p = MatMul(x, weight) y = LayerNormalization <axis = -1> (p, wide)", 2),
    "smoothing by a number": ("s = Mul(x, number) y = MatMul(s, weight)", 2),
    "an activation after the sum": ("p = MatMul(x, weight) r = Add(p, skip) y = Relu(r)", 2),
}


@pytest.mark.parametrize("name", STAYING)
def test_other_nodes_stay(graph_of, name):
    body, nodes = STAYING[name]
    weights = {"axis": np.array([1]), "shift": (3, OUT), "wide": (3, 1), "number": ()}
    model = model_of(graph_of, body, **weights)
    made, inputs, _ = fused(model)
    assert len(made.graph.node) == nodes
    assert set(inputs) <= {"x", "weight", "residual"}
    assert ("residual" in inputs) == (name == "an activation after the sum")


def test_what_others_read_stays(graph_of):
    """Of a sum that a norm and the next skip connection read, the norm is a node of its own."""
    body = "p = MatMul(x, weight) r = Add(p, skip) n = RMSNormalization <axis = -1> (r, norm_weight) y = Add(r, n)"
    made, inputs, _ = fused(model_of(graph_of, body))
    assert [node.op_type for node in made.graph.node] == ["Linear", "RMSNormalization", "Add"]
    assert inputs == {"x": "x", "weight": "weight", "residual": "skip"}


@pytest.mark.parametrize("shown", ["p", "b", "a", "g"])
def test_what_is_an_output_is_made(graph_of, shown):
    body = "p = MatMul(x, weight) b = Add(p, bias) g = Sigmoid(b) a = Mul(b, g) y = Add(a, skip)"
    outputs = f"float[B,K,{OUT}] {shown}, float[B,K,{OUT}] y"
    made, _, found = fused(model_of(graph_of, body, outputs))
    assert [node.output[0] for node in made.graph.node] == {
        "p": ["p", "b", "g", "a", "y"],
        "b": ["b", "g", "a", "y"],
        "g": ["b", "g", "a", "y"],
        "a": ["a", "y"],
    }[shown]
    assert found["activation"] == (b"silu" if shown == "a" else b"")


def test_the_last_node_may_be_an_output_that_others_read(graph_of):
    body = "p = MatMul(x, weight) b = Add(p, bias) y = Neg(b)"
    made, inputs, _ = fused(model_of(graph_of, body, f"float[B,K,{OUT}] b, float[B,K,{OUT}] y"))
    assert len(made.graph.node) == 2
    assert inputs["bias"] == "bias"


def test_of_two_products_one_takes_their_sum(graph_of):
    model = model_of(graph_of, "p = MatMul(x, weight) q = MatMul(x, other) y = Add(p, q)", other=(IN, OUT))
    fuse_products(model)
    assert [(list(node.input), list(node.output)) for node in model.graph.node] == [
        (["x", "other"], ["q"]),
        (["x", "weight", "", "", "", "q"], ["y"]),
    ]


def test_smoothing_that_two_products_read_stays(graph_of):
    model = model_of(
        graph_of, "s = Mul(x, smoothing) p = MatMul(s, weight) q = MatMul(s, other) y = Add(p, q)", other=(IN, OUT)
    )
    fuse_products(model)
    assert [node.op_type for node in model.graph.node] == ["Mul", "Linear", "Linear"]


def test_other_products_stay(graph_of):
    """With weights of three axes, transposed ones, and none."""
    body = "t = Transpose <perm = [1, 0]> (table) p = MatMul(x, t) q = MatMul(x, deep) s = Add(p, q) y = Add(s, skip)"
    model = model_of(graph_of, body, table=(OUT, IN), deep=(2, IN, OUT))
    before = list(model.graph.node)
    fuse_products(model)
    assert list(model.graph.node) == before


# --- int8 -------------------------------------------------------------------------------------------------------------


def int8_of(
    graph_of, before: str = "", x: str = "x", restored: str = "DequantizeLinear <axis = 1> (w8, ws)", **weights
):
    rng = np.random.default_rng(2)
    stored = {
        "w8": rng.integers(-64, 65, (IN, OUT)).astype(np.int8),
        "ws": rng.uniform(1e-3, 1e-2, OUT).astype(np.float32),
        "w0": np.zeros(OUT, dtype=np.int8),
        "square": rng.integers(-64, 65, (IN, IN)).astype(np.int8),
        "rows": rng.uniform(1e-3, 1e-2, IN).astype(np.float32),
        "blocks": rng.uniform(1e-3, 1e-2, (2, OUT)).astype(np.float32),
    }
    body = f"w = {restored} {before} p = MatMul({x}, w) y = Add(p, bias)"
    return model_of(graph_of, body, **stored, **weights)


STEPS = {
    "": ("", "x", SIGNED),
    "smoothed": ("s = Mul(x, smoothing)", "s", SIGNED),
    "Relu": ("a = Relu(x)", "a", STEPS_OF["Relu"]),
    "Gelu": ("a = Gelu(x)", "a", STEPS_OF["Gelu"]),
    "Silu": ("g = Sigmoid(x) a = Mul(x, g)", "a", STEPS_OF["Silu"]),
    "smoothed Relu": ("a = Relu(x) s = Mul(a, smoothing)", "s", SIGNED),
}


@pytest.mark.parametrize("name", STEPS)
def test_int8_rows_are_rounded_as_before(graph_of, name):
    before, x, steps = STEPS[name]
    model = int8_of(graph_of, before, x)
    made = onnx.ModelProto()
    made.CopyFrom(model)
    fuse_products(made)
    (node,) = fused_nodes(made)
    assert node.op_type == "LinearInt8"
    assert list(node.input[1:4]) == ["w8", "ws", "bias"]
    found = attributes(node)
    assert (found["above"], found["zero"], found["least"]) == (steps.above, steps.zero, np.float32(steps.least))
    assert "quantised" not in found
    assert "DequantizeLinear" not in [node.op_type for node in made.graph.node]
    check_nodes(row_products(model), made, FEEDS)


@pytest.mark.parametrize(
    "restored",
    [
        "DequantizeLinear <axis = 1> (w8, ws, w0)",
        "DequantizeLinear <axis = 0> (square, rows)",
        "DequantizeLinear <axis = 1> (w8, rows)",
        "DequantizeLinear <axis = 0, block_size = 4> (w8, blocks)",
    ],
    ids=["a zero point", "scales of inputs", "too many scales", "blocks"],
)
def test_other_int8_weights_stay(graph_of, restored):
    model = int8_of(graph_of, restored=restored)
    before = list(model.graph.node)
    fuse_products(model)
    assert list(model.graph.node) == before

"""Keys and values of the source as one node: our pattern, and that any other one stays as it is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import helper
from support.kernel_checks import attributes, check_nodes, fused_nodes

from seq2engine.export.contract import graph_specs
from seq2engine.export.graph_index import makers_of
from seq2engine.export.kernel_forms import ops
from seq2engine.export.kernel_forms.source_heads import fuse_source_heads
from seq2engine.export.ort_forms.transposed_keys import transposed_keys
from seq2engine.export.to_onnx import graphs_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.config import ModelConfig

SMALL = ModelConfig(1, 2, 2, 16, 24, 40, 40, max_source=12, max_target=12)
FORMS = {"plain": lambda encoder: encoder, "transposed": transposed_keys}
CUT = """
g (float[B,S,16] kv) => (float[B,2,S,4] k, float[B,2,S,4] v) {
    r = Reshape(kv, shape) t = Transpose<perm = [0, 2, 1, 3]>(r) k, v = Split<axis = 1, num_outputs = 2>(t)
}
"""
SHAPE = np.array([0, 0, 4, 4])


def fused(model: onnx.ModelProto) -> onnx.ModelProto:
    made = onnx.ModelProto()
    made.CopyFrom(model)
    fuse_source_heads(made.graph)
    return made


@pytest.mark.parametrize("form", FORMS)
def test_every_layer_of_the_decoder_is_fused(form: str, feeds_for: Callable) -> None:
    plain = FORMS[form](graphs_from_model(random_model(SMALL, 4))["encoder"])
    made = fused(plain)
    nodes = fused_nodes(made)
    assert [node.op_type for node in nodes] == [ops.SOURCE_HEADS] * SMALL.decoder_layers
    for layer, node in enumerate(nodes):
        assert list(node.output) == [f"cross_k.{layer}", f"cross_v.{layer}"]
        assert attributes(node) == {"heads": SMALL.heads, "transposed": int(form == "transposed")}
        assert f"decoder.{layer}.cross_attn.kv" in node.input[0]
    assert made.graph.output == plain.graph.output
    feeds = feeds_for(graph_specs(SMALL)["encoder"], {"B": 3, "S": 6}, vocab=40)
    check_nodes(plain, made, feeds)


def test_a_pattern_like_ours_is_fused(graph_of: Callable) -> None:
    (node,) = fused(graph_of(CUT, shape=SHAPE)).graph.node
    assert (node.op_type, list(node.input), list(node.output)) == (ops.SOURCE_HEADS, ["kv"], ["k", "v"])


CHANGED = {
    "three parts": ("k, v = Split<axis = 1, num_outputs = 2>", "k, v, w = Split<axis = 1, num_outputs = 3>"),
    "another axis": ("axis = 1", "axis = 2"),
    "another order": ("perm = [0, 2, 1, 3]", "perm = [0, 1, 2, 3]"),
    "values that are no output": (", float[B,2,S,4] v)", ")"),
    "heads that others read": ("(t)\n", "(t) u = Neg(t)\n"),
    "heads that are an output": ("(float[B,2,S,4] k,", "(float[B,4,S,4] t, float[B,2,S,4] k,"),
    "keys that are read in another order": (
        "(float[B,2,S,4] k, float[B,2,S,4] v) {",
        "(float[B,S,2,4] y, float[B,2,S,4] v) { y = Transpose<perm = [0, 2, 1, 3]>(k)",
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_another_pattern_stays(graph_of: Callable, name: str) -> None:
    text = CUT.replace(*CHANGED[name])
    assert text != CUT
    plain = graph_of(text, shape=SHAPE)
    assert not fused_nodes(fused(plain))


@pytest.mark.parametrize("shape", [[0, 0, 3, 4], [1, 0, 4, 4], [0, 0, -1, 4]], ids=str)
def test_another_shape_stays(graph_of: Callable, shape: list[int]) -> None:
    """An odd number of heads, a fixed batch, heads that are counted only when it runs."""
    assert not fused_nodes(fused(graph_of(CUT, shape=np.array(shape))))


def test_transposed_keys_that_others_read_too_stay(graph_of: Callable) -> None:
    text = CUT.replace("float[B,2,S,4] k,", "float[B,2,4,S] y,").replace(
        "(t)\n", "(t) y = Transpose<perm = [0, 1, 3, 2]>(k)\n"
    )
    plain = graph_of(text, shape=SHAPE)
    (node,) = fused_nodes(fused(plain))
    assert list(node.output) == ["y", "v"]
    assert attributes(node)["transposed"] == 1
    plain.graph.node.append(helper.make_node("Neg", ["k"], ["n"], name="n"))
    plain.graph.output.append(helper.make_tensor_value_info("n", onnx.TensorProto.FLOAT, None))
    made = fused(plain)
    assert not fused_nodes(made)
    assert set(makers_of(made.graph.node)) == set(makers_of(plain.graph.node))

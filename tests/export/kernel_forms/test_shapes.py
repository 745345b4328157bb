"""Shapes behind fused attention, which ONNX cannot infer by itself."""

from __future__ import annotations

from onnx import TensorProto, helper

from seq2engine.export.kernel_forms import ops
from seq2engine.export.kernel_forms.shapes import shapes_of


def test_shapes_go_through_fused_attention(graph_of):
    text = """
    step (float[B,K,24] qkv, float[B,K,8] q, float[B,H,S,4] k, float[B,2,L,4] cache) => (float[B,K,8] y) {
        first = Relu(context) second = Relu(crossed) y = Add(first, second) odd = NonZero(y) third = Relu(encoded)
    }
    """
    model = graph_of(text, bias=(300,))
    own = {"write_index": "w", "self_mask": "m", "heads": 2, "scale": 1.0, "self_k": "cache", "self_v": "cache"}
    sizes = {"heads": 2, "scale": 1.0, "transposed": False}
    model.graph.node.insert(0, ops.self_attention("a", ["context", "new_k", "new_v"], qkv="qkv", **own))
    model.graph.node.insert(1, ops.cross_attention("b", ["crossed"], q="q", k="k", v="k", **sizes))
    model.graph.node.insert(2, ops.encoder_attention("c", "encoded", qkv="qkv", heads=2, scale=1.0))
    model.graph.node.append(helper.make_node("Unknown", ["y"], ["strange"], domain="elsewhere"))
    model.graph.input.append(helper.make_tensor_value_info("m", TensorProto.BOOL, ["B", "K", "L"]))
    found = shapes_of(model)
    assert found["first"] == found["second"] == found["third"] == found["y"] == ("B", "K", 8)
    assert "strange" not in found

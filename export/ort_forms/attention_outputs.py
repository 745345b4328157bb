"""The decoder step with its cross-attention weights as outputs, for alignments, coverage penalty and heat maps.

    decoder.i.cross_attn/Where -> Softmax -> cross_attention.i [B,H,K,S] -> MatMul -> ...

Nothing else changes and no weight is touched, so all other outputs stay the same bits.
"""

from __future__ import annotations

import onnx
from onnx import helper, shape_inference

from seq2engine.errors import ExportError

from ..audit import axes_of, without_weight_data
from ..contract import attention_name
from ..graph_index import copy_of, rename_inputs, rename_outputs


def attention_graph(model: onnx.ModelProto, layers: int) -> onnx.ModelProto:
    """A decoder step, with or without its weights loaded -> the same with `cross_attention.i` of every layer."""
    made = copy_of(model)
    inferred = shape_inference.infer_shapes(without_weight_data(model)).graph
    values = {value.name: value for value in (*inferred.input, *inferred.value_info)}
    renamed = {softmax_of(model, values, layer): attention_name(layer) for layer in range(layers)}
    for found, name in renamed.items():
        element = values[found].type.tensor_type.elem_type
        made.graph.output.append(helper.make_tensor_value_info(name, element, axes_of(values[found])))
    rename_inputs(made.graph.node, renamed)
    rename_outputs(made.graph.node, renamed)
    return made


def softmax_of(model: onnx.ModelProto, values: dict[str, onnx.ValueInfoProto], layer: int) -> str:
    """The tensor of a layer's cross-attention weights, found by its module's name and checked by its shape."""
    scope = f"decoder.{layer}.cross_attn/"
    found = [n.output[0] for n in model.graph.node if n.op_type == "Softmax" and n.name.startswith(scope)]
    if len(found) != 1 or f"cross_k.{layer}" not in values:
        raise ExportError(
            f"graph {model.graph.name} has {len(found)} Softmax nodes in decoder.{layer}.cross_attn, expected one: it "
            "is not a decoder step of this model; export the checkpoint again with: seq2engine export CHECKPOINT DIR"
        )
    heads = axes_of(values[f"cross_k.{layer}"])[1]
    have, want = axes_of(values[found[0]]), ("B", heads, "K", "S")
    if have != want:
        raise ExportError(
            f"{found[0]} is {list(have)}, expected cross-attention weights {list(want)}; export the checkpoint again "
            "with: seq2engine export CHECKPOINT DIR"
        )
    return found[0]

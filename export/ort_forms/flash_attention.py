"""Self-attention of an encoder of audio or images by ONNX Runtime's MultiHeadAttention, which never stores all scores.

    q|k|v [B,S,3D] -> heads -> q * scale @ k^T -> Where -> Softmax -> @ v -> merged heads [B,S,D]      becomes
    q|k|v [B,S,3D] -> Split -> MultiHeadAttention -> [B,S,D]

A window of audio has 1,500 positions, an image 577, and no padding. So the mask hides nothing and is left out, and the
operator goes through keys and values in blocks that fit the processor's cache, instead of writing 1,500 x 1,500 scores
of every head and reading them three times. A form for ONNX Runtime on the CPU.
"""

from __future__ import annotations

import onnx
from onnx import NodeProto, helper

from seq2engine.errors import ExportError

from ..graph_index import (
    PrimitiveAttention,
    copy_of,
    drop_unread_weights,
    find_attentions,
    makers_of,
    readers_of,
    replace_nodes,
)

CONTRIB = "com.microsoft"


def flash_attention(model: onnx.ModelProto, heads: int) -> onnx.ModelProto:
    """An encoder whose mask is always true, its weights loaded or not -> the same with fused self-attention."""
    made = copy_of(model)
    graph = made.graph
    makers, readers = makers_of(graph.node), readers_of(graph.node)
    unread: set[str] = set()
    fused: dict[str, list[NodeProto]] = {}  # at the place of the last node that they replace
    for attention in find_attentions(made):
        cutting = cut_nodes(attention, makers)
        (merging,) = readers[attention.output]
        (flat,) = readers[merging.output[0]]
        inner = [graph.node[place].name for place in attention.nodes]
        unread |= {*inner, *(node.name for node in cutting), merging.name}
        fused[flat.name] = fused_nodes(cutting[0].input[0], flat.output[0], heads, attention.scale)
    replace_nodes(
        graph,
        (one for node in graph.node if node.name not in unread for one in fused.get(node.name, [node])),
    )
    drop_unread_weights(graph)
    if fused:
        made.opset_import.append(helper.make_opsetid(CONTRIB, 1))
    return made


def cut_nodes(attention: PrimitiveAttention, makers: dict[str, NodeProto]) -> tuple[NodeProto, NodeProto, NodeProto]:
    """Reshape, Transpose and Split, by which one product becomes the heads of q, k and v."""
    split = makers[attention.q]
    transpose = makers.get(split.input[0])
    reshape = None if transpose is None else makers.get(transpose.input[0])
    kinds = [None if node is None else node.op_type for node in (reshape, transpose, split)]
    if reshape is None or transpose is None or kinds != ["Reshape", "Transpose", "Split"]:
        raise ExportError(
            f"{attention.output} reads heads made by {kinds}, expected Reshape, Transpose and Split: it is not an "
            "encoder of ours; export the checkpoint again with: seq2engine export CHECKPOINT DIR"
        )
    return reshape, transpose, split


def fused_nodes(qkv: str, output: str, heads: int, scale: float) -> list[NodeProto]:
    parts = [f"{output}/{name}" for name in "qkv"]
    return [
        helper.make_node("Split", [qkv], parts, name=f"{output}/Split", axis=-1, num_outputs=3),
        helper.make_node(
            "MultiHeadAttention", parts, [output], name=f"{output}/fused", domain=CONTRIB, num_heads=heads, scale=scale
        ),
    ]

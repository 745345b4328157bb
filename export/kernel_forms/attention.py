"""Every attention of a graph that a fused operator can compute: self_attention.py and cross_attention.py in a decoder
step, encoder_attention.py in an encoder."""

from __future__ import annotations

import onnx

from .cross_attention import fused_cross_attention, fused_cross_rows
from .encoder_attention import fused_encoder_attention
from .graph_view import GraphView, Mismatch, drop_unread_nodes, replace_fused
from .self_attention import fused_self_attention

PATTERNS = (fused_self_attention, fused_cross_attention, fused_cross_rows, fused_encoder_attention)


def fuse_attentions(graph: onnx.GraphProto) -> None:
    """Replaces the nodes of attentions that have one of our patterns, in place; others stay as they are."""
    view = GraphView(graph)
    fusions = []
    for softmax in [node for node in graph.node if node.op_type == "Softmax"]:
        for pattern in PATTERNS:
            try:
                fusions.append(pattern(view, softmax))
                break
            except Mismatch:
                continue
    replace_fused(graph, fusions)
    drop_unread_nodes(graph)  # masks with further axes, and shapes of heads

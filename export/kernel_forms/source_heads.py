"""Keys and values of the source, cut into heads where the encoder hands them to the decoder, as one operator.

kv [B,S,2D] -> Reshape -> Transpose -> Split -> k, v [B,H,S,E] (-> Transpose -> k [B,H,E,S])
becomes
kv -> SourceHeads -> k, v
"""

from __future__ import annotations

import onnx
from onnx import NodeProto

from . import ops
from .graph_view import Fusion, GraphView, Mismatch, check_attributes, drop_unread_nodes, replace_fused, require
from .heads import KEYS_LAST, cut_heads


def fuse_source_heads(graph: onnx.GraphProto) -> None:
    """Replaces the nodes that cut keys and values, in place; others stay as they are."""
    view = GraphView(graph)
    fusions = []
    for split in [node for node in graph.node if node.op_type == "Split"]:
        try:
            fusions.append(fused_source_heads(view, split))
        except Mismatch:
            continue
    replace_fused(graph, fusions)
    drop_unread_nodes(graph)


def fused_source_heads(view: GraphView, split: NodeProto) -> Fusion:
    """A Split of keys and values and what is around it; raises Mismatch if it is another one."""
    check_attributes(split, axis=1, num_outputs=2)
    cutting, parts, _ = cut_heads(view, split.input[0])
    require(parts % 2 == 0 and split.output[1] in view.outputs)
    keys, transposing = split.output[0], []
    if keys not in view.outputs:
        transpose = view.reader(keys, "Transpose")
        check_attributes(transpose, perm=KEYS_LAST)
        keys, transposing = transpose.output[0], [transpose]
    nodes = (*cutting, split, *transposing)
    view.check_closed(nodes, keys, [split.output[1]])
    made = ops.source_heads(
        f"{keys}/{ops.SOURCE_HEADS}",
        [keys, split.output[1]],
        kv=cutting[0].input[0],
        heads=parts // 2,
        transposed=bool(transposing),
    )
    return Fusion(nodes, made)

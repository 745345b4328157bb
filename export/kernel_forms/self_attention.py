"""Self-attention of a decoder step with a static cache as one operator, which writes the cache in place.

    qkv [B,K,3D] -> Reshape -> Transpose -> Split -> q, k, v [B,H,K,E]
    k, v -> TensorScatter into the caches at write_index -> new_self_k, new_self_v [B,H,L,E]
    q * scale @ new_self_k^T -> Where(mask) -> Softmax -> @ new_self_v -> Transpose -> Reshape -> context [B,K,D]
    becomes
    qkv, self_k, self_v, write_index, self_mask -> SelfAttention -> context, new_self_k, new_self_v

A growing cache, rotary positions and a bias of distances are other patterns, whose nodes stay.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnx import NodeProto

from . import ops
from .graph_view import Fusion, GraphView, attributes_of, check_attributes, require
from .heads import KEYS_LAST, check_split, cut_heads, masked_scores, merged_heads, scope_of, weighted_average


def fused_self_attention(view: GraphView, softmax: NodeProto) -> Fusion:
    """The block around a Softmax; raises Mismatch if it is another one."""
    where, scores, mask = masked_scores(view, softmax, [1])
    q, scale, scaling = view.scaled(scores.input[0])
    transpose = view.maker(scores.input[1], "Transpose")
    check_attributes(transpose, perm=KEYS_LAST)
    average = weighted_average(view, softmax.output[0])
    writing = [view.maker(name, "TensorScatter") for name in (transpose.input[0], average.input[1])]
    write_index = check_writing(writing)
    split = view.maker(q, "Split")
    check_split(split, [q, *(write.input[1] for write in writing)])
    cutting, parts, width = cut_heads(view, split.input[0])
    require(parts % 3 == 0)
    merging = merged_heads(view, average, parts // 3 * width)
    context, caches = merging[-1].output[0], [write.output[0] for write in writing]
    nodes = (*cutting, split, *writing, *scaling, transpose, scores, where, softmax, average, *merging)
    view.check_closed(nodes, context, caches)
    made = ops.self_attention(
        f"{scope_of(softmax)}/{ops.SELF_ATTENTION}",
        [context, *caches],
        qkv=cutting[0].input[0],
        self_k=writing[0].input[0],
        self_v=writing[1].input[0],
        write_index=write_index,
        self_mask=mask,
        heads=parts // 3,
        scale=scale,
    )
    return Fusion(nodes, made)


def check_writing(writing: Sequence[NodeProto]) -> str:
    """Two nodes that write slots [B,H,K,E] at the same index -> that index."""
    for node in writing:
        found = attributes_of(node)
        require(len(node.input) == 3 and found.get("axis", -2) == -2 and found.get("mode", b"linear") == b"linear")
    first, second = (node.input[2] for node in writing)
    require(first == second and writing[0].output[0] != writing[1].output[0])
    return str(first)

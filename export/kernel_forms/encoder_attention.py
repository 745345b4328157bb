"""Self-attention of an encoder as one operator.

    qkv [B,S,3D] -> Reshape -> Transpose -> Split -> q, k, v [B,H,S,E]
    q * scale @ k^T -> Where(mask) -> Softmax -> @ v -> Transpose -> Reshape -> context [B,S,D]
    becomes
    qkv, source_mask -> EncoderAttention -> context

Rotary positions, a bias of distances and ONNX Runtime's own fused attention are other patterns, whose nodes stay.
"""

from __future__ import annotations

from onnx import NodeProto

from . import ops
from .graph_view import Fusion, GraphView, check_attributes, require
from .heads import KEYS_LAST, check_split, cut_heads, masked_scores, merged_heads, scope_of, weighted_average


def fused_encoder_attention(view: GraphView, softmax: NodeProto) -> Fusion:
    """The block around a Softmax; raises Mismatch if it is another one."""
    where, scores, mask = masked_scores(view, softmax, [1, 2])
    q, scale, scaling = view.scaled(scores.input[0])
    transpose = view.maker(scores.input[1], "Transpose")
    check_attributes(transpose, perm=KEYS_LAST)
    average = weighted_average(view, softmax.output[0])
    split = view.maker(q, "Split")
    check_split(split, [q, transpose.input[0], average.input[1]])
    cutting, parts, width = cut_heads(view, split.input[0])
    require(parts % 3 == 0)
    merging = merged_heads(view, average, parts // 3 * width)
    context = merging[-1].output[0]
    nodes = (*cutting, split, *scaling, transpose, scores, where, softmax, average, *merging)
    view.check_closed(nodes, context)
    made = ops.encoder_attention(
        f"{scope_of(softmax)}/{ops.ENCODER_ATTENTION}",
        context,
        qkv=cutting[0].input[0],
        source_mask=mask,
        heads=parts // 3,
        scale=scale,
    )
    return Fusion(nodes, made)

"""Cross-attention of a decoder step as one operator.

    q [B,K,D] -> heads * scale @ k^T -> Where(mask) -> Softmax -> @ v -> merged heads         as exported
    q [B,K,D] * scale -> heads @ k [B,H,E,S] -> Where(mask) -> Softmax -> @ v -> merged heads    of transposed_keys.py
    q [B,K,D] * scale -> heads [B,H,G,R,E] @ k^T -> Softmax -> @ v -> merged heads               of cross_rows.py
    become
    q, k, v, source_mask or nothing -> CrossAttention -> context [B,K,D]

Attention weights [B,H,K,S] that are an output of the graph become the operator's second output.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnx import NodeProto

from . import ops
from .graph_view import Fusion, GraphView, attributes_of, check_attributes, require
from .heads import KEYS_LAST, cut_heads, masked_scores, merged_heads, scope_of, weighted_average

GROUP = [2]  # the axis of a group of rows
ROW_HEADS, ROW_KEYS, ROW_MERGED = [0, 3, 1, 2, 4], [0, 1, 2, 4, 3], [0, 2, 3, 1, 4]


@dataclass(frozen=True)
class Query:
    """Heads of q: the nodes that cut and scale them, the tensor that they are cut from, and their sizes."""

    nodes: tuple[NodeProto, ...]
    q: str
    scale: float
    heads: int
    width: int


def fused_cross_attention(view: GraphView, softmax: NodeProto) -> Fusion:
    """The block around a Softmax, with a mask; raises Mismatch if it is another one."""
    where, scores, mask = masked_scores(view, softmax, [1, 2])
    query = query_of(view, scores.input[0])
    transposing, keys, transposed = keys_of(view, scores.input[1])
    average = weighted_average(view, softmax.output[0])
    merging = merged_heads(view, average, query.heads * query.width)
    nodes = (*query.nodes, *transposing, scores, where, softmax, average, *merging)
    return fusion_of(view, softmax, query, nodes, keys, average.input[1], mask, softmax.output[0], transposed)


def fused_cross_rows(view: GraphView, softmax: NodeProto) -> Fusion:
    """The block around a Softmax of single rows without a mask; raises Mismatch if it is another one."""
    check_attributes(softmax, axis=-1)
    scores = view.maker(softmax.input[0], "MatMul")
    query = query_of_rows(view, scores.input[0])
    transposing = view.maker(scores.input[1], "Transpose")
    check_attributes(transposing, perm=ROW_KEYS)
    grouped_k = grouped(view, transposing.input[0])
    average = weighted_average(view, softmax.output[0])
    grouped_v = grouped(view, average.input[1])
    transpose = view.reader(average.output[0], "Transpose")
    check_attributes(transpose, perm=ROW_MERGED)
    flat = view.reader(transpose.output[0], "Reshape")
    require(view.sizes(flat) == [0, -1, query.heads * query.width])
    showing = shown_rows(view, softmax.output[0])
    nodes = (*query.nodes, grouped_k, transposing, scores, softmax, *showing, grouped_v, average, transpose, flat)
    weights = showing[0].output[0] if showing else softmax.output[0]
    return fusion_of(view, softmax, query, nodes, grouped_k.input[0], grouped_v.input[0], "", weights, False)


def fusion_of(
    view: GraphView,
    softmax: NodeProto,
    query: Query,
    nodes: tuple[NodeProto, ...],
    k: str,
    v: str,
    mask: str,
    weights: str,
    transposed: bool,
) -> Fusion:
    context = nodes[-1].output[0]
    shown = [weights] if weights in view.outputs else []
    view.check_closed(nodes, context, shown)
    made = ops.cross_attention(
        f"{scope_of(softmax)}/{ops.CROSS_ATTENTION}",
        [context, *shown],
        q=query.q,
        k=k,
        v=v,
        source_mask=mask,
        heads=query.heads,
        scale=query.scale,
        transposed=transposed,
    )
    return Fusion(nodes, made)


def query_of(view: GraphView, name: str) -> Query:
    """Scaled as heads or before they are cut, or not at all."""
    cut, scale, late = view.scaled(name)
    cutting, heads, width = cut_heads(view, cut)
    q, early_scale, early = cutting[0].input[0], 1.0, list[NodeProto]()
    if not late:
        q, early_scale, early = view.scaled(q)
    return Query((*early, *cutting, *late), q, scale * early_scale, heads, width)


def keys_of(view: GraphView, name: str) -> tuple[list[NodeProto], str, bool]:
    """What a product reads as keys [B,H,E,S] -> the node that transposes them if there is one, the keys, and whether
    they are stored like that."""
    made = view.makers.get(name)
    if made is None:
        return [], name, True
    require(made.op_type == "Transpose")
    check_attributes(made, perm=KEYS_LAST)
    return [made], made.input[0], False


def query_of_rows(view: GraphView, name: str) -> Query:
    """Heads [B,H,G,R,E] of q, where each of G groups has R rows."""
    transpose = view.maker(name, "Transpose")
    check_attributes(transpose, perm=ROW_HEADS)
    reshape = view.maker(transpose.input[0], "Reshape")
    shape = view.maker(reshape.input[1], "Concat")
    require(len(shape.input) == 3 and view.ints(shape.input[0]) == [0, -1])
    sizes = view.ints(shape.input[2])
    require(len(sizes) == 2)
    q, scale, scaling = view.scaled(reshape.input[0])
    return Query((*scaling, reshape, transpose), q, scale, *sizes)


def grouped(view: GraphView, name: str) -> NodeProto:
    """Keys or values that all groups of rows share."""
    found = view.maker(name, "Unsqueeze")
    require(view.ints(found.input[1]) == GROUP)
    return found


def shown_rows(view: GraphView, weights: str) -> list[NodeProto]:
    """The node that makes [B,H,K,S] of weights [B,H,G,R,S], where these are an output of the graph."""
    found = [node for node in view.readers.get(weights, []) if node.op_type == "Reshape"]
    if not found:
        require(weights not in view.outputs)
        return []
    require(len(found) == 1)
    shape = view.maker(found[0].input[1], "Concat")
    require(len(shape.input) == 3 and view.ints(shape.input[0]) == [0, 0] and view.ints(shape.input[2]) == [-1])
    rows = view.maker(shape.input[1], "Shape")
    require(attributes_of(rows) == {"start": 1, "end": 2} and rows.input[0] == "tokens")
    return found

"""Parts that attentions have in common: cutting heads, masking scores, averaging values, merging heads.

    x [B,K,HE] -> Reshape [B,K,H,E] -> Transpose [B,H,K,E] (-> Split q, k, v)      cut
    mask -> Unsqueeze -> Where(scores, -65504) -> Softmax                          masked
    Softmax -> MatMul with values -> Transpose [B,K,H,E] -> Reshape [B,K,HE]       averaged and merged

Each function follows one part, and raises Mismatch where the graph has something else.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnx import NodeProto

from .graph_view import GraphView, check_attributes, require

MASKED = -65504.0  # a masked attention score, as in model/layers.py
SWAPPED = [0, 2, 1, 3]  # [B,K,H,E] <-> [B,H,K,E]
KEYS_LAST = [0, 1, 3, 2]  # [B,H,S,E] <-> [B,H,E,S]


def cut_heads(view: GraphView, name: str) -> tuple[list[NodeProto], int, int]:
    """Heads [B,H,K,E] -> the nodes that cut them, H and E."""
    transpose = view.maker(name, "Transpose")
    check_attributes(transpose, perm=SWAPPED)
    reshape = view.maker(transpose.input[0], "Reshape")
    shape = view.sizes(reshape)
    require(len(shape) == 4 and shape[:2] == [0, 0] and min(shape[2:]) > 0)
    return [reshape, transpose], shape[2], shape[3]


def check_split(split: NodeProto, wanted: Sequence[str]) -> None:
    """Three equal parts of the heads, q, k and v, in this order."""
    check_attributes(split, axis=1, num_outputs=3)
    require(list(split.output) == list(wanted))


def merged_heads(view: GraphView, product: NodeProto, width: int) -> list[NodeProto]:
    """The product with values [B,H,K,E] -> the nodes that make [B,K,width] of it."""
    transpose = view.reader(product.output[0], "Transpose")
    check_attributes(transpose, perm=SWAPPED)
    reshape = view.reader(transpose.output[0], "Reshape")
    require(view.sizes(reshape) == [0, 0, width])
    return [transpose, reshape]


def masked_scores(view: GraphView, softmax: NodeProto, axes: list[int]) -> tuple[NodeProto, NodeProto, str]:
    """The node that masks scores, the product that makes them, and the mask as it is before these axes are added."""
    check_attributes(softmax, axis=-1)
    where = view.maker(softmax.input[0], "Where")
    masked = view.numbers(where.input[2])
    require(masked.size == 1 and float(masked.reshape(())) == MASKED)
    unsqueeze = view.maker(where.input[0], "Unsqueeze")
    require(view.ints(unsqueeze.input[1]) == axes)
    return where, view.maker(where.input[1], "MatMul"), unsqueeze.input[0]


def weighted_average(view: GraphView, weights: str) -> NodeProto:
    """The product of attention weights, which may be an output of the graph as well, with values."""
    found = [node for node in view.readers.get(weights, []) if node.op_type == "MatMul" and node.input[0] == weights]
    require(len(found) == 1)
    return found[0]


def scope_of(node: NodeProto) -> str:
    """The module that a node belongs to: decoder.3.cross_attn."""
    return str(node.name).partition("/")[0]

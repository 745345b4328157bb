"""Cross-attention of K beams as K rows of one query each, over which the source's keys and values broadcast.

Grouped queries (step.py) want a head's beams side by side: a launch before attention and one behind it only move them.
With an axis for beams in front of the heads nothing is moved, and the kernel for one query still reads keys and values
where they are:

    q [B,K,H*E] --Reshape--> [B,K,H,1,E] --+--MatMul, Where, Softmax, MatMul--> [B,K,H,1,E] --Reshape--> [B,K,H*E]
    k, v [B,H,S,E] --Unsqueeze--> [B,1,H,S,E] --+

Two launches less a layer. The kernel reads one number at a time in this form, eight with grouped queries, which costs
more the more there is to read: so narrow models only. In self-attention TensorRT would copy the cache for every beam.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper

from ..graph_index import PrimitiveAttention, find_attentions, makers_of, readers_of, replace_nodes

WIDEST = 512  # d_model


def takes_rows(heads: tuple[int, int]) -> bool:
    """Whether a model with these heads and their size is narrow."""
    return heads[0] * heads[1] <= WIDEST


def beams_as_rows(model: onnx.ModelProto, heads: tuple[int, int]) -> None:
    """Rewrites every cross-attention of a narrow model, in place. Its query must not be folded (fold_query.py)."""
    graph = model.graph
    count, size = heads
    makers, readers = makers_of(graph.node), readers_of(graph.node)
    instead: dict[str, list[NodeProto]] = {}
    for attention in find_attentions(model):
        if attention.is_self:
            continue
        transposed = makers[attention.q]
        cut = makers[transposed.input[0]]  # [B,K,H*E] -> [B,K,H,E]
        (merged,) = readers[attention.output]
        (flat,) = readers[merged.output[0]]
        kinds = [node.op_type for node in (cut, transposed, merged, flat)]
        assert kinds == ["Reshape", "Transpose", "Transpose", "Reshape"], attention.output
        replaced = [graph.node[place].name for place in attention.nodes]
        instead |= {name: [] for name in (*replaced, cut.name, transposed.name, merged.name)}
        masked = graph.node[attention.nodes[-3]].input[2]  # of the Where
        scale = graph.node[attention.nodes[0]].input[1]
        instead[flat.name] = rows_of(attention, cut.input[0], scale, masked, flat.output[0])
    shapes = {"rows": (0, 0, count, 1, size), "row_axis": (1,), "flat_rows": (0, 0, count * size)}
    graph.initializer.extend(
        numpy_helper.from_array(np.array(v, dtype=np.int64), f"trt/{n}") for n, v in shapes.items()
    )
    replace_nodes(graph, [one for node in graph.node for one in instead.get(node.name, [node])])


def rows_of(attention: PrimitiveAttention, q: str, scale: str, masked: str, output: str) -> list[NodeProto]:
    """softmax(where(mask, (q * scale) @ k^T, masked)) @ v with an axis of beams in front of the heads."""

    def node(op: str, inputs: list[str], name: str, **attributes: Any) -> NodeProto:
        made = name if name == output else f"trt/{attention.output}/{name}"
        return helper.make_node(op, inputs, [made], name=f"{made}/{op}", **attributes)

    def own(name: str) -> str:
        return f"trt/{attention.output}/{name}"

    return [
        node("Reshape", [q, "trt/rows"], "q"),
        node("Mul", [own("q"), scale], "scaled"),
        node("Unsqueeze", [attention.k, "trt/row_axis"], "k"),
        node("Transpose", [own("k")], "k_transposed", perm=[0, 1, 2, 4, 3]),
        node("MatMul", [own("scaled"), own("k_transposed")], "scores"),
        node("Unsqueeze", [attention.mask, "trt/row_axis"], "mask"),
        node("Where", [own("mask"), own("scores"), masked], "masked"),
        node("Softmax", [own("masked")], "weights", axis=-1),
        node("Unsqueeze", [attention.v, "trt/row_axis"], "v"),
        node("MatMul", [own("weights"), own("v")], "rows"),
        node("Reshape", [own("rows"), "trt/flat_rows"], output),
    ]

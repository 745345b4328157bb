"""The form of a decoder step for which TensorRT needs the fewest kernel launches, derived from the portable graph.

Portable attention is five primitive ops that run anywhere. TensorRT has a fused kernel for attention of one query that
reads its inputs through Concat, Split and bias, and another for several queries (not in fp32) that wants keys and
values in a layout of its own, one copy launch for each. So:

    every form                cross-attention's query is folded into the products before it (fold_query.py), unless
                              beams are rows: then TensorRT would copy the source's keys and values
    one beam                  where it was folded, cross-attention becomes an Attention op, which takes that query
                              without a copy; a static cache is written late (late_write.py),
                              self-attention stays primitive
    beams in fp16 and bf16    what is ready at the same time is packed into one tensor, so that one launch lays out all
                              of it; a static cache is written late if K is fixed. Any number of beams.

      cross_k.0, cross_v.0, cross_k.1, ... --Concat--Split--> the same tensors, laid out once per step
      new_self_k.i, new_self_v.i ----------Concat--Split--> the same, once per layer, unless written late

    K beams over audio or     cross keys and values are so long (1,500 or 577 positions) that laying them out in every
    images, K fixed           step takes longer than the launches it saves: grouped queries, as in fp32, which read
                              them as they are; cross-attention of a narrow model has beams as rows (beam_rows.py)
    K beams in fp32, K fixed  the kernel for several queries does not exist (nor for heads of 8), so beams become extra
                              query heads over the source's shared key heads (grouped-query form) for that of one query

      q [B,H,K,E] -Reshape-> [B,H*K,1,E] --+
      k, v [B,H,L,E] ----------------------+--Attention--> [B,H*K,1,E] -Reshape-> [B,H,K,E]
      mask [B,1,K,L] -Expand,Reshape-> [B,H*K,1,L]

                              what relative positions add to the scores goes into that mask, as a number for every slot.
                              In fp16 that is not safe: the lowest number and a score below zero are -inf. There, the
                              bias is added and then the mask applied, which is fused as well

docs/LOG.md has the launch counts of every form that was tried, export/engines/launch_budget.py what each may take.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ..graph_index import PrimitiveAttention, copy_of, find_attentions, makers_of, rename_inputs, replace_nodes
from ..precision.census import types_of
from .beam_rows import beams_as_rows, takes_rows
from .fold_query import fold_queries
from .late_write import write_late

ATTENTION_OPSET = 23
SMALLEST_HEAD = 12  # that the kernel for several queries takes; the one for a single query takes 8, too


def frozen_axes(model: onnx.ModelProto, sizes: dict[str, int]) -> None:
    """Gives dynamic axes of the inputs and outputs a fixed size, in place."""
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]


def step_for_tensorrt(
    model: onnx.ModelProto,
    cache_form: str,
    beams: int | None,
    slots: int,
    folder: Path = Path(),
    long_sources: bool = False,
) -> onnx.ModelProto:
    """A decoder step for a build: fixed axes written down, everything in the form that takes the fewest launches.

    No `beams`: dynamic. Weights that are not in the message are in `folder`. If all sources are long, as audio and
    images are, keys and values of the source are never copied for a fixed number of beams.
    """
    form = copy_of(model)
    frozen_axes(form, ({"L": slots} if cache_form == "static" else {}) | ({"K": beams} if beams else {}))
    heads = heads_of(form)
    as_rows = long_sources and beams not in (None, 1) and takes_rows(heads)
    folded = not as_rows and fold_queries(form, heads, folder)
    if beams == 1:
        if cache_form == "static":
            write_late(form, beams, slots)
            mask_distances(form)
        if folded:
            rewrite_attentions(form, [a for a in find_attentions(form) if not a.is_self], heads, beams)
    elif precision_of(form) != TensorProto.FLOAT and (
        beams is None or (heads[1] >= SMALLEST_HEAD and not long_sources)
    ):
        if cache_form == "static" and beams:
            write_late(form, beams, slots)
            pack_keys_and_values(form, own=False)
        else:
            pack_keys_and_values(form, own=True)
    elif beams:
        whole = precision_of(form) == TensorProto.FLOAT
        if as_rows:
            beams_as_rows(form, heads)
        grouped = [a for a in find_attentions(form) if (whole or not a.bias) and (a.is_self or not as_rows)]
        rewrite_attentions(form, grouped, heads, beams)
    return form


def mask_distances(model: onnx.ModelProto) -> None:
    """Sets the bias of masked slots to zero, in place: bias and mask then take one kernel instead of two.

    The mask hides those slots afterwards all the same; a bias below which fp16 has no number would not be safe.
    """
    graph = model.graph
    attentions = [attention for attention in find_attentions(model) if attention.bias]
    biases = list(dict.fromkeys(attention.bias for attention in attentions))
    if not biases:
        return
    mask, kinds = attentions[0].mask, types_of(model)
    nothing = {bias: np.zeros((), dtype=helper.tensor_dtype_to_np_dtype(kinds[bias])) for bias in biases}
    graph.initializer.extend(numpy_helper.from_array(zero, f"{bias}/nothing") for bias, zero in nothing.items())
    needed = nodes_for(mask, makers_of(graph.node))  # they may come after the first reader of a bias
    waiting = [node for node in graph.node if node.name in needed]
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        for bias in [name for name in node.input if name in nothing]:
            inputs, masked = [mask, bias, f"{bias}/nothing"], f"{bias}/masked"
            nodes += [*waiting, helper.make_node("Where", inputs, [masked], name=f"{masked}/Where")]
            waiting = []
            del nothing[bias]
        rename_inputs([node], {bias: f"{bias}/masked" for bias in biases if bias not in nothing})
        if node.name not in needed:
            nodes.append(node)
    replace_nodes(graph, nodes)


def nodes_for(tensor: str, makers: Mapping[str, onnx.NodeProto]) -> set[str]:
    """Names of all nodes that a tensor is made by."""
    found: dict[str, onnx.NodeProto] = {}
    wanted = [tensor]
    while wanted:
        node = makers.get(wanted.pop())
        if node is not None and node.name not in found:
            found[node.name] = node
            wanted += node.input
    return set(found)


def precision_of(model: onnx.ModelProto) -> int:
    """The element type of the cache, which is what the graph computes in."""
    return next(value.type.tensor_type.elem_type for value in model.graph.input if value.name == "self_k.0")


def pack_keys_and_values(model: onnx.ModelProto, own: bool) -> None:
    """Passes keys and values that attentions read through one tensor: all of the source's, and each layer's `own`."""
    nodes = list(model.graph.node)
    cross = [value.name for value in model.graph.input if value.name.startswith("cross_")]
    packed: dict[str, str] = {}
    ordered = packed_together(cross, "cross", packed)
    made: set[str] = set()
    for node in nodes:
        rename_inputs([node], packed)
        ordered.append(node)
        made.update(name for name in node.output if name.startswith("new_self_"))
        for layer in {name.rsplit(".")[-1] for name in node.output if name in made}:
            pair = [f"new_self_k.{layer}", f"new_self_v.{layer}"]
            if own and made.issuperset(pair):
                ordered += packed_together(pair, f"new_self.{layer}", packed)
    replace_nodes(model.graph, ordered)


def packed_together(names: list[str], label: str, packed: dict[str, str]) -> list[onnx.NodeProto]:
    """Concat and Split of tensors [B,H,L,E] along their heads; `packed` learns the names they go by afterwards."""
    packed.update({name: f"{name}/packed" for name in names})
    together = f"trt/{label}"
    return [
        helper.make_node("Concat", names, [together], name=f"{together}/Concat", axis=1),
        helper.make_node(
            "Split",
            [together],
            [packed[name] for name in names],
            name=f"{together}/Split",
            axis=1,
            num_outputs=len(names),
        ),
    ]


def heads_of(model: onnx.ModelProto) -> tuple[int, int]:
    """Heads and head size, from the cache's shape [B,H,L,E]."""
    cache = next(value for value in model.graph.input if value.name == "self_k.0")
    dims = cache.type.tensor_type.shape.dim
    return dims[1].dim_value, dims[3].dim_value


def rewrite_attentions(
    model: onnx.ModelProto, attentions: list[PrimitiveAttention], heads: tuple[int, int], beams: int
) -> None:
    """Replaces primitive attentions by Attention ops, in place."""
    count, size = heads
    graph = model.graph
    replaced = {index for attention in attentions for index in attention.nodes}
    at = {attention.nodes[-1]: attention for attention in attentions}
    folded_masks: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    kept: list[onnx.NodeProto] = []
    for index, node in enumerate(graph.node):
        if index not in replaced:
            kept.append(node)
        if index not in at:
            continue
        attention = at[index]
        if beams == 1:
            inputs = [attention.q, attention.k, attention.v, attention.mask]
            kept.append(attention_node(attention, inputs, attention.output))
            continue
        shapes |= {"trt/fold": (0, count * beams, 1, size), "trt/unfold": (0, count, beams, size)}
        mask = attention.mask
        if mask_is_per_beam(graph, mask):
            key = attention.bias or mask
            if key not in folded_masks:
                shapes |= {"trt/mask_heads": (1, count, 1, 1), "trt/mask_fold": (0, count * beams, 1, -1)}
                wide, folded_masks[key] = f"{key}/heads", f"{key}/folded"
                masked = graph.node[attention.nodes[-3]].input[2]  # of the Where
                if attention.bias:
                    kept.append(helper.make_node("Where", [mask, attention.bias, masked], [wide], name=wide))
                else:
                    kept.append(helper.make_node("Expand", [mask, "trt/mask_heads"], [wide], name=wide))
                folded = folded_masks[key]
                kept.append(helper.make_node("Reshape", [wide, "trt/mask_fold"], [folded], name=folded))
            mask = folded_masks[key]
        q, out = f"{attention.output}/q", f"{attention.output}/folded"
        kept.append(helper.make_node("Reshape", [attention.q, "trt/fold"], [q], name=q))
        kept.append(attention_node(attention, [q, attention.k, attention.v, mask], out))
        unfold = helper.make_node("Reshape", [out, "trt/unfold"], [attention.output], name=f"{attention.output}/unfold")
        kept.append(unfold)
    replace_nodes(graph, kept)
    for name, shape in shapes.items():
        graph.initializer.append(numpy_helper.from_array(np.array(shape, dtype=np.int64), name))
    for opset in model.opset_import:
        opset.version = max(opset.version, ATTENTION_OPSET)


def attention_node(attention: PrimitiveAttention, inputs: list[str], output: str) -> onnx.NodeProto:
    return helper.make_node("Attention", inputs, [output], name=f"{attention.output}/Attention", scale=attention.scale)


def mask_is_per_beam(graph: onnx.GraphProto, mask: str) -> bool:
    """The self mask differs from beam to beam; the source mask does not and broadcasts over the folded heads."""
    maker = next(node for node in graph.node if mask in node.output)
    return maker.input[0] == "self_mask"

"""The form of a graph that TensorRT fuses best, derived from the portable graph just before a build.

Portable attention is five primitive ops that run anywhere. TensorRT has one fused kernel for attention of a single
query and writes better code around its Attention op in some places, so the decoder step is rewritten here:

    one beam, static cache    self-attention becomes an Attention op (6 launches fewer for six layers)
    beams in fp16 and bf16    the kernel for several queries wants keys and values in a layout of its own, one copy
                              launch each; what is ready at the same time is packed into one tensor first, so that one
                              launch lays out all of it. Any number of beams.

      cross_k.0, cross_v.0, cross_k.1, ... --Concat--Split--> the same tensors, laid out once per step
      new_self_k.i, new_self_v.i ----------Concat--Split--> the same, once per layer

    K beams in fp32, K fixed  that kernel does not exist in fp32 (nor for heads of 8), so beams become extra query heads
                              over the source's shared key heads (grouped-query form) for the kernel of one query

      q [B,H,K,E] -Reshape-> [B,H*K,1,E] --+
      k, v [B,H,L,E] ----------------------+--Attention--> [B,H*K,1,E] -Reshape-> [B,H,K,E]
      mask [B,1,K,L] -Expand,Reshape-> [B,H*K,1,L]

    anything else             stays as it is.

docs/LOG.md has the launch counts of every form that was tried.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

ATTENTION_OPSET = 23
SMALLEST_HEAD = 12  # that the kernel for several queries takes; the one for a single query takes 8, too


@dataclass(frozen=True)
class PrimitiveAttention:
    """softmax(where(mask, (q * scale) @ k^T, masked)) @ v, as the indices of its nodes and the names of its inputs."""

    nodes: tuple[int, ...]
    q: str
    k: str
    v: str
    mask: str
    scale: float
    output: str

    @property
    def is_self(self) -> bool:
        return ".self_attn/" in self.output


def frozen_axes(model: onnx.ModelProto, sizes: dict[str, int]) -> None:
    """Gives dynamic axes of the inputs and outputs a fixed size, in place."""
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]


def step_for_tensorrt(model: onnx.ModelProto, cache_form: str, beams: int | None, slots: int) -> onnx.ModelProto:
    """A decoder step for a build: fixed axes written down, attentions in the form that fuses. No `beams`: dynamic."""
    form = onnx.ModelProto()
    form.CopyFrom(model)
    frozen_axes(form, ({"L": slots} if cache_form == "static" else {}) | ({"K": beams} if beams else {}))
    if beams == 1:
        chosen = [a for a in find_attentions(form) if a.is_self] if cache_form == "static" else []
    elif precision_of(form) != TensorProto.FLOAT and (beams is None or heads_of(form)[1] >= SMALLEST_HEAD):
        pack_keys_and_values(form)
        return form
    else:
        chosen = find_attentions(form) if beams else []
    if chosen:
        rewrite_attentions(form, chosen, heads_of(form), beams or 1)
        for opset in form.opset_import:
            opset.version = max(opset.version, ATTENTION_OPSET)
    return form


def precision_of(model: onnx.ModelProto) -> int:
    """The element type of the cache, which is what the graph computes in."""
    return next(value.type.tensor_type.elem_type for value in model.graph.input if value.name == "self_k.0")


def pack_keys_and_values(model: onnx.ModelProto) -> None:
    """Passes the keys and values that attentions read through one tensor: all of the source's, and each layer's own."""
    nodes = list(model.graph.node)
    cross = [value.name for value in model.graph.input if value.name.startswith("cross_")]
    packed: dict[str, str] = {}
    ordered = packed_together(cross, "cross", packed)
    made: set[str] = set()
    for node in nodes:
        node.input[:] = [packed.get(name, name) for name in node.input]
        ordered.append(node)
        made.update(name for name in node.output if name.startswith("new_self_"))
        for layer in {name.rsplit(".")[-1] for name in node.output if name in made}:
            pair = [f"new_self_k.{layer}", f"new_self_v.{layer}"]
            if made.issuperset(pair):
                ordered += packed_together(pair, f"new_self.{layer}", packed)
    del model.graph.node[:]
    model.graph.node.extend(ordered)


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


def find_attentions(model: onnx.ModelProto) -> list[PrimitiveAttention]:
    """Every primitive attention of a graph that our export wrote."""
    nodes = model.graph.node
    maker = {name: i for i, node in enumerate(nodes) for name in node.output}
    reader = {name: i for i, node in enumerate(nodes) for name in node.input}
    constants = {w.name: w for w in model.graph.initializer}
    found = []
    for i, node in enumerate(nodes):
        if node.op_type != "Softmax":
            continue
        where = maker[node.input[0]]
        scores = maker[nodes[where].input[1]]
        scaled, transposed = maker[nodes[scores].input[0]], maker[nodes[scores].input[1]]
        product = reader[node.output[0]]
        chain = [nodes[j].op_type for j in (scaled, transposed, scores, where, product)]
        assert chain == ["Mul", "Transpose", "MatMul", "Where", "MatMul"], (
            f"{node.name}: not an attention of ours: {chain}"
        )
        found.append(
            PrimitiveAttention(
                nodes=(scaled, transposed, scores, where, i, product),
                q=nodes[scaled].input[0],
                k=nodes[transposed].input[0],
                v=nodes[product].input[1],
                mask=nodes[where].input[0],
                scale=float(numpy_helper.to_array(constants[nodes[scaled].input[1]])),
                output=nodes[product].output[0],
            )
        )
    return found


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
            if mask not in folded_masks:
                shapes |= {"trt/mask_heads": (1, count, 1, 1), "trt/mask_fold": (0, count * beams, 1, -1)}
                wide, folded_masks[mask] = f"{mask}/heads", f"{mask}/folded"
                kept.append(helper.make_node("Expand", [mask, "trt/mask_heads"], [wide], name=wide))
                folded = folded_masks[mask]
                kept.append(helper.make_node("Reshape", [wide, "trt/mask_fold"], [folded], name=folded))
            mask = folded_masks[mask]
        q, out = f"{attention.output}/q", f"{attention.output}/folded"
        kept.append(helper.make_node("Reshape", [attention.q, "trt/fold"], [q], name=q))
        kept.append(attention_node(attention, [q, attention.k, attention.v, mask], out))
        unfold = helper.make_node("Reshape", [out, "trt/unfold"], [attention.output], name=f"{attention.output}/unfold")
        kept.append(unfold)
    del graph.node[:]
    graph.node.extend(kept)
    for name, shape in shapes.items():
        graph.initializer.append(numpy_helper.from_array(np.array(shape, dtype=np.int64), name))


def attention_node(attention: PrimitiveAttention, inputs: list[str], output: str) -> onnx.NodeProto:
    return helper.make_node("Attention", inputs, [output], name=f"{attention.output}/Attention", scale=attention.scale)


def mask_is_per_beam(graph: onnx.GraphProto, mask: str) -> bool:
    """The self mask differs from beam to beam; the source mask does not and broadcasts over the folded heads."""
    maker = next(node for node in graph.node if mask in node.output)
    return maker.input[0] == "self_mask"

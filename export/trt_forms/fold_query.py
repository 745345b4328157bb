"""Folds cross-attention's query projection into the two matmuls before it.

A post-norm decoder layer makes that query from the normalised sum of the layer's input and its self-attention:

    x --qkv--> attention --a--> out --+--> s --LayerNorm--> y --q--> query      s = x + a Wo + bo
    x --------------------------------+                                         y = (s - mean) / deviation * g + b

Centring and gain of a LayerNorm are linear; only the division is not, and that is one number a row. So, with
W = centred(g * Wq) * scale,

    query = (x W + a (Wo W) + bo W) / deviation + (b Wq + bq) * scale

where x W becomes further columns of qkv and a (Wo W) further columns of out; one kernel then makes y and the query:

    x --[qkv | W]--> attention --a--> [out | Wo W] --> s and s W --> y and query

It saves a launch per layer and costs D*D weights. A pre-norm layer has no matmul that reads x itself: it is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ..artifact.graph_files import array_of
from ..graph_index import drop_unread_weights, makers_of, readers_of, rename_inputs, replace_nodes

WIDEST = 1024  # d_model; for larger models reading the additional weights costs more than a launch


@dataclass(frozen=True)
class QueryPath:
    """The nodes of one layer from its input to cross-attention's scaled query."""

    layer: str  # decoder.0
    qkv: onnx.NodeProto
    qkv_bias: onnx.NodeProto
    heads: onnx.NodeProto  # [B,K,3D] -> [B,K,3H,E]
    transposed: onnx.NodeProto  # -> [B,3H,K,E]
    out: onnx.NodeProto
    out_bias: onnx.NodeProto
    norm: onnx.NodeProto
    q: onnx.NodeProto
    q_bias: onnx.NodeProto
    q_scale: onnx.NodeProto

    @property
    def replaced(self) -> tuple[str, ...]:
        """Names of the nodes that the folded form does without."""
        parts = (self.qkv, self.qkv_bias, self.heads, self.transposed, self.out, self.norm, self.q, self.q_bias)
        return (*(node.name for node in parts), self.q_scale.name)


def fold_queries(model: onnx.ModelProto, heads: tuple[int, int], folder: Path) -> bool:
    """Folds the query of every layer that allows it, in place; whether any did. External weights are in `folder`."""
    graph = model.graph
    weights = {weight.name: weight for weight in graph.initializer}
    paths = query_paths(graph, weights) if heads[0] * heads[1] <= WIDEST else []
    added = shapes_of(heads) if paths else {}
    instead: dict[str, list[onnx.NodeProto]] = {}
    scaled: dict[str, str] = {}  # a query that is scaled already -> its name before
    for path in paths:

        def read(node: onnx.NodeProto, index: int = 1) -> np.ndarray:
            return array_of(weights[node.input[index]], folder)

        added |= folded_weights(path, heads, read)
        instead |= {name: [] for name in path.replaced} | folded_nodes(path, weights[path.q.input[1]].data_type)
        scaled[path.q_scale.output[0]] = path.q_scale.input[0]
    nodes = [new for node in graph.node for new in instead.get(node.name, [node])]
    rename_inputs(nodes, scaled)
    replace_nodes(graph, nodes)
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in added.items())
    drop_unread_weights(graph)
    return bool(paths)


def scaled_names(portable: onnx.ModelProto, form: onnx.ModelProto) -> set[str]:
    """Tensors of the portable graph that hold the query after its scale in a folded form, and before it elsewhere."""
    made = {name for node in form.graph.node for name in node.output}
    makers = makers_of(portable.graph.node)
    found: set[str] = set()
    for path in query_paths(portable.graph, {weight.name for weight in portable.graph.initializer}):
        if path.q_scale.output[0] not in made:
            name = path.q_scale.input[0]
            while name != path.q_bias.output[0]:
                found.add(name)
                name = makers[name].input[0]
            found.add(name)
    return found


def shapes_of(heads: tuple[int, int]) -> dict[str, np.ndarray]:
    """The constants that all layers share."""
    count, size = heads
    width = count * size
    numbers = {
        "all_heads": (0, 0, 4 * count, size),
        "heads": (0, 0, count, size),
        "width": (0, 0, width),
        "head_axes": (2, 3),
        "from_q": (3 * width,),
        "to_q": (4 * width,),
        "first_head": (0,),
        "last_head": (3 * count,),
        "axis_1": (1,),
        "axis_2": (2,),
    }
    return {f"trt/{name}": np.array(values, dtype=np.int64) for name, values in numbers.items()}


def query_paths(graph: onnx.GraphProto, weights: Iterable[str]) -> list[QueryPath]:
    """The layers whose query can be folded: post-norm, and with plain weights all along the way."""
    makers, readers = makers_of(graph.node), readers_of(graph.node)

    def before(node: onnx.NodeProto | None, index: int) -> onnx.NodeProto | None:
        return None if node is None else makers.get(node.input[index])

    def after(node: onnx.NodeProto | None) -> onnx.NodeProto | None:
        reading = [] if node is None else readers.get(node.output[0], [])
        return reading[0] if len(reading) == 1 else None

    found = []
    for q in graph.node:
        if q.op_type != "MatMul" or not q.name.endswith(".cross_attn.q/MatMul"):
            continue
        layer = q.name.removesuffix(".cross_attn.q/MatMul")
        norm = before(q, 0)
        total = before(norm, 0)
        out_bias = before(total, 1)
        out = before(out_bias, 0)
        q_bias = after(q)
        q_scale = after(after(after(q_bias)))
        same = [] if total is None else readers[total.input[0]]  # other readers of the layer's input
        qkv = next((node for node in same if node.name == f"{layer}.self_attn.qkv/MatMul"), None)
        qkv_bias = after(qkv)
        heads = after(qkv_bias)
        chain = (qkv, qkv_bias, heads, after(heads), out, out_bias, norm, q, q_bias, q_scale)
        kinds = ("MatMul", "Add", "Reshape", "Transpose", "MatMul", "Add", "LayerNormalization", "MatMul", "Add", "Mul")
        parts = [node for node, kind in zip(chain, kinds, strict=True) if node is not None and node.op_type == kind]
        if len(parts) < len(kinds):
            continue
        plain = [name for node in parts for name in node.input[1:] if node.op_type not in ("Reshape", "Transpose")]
        if set(plain) <= set(weights):
            found.append(QueryPath(layer, *parts))
    return found


def folded_weights(path: QueryPath, heads: tuple[int, int], read: Callable[..., np.ndarray]) -> dict[str, np.ndarray]:
    """The wider weights and the vectors of a layer; products are made in double and rounded once."""
    parts = (path.qkv, path.qkv_bias, path.out, path.out_bias, path.q, path.q_bias, path.q_scale)
    qkv, qkv_bias, out, out_bias, q, q_bias, scale = (read(node).astype(np.float64) for node in parts)
    gain, bias = read(path.norm, 1), read(path.norm, 2)
    gained = gain.astype(np.float64)[:, None] * q * scale
    w = gained - gained.mean(axis=0)  # centring, moved from the rows of s to the columns of the weight
    outside = (bias.astype(np.float64) @ q + q_bias) * scale
    kind = gain.dtype
    made = {
        "qkv_and_q": np.concatenate((qkv, w), axis=1).astype(kind),
        "qkv_bias": qkv_bias.reshape(-1, 1, heads[1]).astype(kind),
        "out_and_q": np.concatenate((out, out @ w), axis=1).astype(kind),
        "q_inside": (out_bias @ w).reshape(heads).astype(np.float32),
        "q_outside": outside.reshape(heads).astype(kind),
        "gain": gain.reshape(heads),
        "bias": bias.reshape(heads),
        "epsilon": np.array(epsilon_of(path.norm), dtype=np.float32),
    }
    return {f"trt/{path.layer}/{name}": array for name, array in made.items()}


def epsilon_of(norm: onnx.NodeProto) -> float:
    return next((a.f for a in norm.attribute if a.name == "epsilon"), 1e-5)


def folded_nodes(path: QueryPath, element: int) -> dict[str, list[onnx.NodeProto]]:
    """What takes the place of a node, by its name; `.name` is a tensor of this layer's own.

    Statistics are made over [H,E], the shape the query has afterwards: TensorRT makes y and the query in one kernel
    only if it sees both in the same shape.
    """
    node = partial(node_of_layer, path.layer)
    qkv = [
        node("MatMul", [path.qkv.input[0], ".qkv_and_q"], ".qkv_and_xw"),
        node("Slice", [".qkv_and_xw", "trt/from_q", "trt/to_q", "trt/axis_2"], ".xw"),
        node("Reshape", [".qkv_and_xw", "trt/all_heads"], ".all_heads"),
        node("Transpose", [".all_heads"], ".all_transposed", perm=[0, 2, 1, 3]),
        node("Slice", [".all_transposed", "trt/first_head", "trt/last_head", "trt/axis_1"], ".qkv"),
        node("Add", [".qkv", ".qkv_bias"], path.transposed.output[0]),
    ]
    out = [
        node("MatMul", [path.out.input[0], ".out_and_q"], ".out_and_aw"),
        node("Split", [".out_and_aw"], path.out.output[0], ".aw", axis=2, num_outputs=2),
    ]
    norm, q = folded_norm(path, element, node), folded_query(path, element, node)
    qkv[0].name, out[0].name = path.qkv.name, path.out.name  # a product is found under its module's name
    return {path.qkv.name: qkv, path.out.name: out, path.norm.name: norm, path.q_bias.name: q}


def node_of_layer(layer: str, op: str, inputs: list[str], *outputs: str, **attributes: Any) -> onnx.NodeProto:
    def own(name: str) -> str:
        return f"trt/{layer}/{name[1:]}" if name.startswith(".") else name

    made = [own(name) for name in outputs]
    return helper.make_node(op, [own(name) for name in inputs], made, name=f"{made[0]}/{op}", **attributes)


def folded_norm(path: QueryPath, element: int, node: Callable[..., onnx.NodeProto]) -> list[onnx.NodeProto]:
    return [
        node("Reshape", [path.norm.input[0], "trt/heads"], ".sum_heads"),
        node("Cast", [".sum_heads"], ".sum", to=TensorProto.FLOAT),
        node("ReduceMean", [".sum", "trt/head_axes"], ".mean"),
        node("Sub", [".sum", ".mean"], ".centred"),
        node("Mul", [".centred", ".centred"], ".square"),
        node("ReduceMean", [".square", "trt/head_axes"], ".variance"),
        node("Add", [".variance", ".epsilon"], ".above_zero"),
        node("Sqrt", [".above_zero"], ".deviation"),
        node("Div", [".centred", ".deviation"], ".normal_fp32"),
        node("Cast", [".normal_fp32"], ".normal", to=element),
        node("Mul", [".normal", ".gain"], ".gained"),
        node("Add", [".gained", ".bias"], ".y"),
        node("Reshape", [".y", "trt/width"], path.norm.output[0]),
    ]


def folded_query(path: QueryPath, element: int, node: Callable[..., onnx.NodeProto]) -> list[onnx.NodeProto]:
    return [
        node("Add", [".xw", ".aw"], ".sw"),
        node("Reshape", [".sw", "trt/heads"], ".sw_heads"),
        node("Cast", [".sw_heads"], ".sw_fp32", to=TensorProto.FLOAT),
        node("Add", [".sw_fp32", ".q_inside"], ".sw_whole"),
        node("Div", [".sw_whole", ".deviation"], ".q_fp32"),
        node("Cast", [".q_fp32"], ".q_heads", to=element),
        node("Add", [".q_heads", ".q_outside"], ".q"),
        node("Reshape", [".q", "trt/width"], path.q_bias.output[0]),
    ]

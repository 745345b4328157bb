"""Lowers PyTorch modules to ONNX nodes: a traced module is read op by op, and a table maps each op to its ONNX form.

    model --torch.fx--> graph of calls --this table--> ONNX nodes, named after the module they come from

Nothing is run and there is no example input, so no size can be baked in by accident; sizes are symbolic from the start.
Weights keep their names and are stored once, however often they are used. An op without an entry is an error that
names it.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import fx, nn

from seq2engine.errors import ExportError
from seq2engine.model.layers import write_slots

from .contract import GraphSpec, TensorSpec
from .graph_index import names_read, rename_inputs, rename_outputs

Size = int | str | None  # a number, the contract's letter, or not known
ELEMENT = {name: helper.np_dtype_to_tensor_dtype(np.dtype(name)) for name in ("float32", "float16", "int64", "bool")}


@dataclass(frozen=True)
class Value:
    """A tensor of the ONNX graph under construction."""

    name: str
    dtype: str
    shape: tuple[Size, ...]

    def axis(self, axis: int) -> int:
        return axis % len(self.shape)


class GraphWriter:
    """Collects nodes and weights. `scope` is the module being lowered; it becomes the front of every name."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}
        self.stored: dict[tuple[int, bool], Value] = {}
        self.scope = ""
        self.used: Counter[str] = Counter()

    def fresh(self, label: str) -> str:
        name = f"{self.scope}/{label}" if self.scope else label
        self.used[name] += 1
        return name if self.used[name] == 1 else f"{name}.{self.used[name] - 1}"

    def node(self, op: str, inputs: list[Value], *outputs: tuple[str, tuple[Size, ...]], **attributes: Any) -> Any:
        """Adds one node; `outputs` are (dtype, shape). Returns a Value, or a list of them for several outputs."""
        name = self.fresh(op)
        names = [name] if len(outputs) == 1 else [f"{name}:{i}" for i in range(len(outputs))]
        self.nodes.append(helper.make_node(op, [value.name for value in inputs], names, name=name, **attributes))
        values = [Value(n, dtype, shape) for n, (dtype, shape) in zip(names, outputs, strict=True)]
        return values[0] if len(values) == 1 else values

    def constant(self, array: np.ndarray, label: str) -> Value:
        """A small constant; equal ones are shared."""
        key = f"const/{label}"
        self.weights.setdefault(key, array)
        return Value(key, array.dtype.name, array.shape)

    def scalar(self, number: float, dtype: str) -> Value:
        return self.constant(np.array(number, dtype=dtype), f"{dtype}_{number:.9g}")

    def ints(self, *numbers: int) -> Value:
        return self.constant(np.array(numbers, dtype=np.int64), "ints_" + "_".join(map(str, numbers)))

    def weight(self, name: str, tensor: torch.Tensor, transposed: bool = False) -> Value:
        """A model weight under its own name; one that is used twice (tied) is stored once."""
        key = (tensor.data_ptr(), transposed)
        if key not in self.stored:
            array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().numpy()  # numpy has no bf16
            array = np.ascontiguousarray(array.T if transposed else array)
            self.weights[name] = array
            self.stored[key] = Value(name, array.dtype.name, array.shape)
        return self.stored[key]


# --- modules: called as (writer, module path, module, input values) ---------------------------------------------------


def lower_linear(w: GraphWriter, path: str, module: nn.Linear, x: Value) -> Value:
    """x -> MatMul(x, weight^T) -> Add(bias). A weight that is an embedding table too is transposed in the graph."""
    stored = w.stored.get((module.weight.data_ptr(), False))
    if stored is None:
        weight = w.weight(f"{path}.weight", module.weight, transposed=True)
    else:
        weight = w.node("Transpose", [stored], (stored.dtype, stored.shape[::-1]), perm=[1, 0])
    out = w.node("MatMul", [x, weight], (x.dtype, (*x.shape[:-1], module.out_features)))
    if module.bias is None:
        return out
    return w.node("Add", [out, w.weight(f"{path}.bias", module.bias)], (out.dtype, out.shape))


def lower_embedding(w: GraphWriter, path: str, module: nn.Embedding, ids: Value) -> Value:
    return gather_rows(w, w.weight(f"{path}.weight", module.weight), ids)


def lower_layer_norm(w: GraphWriter, path: str, module: nn.LayerNorm, x: Value) -> Value:
    scale, bias = w.weight(f"{path}.weight", module.weight), w.weight(f"{path}.bias", module.bias)
    return w.node("LayerNormalization", [x, scale, bias], (x.dtype, x.shape), axis=-1, epsilon=module.eps)


def lower_conv(w: GraphWriter, path: str, module: nn.Conv1d, x: Value) -> Value:
    """x [B,C,F] -> Conv(x, weight, bias); the number of frames stays symbolic."""
    assert module.bias is not None, "the model's convolutions have a bias"
    weight, bias = w.weight(f"{path}.weight", module.weight), w.weight(f"{path}.bias", module.bias)
    (kernel,), (stride,), padding = module.kernel_size, module.stride, module.padding
    assert isinstance(padding, tuple), "the model's padding is a number"
    frames = x.shape[2] if stride == 1 and kernel == 2 * padding[0] + 1 else None
    return w.node(
        "Conv",
        [x, weight, bias],
        (x.dtype, (x.shape[0], module.out_channels, frames)),
        kernel_shape=[kernel],
        strides=[stride],
        pads=[padding[0], padding[0]],
    )


def lower_patches(w: GraphWriter, path: str, module: nn.Conv2d, x: Value) -> Value:
    """x [B,C,height,width], its sizes fixed -> Conv(x, weight, bias) [B,D,rows,columns]; patches do not overlap."""
    assert module.bias is not None, "the model's convolutions have a bias"
    assert module.stride == module.kernel_size, "patches lie side by side"
    weight, bias = w.weight(f"{path}.weight", module.weight), w.weight(f"{path}.bias", module.bias)
    sizes = [size // step for size, step in zip(x.shape[2:], module.stride, strict=True)]  # type: ignore[operator]
    return w.node(
        "Conv",
        [x, weight, bias],
        (x.dtype, (x.shape[0], module.out_channels, *sizes)),
        kernel_shape=list(module.kernel_size),
        strides=list(module.stride),
    )


def lower_rms_norm(w: GraphWriter, path: str, module: nn.RMSNorm, x: Value) -> Value:
    scale = w.weight(f"{path}.weight", module.weight)
    return w.node("RMSNormalization", [x, scale], (x.dtype, x.shape), axis=-1, epsilon=module.eps)


def lower_relu(w: GraphWriter, path: str, module: nn.ReLU, x: Value) -> Value:
    return w.node("Relu", [x], (x.dtype, x.shape))


def lower_gelu(w: GraphWriter, path: str, module: nn.GELU, x: Value) -> Value:
    return w.node("Gelu", [x], (x.dtype, x.shape), approximate=module.approximate)


def lower_silu(w: GraphWriter, path: str, module: nn.SiLU, x: Value) -> Value:
    """x -> Mul(x, Sigmoid(x))"""
    gate = w.node("Sigmoid", [x], (x.dtype, x.shape))
    return w.node("Mul", [x, gate], (x.dtype, x.shape))


def lower_identity(w: GraphWriter, path: str, module: nn.Identity, x: Value) -> Value:
    return x


MODULES: dict[type, Callable[..., Value]] = {
    nn.Linear: lower_linear,
    nn.Embedding: lower_embedding,
    nn.Conv1d: lower_conv,
    nn.Conv2d: lower_patches,
    nn.LayerNorm: lower_layer_norm,
    nn.RMSNorm: lower_rms_norm,
    nn.ReLU: lower_relu,
    nn.GELU: lower_gelu,
    nn.SiLU: lower_silu,
    nn.Identity: lower_identity,
    nn.Dropout: lower_identity,  # graphs are for inference
}


# --- functions and methods: called as (writer, *arguments of the call) ------------------------------------------------


def broadcast(a: tuple[Size, ...], b: tuple[Size, ...]) -> tuple[Size, ...]:
    """The shape of an elementwise result."""
    rank = max(len(a), len(b))
    a, b = (1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b
    return tuple(y if x == 1 else x for x, y in zip(a, b, strict=True))


def elementwise(op: str) -> Callable[..., Value]:
    def lower(w: GraphWriter, a: Any, b: Any) -> Value:
        dtype = a.dtype if isinstance(a, Value) else b.dtype
        a, b = (x if isinstance(x, Value) else w.scalar(x, dtype) for x in (a, b))
        return w.node(op, [a, b], (dtype, broadcast(a.shape, b.shape)))

    return lower


def matmul(w: GraphWriter, a: Value, b: Value) -> Value:
    return w.node("MatMul", [a, b], (a.dtype, (*broadcast(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])))


def negate(w: GraphWriter, x: Value) -> Value:
    return w.node("Neg", [x], (x.dtype, x.shape))


def where(w: GraphWriter, condition: Value, a: Value, b: float) -> Value:
    return w.node("Where", [condition, a, w.scalar(b, a.dtype)], (a.dtype, broadcast(condition.shape, a.shape)))


def clamp(w: GraphWriter, x: Value, least: int, most: int) -> Value:
    return w.node("Clip", [x, w.scalar(least, x.dtype), w.scalar(most, x.dtype)], (x.dtype, x.shape))


def softmax(w: GraphWriter, x: Value, dim: int) -> Value:
    return w.node("Softmax", [x], (x.dtype, x.shape), axis=dim)


def concat(w: GraphWriter, parts: tuple[Value, ...], dim: int) -> Value:
    axis = parts[0].axis(dim)
    sizes = [part.shape[axis] for part in parts]
    total = sum(sizes) if all(isinstance(size, int) for size in sizes) else None  # type: ignore[arg-type]
    shape = (*parts[0].shape[:axis], total, *parts[0].shape[axis + 1 :])
    return w.node("Concat", list(parts), (parts[0].dtype, shape), axis=axis)


def chunk(w: GraphWriter, x: Value, chunks: int, dim: int) -> list[Value]:
    axis = x.axis(dim)
    size = x.shape[axis]
    assert isinstance(size, int), "the model splits fixed widths only"
    assert size % chunks == 0, "the model splits into equal parts only"
    shape = (*x.shape[:axis], size // chunks, *x.shape[axis + 1 :])
    return w.node("Split", [x], *[(x.dtype, shape)] * chunks, axis=axis, num_outputs=chunks)


def reshape(w: GraphWriter, x: Value, shape: tuple[Size, ...]) -> Value:
    """Unchanged sizes become 0 (copy), so that a dynamic axis is never written as a number."""
    sizes = [size if isinstance(size, int) else 0 for size in shape]
    kept = [i for i, size in enumerate(sizes) if size == 0]
    assert all(x.shape[i : i + 1] == (shape[i],) for i in kept), "a dynamic axis may not move"
    return w.node("Reshape", [x, w.ints(*sizes)], (x.dtype, shape))


def unflatten(w: GraphWriter, x: Value, dim: int, sizes: tuple[int, ...]) -> Value:
    axis, total = x.axis(dim), x.shape[x.axis(dim)]
    assert isinstance(total, int)
    known = int(np.prod([size for size in sizes if size != -1]))
    return reshape(w, x, (*x.shape[:axis], *(total // known if s == -1 else s for s in sizes), *x.shape[axis + 1 :]))


def flatten(w: GraphWriter, x: Value, start: int) -> Value:
    axis = x.axis(start)
    sizes = x.shape[axis:]
    assert all(isinstance(size, int) for size in sizes), "only fixed sizes are merged"
    return reshape(w, x, (*x.shape[:axis], int(np.prod(sizes))))  # type: ignore[arg-type]


def transpose(w: GraphWriter, x: Value, first: int, second: int) -> Value:
    order = list(range(len(x.shape)))
    first, second = x.axis(first), x.axis(second)
    order[first], order[second] = second, first
    return w.node("Transpose", [x], (x.dtype, tuple(x.shape[i] for i in order)), perm=order)


def permute(w: GraphWriter, x: Value, *order: int) -> Value:
    return w.node("Transpose", [x], (x.dtype, tuple(x.shape[i] for i in order)), perm=list(order))


def expand(w: GraphWriter, x: Value, batch: tuple[Value, int], *others: int) -> Value:
    """x [1, ...] -> [batch, ...]: Shape(tensor)[axis] -> Concat(size, 1, ...) -> Expand."""
    tensor, axis = batch
    assert set(others) == {-1}, "the model expands the first axis only"
    size = w.node("Shape", [tensor], ("int64", (1,)), start=axis, end=axis + 1)
    shape = w.node("Concat", [size, w.ints(*[1] * len(others))], ("int64", (1 + len(others),)), axis=0)
    return w.node("Expand", [x, shape], (x.dtype, (tensor.shape[axis], *x.shape[1:])))


def gather_rows(w: GraphWriter, table: Value, ids: Value) -> Value:
    return w.node("Gather", [table, ids], (table.dtype, (*ids.shape, *table.shape[1:])), axis=0)


def index(w: GraphWriter, x: Any, key: Any) -> Any:
    """x[key]: a part of a list, rows of a table, or new axes and single positions of a tensor."""
    if isinstance(x, list | tuple):
        return x[key]
    if isinstance(key, Value):
        return gather_rows(w, x, key)
    keys = key if isinstance(key, tuple) else (key,)
    for axis, part in reversed([(i, k) for i, k in enumerate(k for k in keys if k is not None) if isinstance(k, int)]):
        shape = (*x.shape[:axis], *x.shape[axis + 1 :])
        x = w.node("Gather", [x, w.constant(np.array(part), f"int_{part}")], (x.dtype, shape), axis=axis)
    kept = [k for k in keys if not isinstance(k, int)]
    assert all(k is None or k == slice(None) for k in kept), "only whole axes, new axes and single positions"
    new_axes = [i for i, k in enumerate(kept) if k is None]
    if not new_axes:
        return x
    wider = list(x.shape)
    for axis in new_axes:
        wider.insert(axis, 1)
    return w.node("Unsqueeze", [x, w.ints(*new_axes)], (x.dtype, tuple(wider)))


def attribute(w: GraphWriter, x: Value, name: str) -> Any:
    """x.shape and x.device; a symbolic size stays a (tensor, axis) pair until something needs the number."""
    return {"shape": [(x, axis) for axis in range(len(x.shape))], "device": None}[name]


def arange(w: GraphWriter, end: tuple[Value, int], device: None) -> Value:
    """Shape(x)[axis] -> Range(0, size, 1)"""
    tensor, axis = end
    size = w.node("Shape", [tensor], ("int64", (1,)), start=axis, end=axis + 1)
    size = w.node("Squeeze", [size], ("int64", ()))
    zero, one = w.scalar(0, "int64"), w.scalar(1, "int64")
    return w.node("Range", [zero, size, one], ("int64", (tensor.shape[axis],)))


def scatter_slots(w: GraphWriter, cache: Value, new: Value, write_index: Value) -> Value:
    return w.node("TensorScatter", [cache, new, write_index], (cache.dtype, cache.shape), axis=-2)


CALLS: dict[Any, Callable[..., Any]] = {
    operator.add: elementwise("Add"),
    operator.sub: elementwise("Sub"),
    operator.mul: elementwise("Mul"),
    operator.matmul: matmul,
    operator.neg: negate,
    operator.getitem: index,
    "__getitem__": index,
    getattr: attribute,
    torch.where: where,
    torch.cat: concat,
    torch.arange: arange,
    "clamp": clamp,
    "softmax": softmax,
    "chunk": chunk,
    "unflatten": unflatten,
    "flatten": flatten,
    "transpose": transpose,
    "permute": permute,
    "expand": expand,
    write_slots: scatter_slots,
}


@dataclass(frozen=True)
class Lowered:
    """A traced module and what its calls became."""

    graph: fx.Graph
    writer: GraphWriter
    values: dict[fx.Node, Any]
    result: tuple[Value, ...]


def onnx_from_module(module: nn.Module, spec: GraphSpec, opset: int) -> onnx.ModelProto:
    """A module whose forward takes the spec's inputs by order and returns its outputs, as an ONNX model in memory."""
    form = lowered(module, spec)
    return assemble(form.writer, spec, form.result, opset)


class LeafTracer(fx.Tracer):
    """Modules of the table, and of their subclasses, are traced as single calls."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, tuple(MODULES)) or super().is_leaf_module(m, module_qualified_name)


def lowered(module: nn.Module, spec: GraphSpec) -> Lowered:
    w = GraphWriter()
    values: dict[fx.Node, Any] = {}
    inputs = iter(spec.inputs)
    result: tuple[Value, ...] = ()
    traced = LeafTracer().trace(module)
    for node in traced.nodes:
        args = fx.node.map_arg(node.args, lambda n: values[n])
        kwargs = fx.node.map_arg(node.kwargs, lambda n: values[n])
        w.scope = module_path(node)
        if node.op == "placeholder":
            taken = list(inputs) if str(node.target).startswith("*") else [next(inputs)]
            found = [Value(tensor.name, tensor.dtype, tensor.axes) for tensor in taken]
            values[node] = found if str(node.target).startswith("*") else found[0]
        elif node.op == "get_attr":
            path = str(node.target).removeprefix("model.")
            values[node] = w.weight(path, operator.attrgetter(str(node.target))(module))
        elif node.op == "call_module":
            leaf = module.get_submodule(str(node.target))
            kind = next((one for one in type(leaf).__mro__ if one in MODULES), type(leaf))
            values[node] = lookup(MODULES, kind, node)(w, w.scope, leaf, *args, **kwargs)
        elif node.op in ("call_function", "call_method"):
            values[node] = lookup(CALLS, node.target, node)(w, *args, **kwargs)
        else:
            result = tuple(args[0])
    return Lowered(traced, w, values, result)


def module_path(node: fx.Node) -> str:
    """decoder.3.cross_attn for a node made inside that module."""
    stack = list(node.meta.get("nn_module_stack", ()))
    return stack[-1].removeprefix("model.") if stack and stack[-1] != "model" else ""


def lookup(table: dict[Any, Any], key: Any, node: fx.Node) -> Any:
    if key not in table:
        op, where = getattr(key, "__name__", key), module_path(node) or "the model"
        raise ExportError(f"{node.name} in {where}: no ONNX form is known for {op}")
    return table[key]


def assemble(w: GraphWriter, spec: GraphSpec, result: tuple[Value, ...], opset: int) -> onnx.ModelProto:
    """Nodes and weights to a model whose outputs carry the contract's names."""
    assert len(result) == len(spec.outputs), f"{spec.name} returns {len(result)} tensors, not {len(spec.outputs)}"
    renamed = {value.name: tensor.name for value, tensor in zip(result, spec.outputs, strict=True)}
    rename_inputs(w.nodes, renamed)
    rename_outputs(w.nodes, renamed)
    read = names_read(w.nodes)
    graph = helper.make_graph(
        w.nodes,
        spec.name,
        [value_info(tensor) for tensor in spec.inputs],
        [value_info(tensor) for tensor in spec.outputs],
        [numpy_helper.from_array(array, name) for name, array in w.weights.items() if name in read],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], producer_name="seq2engine")
    model.ir_version = helper.find_min_ir_version_for(model.opset_import)
    return model


def value_info(tensor: TensorSpec) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(tensor.name, ELEMENT[tensor.dtype], tensor.axes)

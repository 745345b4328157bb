"""Inner tensors of the two graphs, to locate errors: ONNX graphs with additional outputs, and PyTorch run call by call.

model --torch.fx--> calls --lowering--> ONNX tensors        the same trace names both sides, so that
        |                     |                             `decoder.1.self_attn/Softmax` of a file is compared
        +--- run in fp64, fp32, fp16, call by call          with what PyTorch computes in that very call
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, shape_inference
from torch import fx, nn

from seq2engine.model.transformer import Transformer

from .audit import without_weight_data
from .contract import GraphSpec
from .graph_index import copy_of
from .lowering import Value, lowered, module_path
from .to_onnx import STEP_GRAPHS, EncoderGraph

REALS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16)


def exposed_graph(model: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """A graph, with or without its weights loaded -> the same with these tensors as outputs besides its own."""
    made = copy_of(model)
    types = element_types(model)
    have = {output.name for output in made.graph.output}
    for name in names:
        if name not in have:
            made.graph.output.append(helper.make_tensor_value_info(name, types[name], None))
    return made


def cut_graph(model: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """The subgraph that computes these tensors, with them as outputs; weights stay external."""
    wanted = list(names)
    types = element_types(model)
    needed: set[str] = set(wanted)
    nodes: list[onnx.NodeProto] = []
    for node in reversed(model.graph.node):
        if needed.intersection(node.output):
            needed |= set(node.input)
            nodes.append(node)
    graph = helper.make_graph(
        nodes[::-1],
        model.graph.name,
        [value for value in model.graph.input if value.name in needed],
        # Inference knows no fused operators; those make fp32.
        [helper.make_tensor_value_info(name, types.get(name, TensorProto.FLOAT), None) for name in wanted],
        [weight for weight in model.graph.initializer if weight.name in needed],
    )
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)


def element_types(model: onnx.ModelProto) -> dict[str, int]:
    """The type of every tensor that a node makes."""
    inferred = shape_inference.infer_shapes(without_weight_data(model)).graph
    return {value.name: value.type.tensor_type.elem_type for value in (*inferred.value_info, *inferred.output)}


def real_tensors(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    """Every tensor of numbers (no ids, no masks) that a node makes, and the node, in the order of the graph."""
    types = element_types(model)
    return {name: node for node in model.graph.node for name in node.output if types.get(name) in REALS}


@dataclass(frozen=True)
class Call:
    """One call of the traced model, with copies of the values it was given: some calls write into them."""

    node: fx.Node
    args: tuple[Any, ...]


Listener = Callable[[str, Call], None]  # (tensor, the call that makes it)


class ReferenceGraph:
    """One graph of the contract in PyTorch, run call by call. The model stays its owner's."""

    def __init__(self, model: Transformer, spec: GraphSpec, cache_form: str):
        self.spec, self.config = spec, model.config
        self.root: nn.Module = EncoderGraph(model) if spec.name == "encoder" else STEP_GRAPHS[cache_form](model)
        form = lowered(self.root, spec)
        self.graph = form.graph
        renamed = {value.name: tensor.name for value, tensor in zip(form.result, spec.outputs, strict=True)}
        inputs = {tensor.name for tensor in spec.inputs}
        self.calls: dict[str, fx.Node] = {}  # tensor -> the call that makes it, in the order of the graph
        self.sources: dict[fx.Node, str] = {}  # every call whose value is a tensor of the file, inputs too
        for node, value in form.values.items():
            if isinstance(value, Value):
                name = self.sources[node] = renamed.get(value.name, value.name)
                if name not in inputs and node.op in ("call_function", "call_method", "call_module"):
                    self.calls.setdefault(name, node)
        self.names = {node: name for name, node in self.calls.items()}

    def module(self, tensor: str) -> str:
        """The module that computes a tensor; one between modules belongs to the module of its first operand."""
        node: fx.Node = self.calls[tensor]
        while not (path := node.target if node.op in ("call_module", "get_attr") else module_path(node)):
            if not node.all_input_nodes:
                return str(node.target)
            node = node.all_input_nodes[0]
        return str(path).removeprefix("model.")

    def leaf(self, tensor: str) -> nn.Module | None:
        """The module whose call a tensor is, where it is one (a product, a norm, an activation, a table)."""
        node = self.calls[tensor]
        return self.root.get_submodule(str(node.target)) if node.op == "call_module" else None

    def operands(self, tensor: str) -> list[str]:
        """The tensors of the file that a call reads."""
        return [self.sources[node] for node in self.calls[tensor].all_input_nodes if node in self.sources]

    @torch.inference_mode()
    def run(
        self, given: Mapping[str, torch.Tensor], wanted: Iterable[str], listen: Listener | None = None
    ) -> dict[str, torch.Tensor]:
        """Inputs by name -> the tensors wanted; `listen` is called before every call.

        Inputs are copied first: the cache is written in place.
        """
        keep, found = set(wanted), {}
        names = self.names

        class Listening(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                name = names.get(n)
                if name is not None and listen is not None:
                    args = fx.node.map_arg(n.args, lambda a: self.env[a])
                    listen(name, Call(n, tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)))
                value = super().run_node(n)
                if name in keep:
                    found[name] = value.clone()
                return value

        listening = Listening(self.root, garbage_collect_values=True, graph=self.graph)
        listening.run(*(given[tensor.name].clone() for tensor in self.spec.inputs))
        return found


def numbers(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()

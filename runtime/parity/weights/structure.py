"""A graph against the one that an export of the reference makes now: node by node, constant by constant.

Exports are deterministic, so every difference is a fault of the file, or the file is of another version's export.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import NodeProto, helper

from seq2engine.errors import GraphError

from ..levels.findings import Finding, layer_of
from ..levels.weights import WeightResult

# The likely cause by node type, where nothing else explains a difference.
KINDS = {
    "Where": "mask",
    "Softmax": "softmax axis",
    "LayerNormalization": "norm",
    "RMSNormalization": "norm",
    "Gelu": "activation",
    "Relu": "activation",
    "Sigmoid": "activation",
    "Reshape": "head order",
    "Transpose": "head order",
    "Split": "swapped tensors",
    "TensorScatter": "cache slot",
}


def finding(graph: str, node: str, tensor: str, module: str, cause: str, detail: str) -> Finding:
    return Finding(graph, node, tensor, module, layer_of(module), "", None, cause, detail, (0.0, 0.0), "")


def unreadable(name: str, error: GraphError) -> WeightResult:
    """The finding for a file that holds no readable graph."""
    return WeightResult(name, "", 0, 0, 0, {}, (finding(name, "", "", name, "crash", str(error)),))


def module_of(node: str) -> str:
    """decoder.1.cross_attn/Where.1 -> decoder.1.cross_attn; a node of no module is its own."""
    return node.partition("/")[0]


def structure_faults(name: str, have: onnx.ModelProto, want: onnx.ModelProto) -> Iterator[Finding]:
    """Nodes that are missing, added or other than expected, another opset, and what is neither node nor tensor."""
    opsets = [{one.domain: one.version for one in model.opset_import} for model in (have, want)]
    if opsets[0] != opsets[1]:
        yield finding(name, "", "", name, "structure", f"its opsets are {opsets[0]}, expected {opsets[1]}")
    for part in parts_of_no_export(have):
        yield finding(name, "", "", name, "structure", f"no export has {part}")
    theirs = {node.name: node for node in have.graph.node}
    ours = {node.name: node for node in want.graph.node}
    made = {output for node in want.graph.node for output in node.output}
    made |= {value.name for value in want.graph.input}
    for node in want.graph.node:
        if node.name not in theirs:
            yield finding(name, node.name, "", module_of(node.name), cause_of(node), f"the {node.op_type} is not there")
        elif fault := node_fault(theirs[node.name], node, made):
            yield finding(name, node.name, "", module_of(node.name), *fault)
    repeated = len(have.graph.node) - len(theirs)
    if repeated:
        yield finding(name, "", "", name, "structure", f"{repeated} nodes have the name of another")
    for node in have.graph.node:
        if node.name not in ours:
            read = next((one for one in want.graph.node if set(node.output) & set(readings(theirs, one.name))), None)
            module = module_of(node.name if read is None else read.name)
            detail = f"no export has this {node.op_type}: it cannot be traced to the reference"
            yield finding(name, node.name, "", module, "structure", detail)


def parts_of_no_export(model: onnx.ModelProto) -> Iterator[str]:
    """Functions of the file's own, which a runtime could take for an operator, and tensors that are stored sparsely."""
    for function in model.functions:
        yield f"the function {function.domain}.{function.name}" if function.domain else f"the function {function.name}"
    yield from (f"the sparse tensor {tensor.values.name}" for tensor in model.graph.sparse_initializer)


def readings(nodes: dict[str, NodeProto], name: str) -> list[str]:
    return list(nodes[name].input) if name in nodes else []


def node_fault(have: NodeProto, want: NodeProto, made: set[str]) -> tuple[str, str] | None:
    """Cause and detail, if a node is not what it should be; `made` are the tensors that the right graph has."""
    if (have.op_type, have.domain) != (want.op_type, want.domain):
        return cause_of(want), f"it is a {have.op_type}, expected {want.op_type}"
    if list(have.input) != list(want.input):
        pairs = list(zip(have.input, want.input, strict=False))
        theirs, ours = next(((a, b) for a, b in pairs if a != b), ("", ""))
        if not theirs and not ours:
            return "structure", f"it has {len(have.input)} inputs, expected {len(want.input)}"
        cause = "swapped tensors" if theirs in made else cause_of(want)
        return cause, f"it reads {theirs or 'nothing'}, expected {ours or 'nothing'}"
    if list(have.output) != list(want.output):
        theirs, ours = next(((a, b) for a, b in zip(have.output, want.output, strict=False) if a != b), ("", ""))
        return "swapped tensors" if theirs in made else "structure", f"it makes {theirs}, expected {ours}"
    return attribute_fault(have, want)


def attribute_fault(have: NodeProto, want: NodeProto) -> tuple[str, str] | None:
    values = [{a.name: helper.get_attribute_value(a) for a in node.attribute} for node in (have, want)]
    for name in sorted(values[0].keys() | values[1].keys()):
        theirs, ours = (value.get(name) for value in values)
        if theirs != ours:
            return cause_of(want), f"{name} {shown(theirs)}, expected {shown(ours)}"
    return None


def shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value.decode() if isinstance(value, bytes) else str(value)


def cause_of(node: NodeProto) -> str:
    return KINDS.get(node.op_type, "structure")

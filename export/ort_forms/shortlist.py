"""The decoder step with a smaller output projection: logits of a shortlist of tokens only.

    ... -> output/MatMul <- output/Transpose <- rows of output.weight -> logits [B,K,W]

Only the projection's weights change. A table that it shares with the embedding stays whole for the embedding; where it
is quantised, the projection dequantises its own rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from seq2engine.errors import ExportError

from ..artifact.graph_files import array_of
from ..graph_index import copy_of, names_read, rename_inputs, replace_nodes
from .top_candidates import vocab_of

SCOPE = "output/"  # the module of the model that projects


def shortlist_graph(model: onnx.ModelProto, tokens: Sequence[int], folder: Path) -> onnx.ModelProto:
    """A decoder step -> the same for these tokens alone. Weights that are not loaded are in `folder`."""
    vocab = vocab_of(model)
    made = copy_of(model)
    own_restoring(made.graph)
    projecting = [node for node in made.graph.node if node.name.startswith(SCOPE)]
    read = names_read(projecting)
    found = [weight for weight in made.graph.initializer if weight.name in read and list(weight.dims).count(vocab) == 1]
    if not found:
        raise ExportError(
            f"graph {model.graph.name} has no weights of {vocab} tokens in {SCOPE}, so its projection cannot be "
            "shortened; ask for allowed tokens instead of a shortlist"
        )
    names = {weight.name: f"{SCOPE}shortlist/{weight.name}" for weight in found}
    made.graph.initializer.extend(rows_of(weight, vocab, tokens, names[weight.name], folder) for weight in found)
    rename_inputs(projecting, names)
    used = names_read(made.graph.node)
    for weight in found:
        if weight.name not in used:
            made.graph.initializer.remove(weight)
    (logits,) = [value for value in made.graph.output if value.name == "logits"]
    logits.CopyFrom(helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", "K", len(tokens)]))
    del made.graph.value_info[:]  # inferred shapes, which may contain the full vocabulary
    return made


def own_restoring(graph: onnx.GraphProto) -> None:
    """Gives the projection its own DequantizeLinear if it shares one."""
    restored = {node.output[0]: node for node in graph.node if node.op_type == "DequantizeLinear"}
    nodes: list[NodeProto] = []
    for node in graph.node:
        for place, name in enumerate(node.input if node.name.startswith(SCOPE) else ()):
            if name in restored and not restored[name].name.startswith(SCOPE):
                own = NodeProto()
                own.CopyFrom(restored[name])
                own.name = own.output[0] = node.input[place] = f"{SCOPE}restored/{name}"
                nodes.append(own)
        nodes.append(node)
    read = names_read(nodes)
    replace_nodes(graph, (node for node in nodes if node.output[0] not in restored or node.output[0] in read))


def rows_of(weight: TensorProto, vocab: int, tokens: Sequence[int], name: str, folder: Path) -> TensorProto:
    """The part of a weight that belongs to these tokens, along the axis of the vocabulary."""
    axis = list(weight.dims).index(vocab)
    return numpy_helper.from_array(np.take(array_of(weight, folder), tokens, axis=axis), name)

"""A decoder step with a device graph before or after it, as one graph.

So a step is one call, and nothing has to be ordered between the streams of two sessions. With the tree cache's update
(tree_mask.py) it makes its own mask:

    self_mask [B,K,L], the latest --+
    parents [B,K], write_index [B] -+-- tree_mask --> new_self_mask --+--> an output: what the next step is given
    beam [K], slots [L]            -+                                 +--> the step

For a step with a given mask, the mask is passed with the beams as their own parents: its K new slots may be
in it already. With greedy search (next_greedy.py) after it, the step computes all inputs of the next one:

    tokens, position, self_mask --> the step --> logits --> next_greedy --> new_tokens, new_position, new_self_mask, ...
"""

from __future__ import annotations

import onnx

from ..contract import GraphSpec
from ..graph_index import copy_of, rename_inputs, replace_nodes
from .next_greedy import next_greedy
from .tree_mask import tree_mask


def step_with_mask(step: onnx.ModelProto) -> onnx.ModelProto:
    """A decoder step of a static cache, in any form -> the same with the inputs and outputs of `tree_mask`."""
    made, (update, spec) = copy_of(step), tree_mask("L")
    rename_inputs(made.graph.node, {"self_mask": "new_self_mask"})
    own = list(made.graph.node)
    add(made, update, spec)
    replace_nodes(made.graph, [*made.graph.node[len(own) :], *own])
    return made


def step_with_greedy(step: onnx.ModelProto, vocab: int, count: int) -> onnx.ModelProto:
    """A decoder step of a static cache -> one that chooses among `count` candidates; its logits are not an output."""
    made, (update, spec) = copy_of(step), next_greedy(vocab, count, "L", "T")
    add(made, update, spec)
    outputs = [value for value in made.graph.output if value.name != "logits"]
    del made.graph.output[:]
    made.graph.output.extend(outputs)
    return made


def add(made: onnx.ModelProto, update: onnx.ModelProto, spec: GraphSpec) -> None:
    """Appends a device graph to a step, in place; its inner tensors are renamed."""
    given = {value.name for value in made.graph.input} | {value.name for value in made.graph.output}
    shared = {tensor.name for tensor in (*spec.inputs, *spec.outputs)}

    def renamed(name: str) -> str:
        return name if name in shared else f"{spec.name}/{name}"

    for node in update.graph.node:
        node.name = f"{spec.name}/{node.name}"
        node.input[:] = [renamed(name) for name in node.input]
        node.output[:] = [renamed(name) for name in node.output]
    for constant in update.graph.initializer:
        constant.name = renamed(constant.name)
    made.graph.node.extend(update.graph.node)
    made.graph.initializer.extend(update.graph.initializer)
    made.graph.input.extend(value for value in update.graph.input if value.name not in given)
    made.graph.output.extend(update.graph.output)

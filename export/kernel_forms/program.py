"""A graph of the library's operators alone as one operator, which calls them itself.

    inputs, weights -> Embedding -> Linear -> SelfAttention -> ... -> Candidates -> outputs
    becomes
    inputs, weights -> StepProgram -> outputs

ONNX Runtime then runs one node instead of dozens, and threads stay together for all of them. The nodes are attributes
of the program: their operators, the numbers of what they read and write, and their own attributes. Memory between nodes
is reused as soon as its last reader is done.

A step has further inputs, a plan of greedy search (search/ahead/greedy_plan.py), by which one call runs `steps` steps
and feeds each its predecessor's token. With `beam_steps` it runs steps of beam search by a plan of its own
(beam_plan.py). By default both are 0: one step, as the inputs say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper

from ..device_graphs.tiny_graph import value_info
from ..graph_index import names_read, replace_nodes
from ..ort_forms.interface import BEAMS, CHOSEN, FED, PLAN
from . import ops

STEP_OUTPUTS = ("logits", "exp_sum", "best_logits", "best_tokens")  # a step's first
MOST_BUFFERS, MOST_CACHES = 16, 256  # of the library
ABSENT = -1


def as_program(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph as one operator, in place; unchanged where it has operators of others, as some models' graphs do."""
    graph = model.graph
    if any(node.domain != ops.DOMAIN for node in graph.node):
        return model
    if any(node.op_type in (ops.CANDIDATES, ops.CANDIDATES_INT8) for node in graph.node):
        made = step_program(graph)
    else:
        made = program_node(graph, ops.ENCODER_PROGRAM, [output.name for output in graph.output])
    if made is not None:
        replace_nodes(graph, [made])
    return model


def step_program(graph: onnx.GraphProto) -> NodeProto | None:
    ends = [output.name for output in graph.output]
    if not set(STEP_OUTPUTS) <= set(ends):
        return None
    caches = [(name.removeprefix("new_"), name) for name in ends if name.startswith("new_")]
    planned = set(FED) <= {given.name for given in graph.input} and len(caches) <= MOST_CACHES
    chosen = [tensor.name if planned else "" for tensor in (*CHOSEN, *BEAMS)]
    outputs = [*STEP_OUTPUTS, *chosen, *(name for name in ends if name not in STEP_OUTPUTS)]
    made = program_node(graph, ops.STEP_PROGRAM, outputs, [tensor.name for tensor in PLAN if planned])
    if made is None or not planned:
        return made
    places = {name: place for place, name in enumerate((*made.input, *made.output))}
    for name in (*FED, *STEP_OUTPUTS[1:], *(tensor.name for tensor in (*PLAN, *CHOSEN, *BEAMS))):
        made.attribute.append(helper.make_attribute(f"chain.{name}", places[name]))
    text = text_of(places[name] for pair in caches for name in pair)
    made.attribute.append(helper.make_attribute("chain.caches", text))
    declare_plan(graph)
    return made


def declare_plan(graph: onnx.GraphProto) -> None:
    """Adds the inputs and outputs of a plan; the inputs have defaults, so that a step needs none of them."""
    for tensor in PLAN:
        graph.input.append(value_info(tensor))
        default = np.zeros([axis if isinstance(axis, int) else 1 for axis in tensor.axes], dtype=tensor.dtype)
        graph.initializer.append(numpy_helper.from_array(default, tensor.name))
    graph.output.extend(value_info(tensor) for tensor in (*CHOSEN, *BEAMS))


def program_node(
    graph: onnx.GraphProto, kind: str, outputs: Sequence[str], more_inputs: Sequence[str] = ()
) -> NodeProto | None:
    """One node for all; None where an output is an input, or too much is in memory at a time."""
    nodes = list(graph.node)
    variables = [*(given.name for given in graph.input), *more_inputs]
    read = names_read(nodes)
    constants = [weight.name for weight in graph.initializer if weight.name in read]
    known = {*variables, *outputs}
    made = [name for node in nodes for name in node.output if name and name not in known]
    buffers = buffers_of(nodes, made)
    ends = {output.name for output in graph.output}
    if max(buffers, default=0) >= MOST_BUFFERS or not ends <= {name for node in nodes for name in node.output}:
        return None
    places = {name: place for place, name in enumerate((*variables, *constants, *outputs, *made))}
    places[""] = ABSENT
    node = helper.make_node(kind, [*variables, *constants], outputs, name=graph.name, domain=ops.DOMAIN)
    sizes = {"nodes": nodes, "variables": variables, "constants": constants, "outputs": outputs, "made": made}
    own: dict[str, int | str] = {name: len(of) for name, of in sizes.items()}
    own["buffers"] = text_of(buffers)
    for number, inner in enumerate(nodes):
        own[f"{number}.operator"], own[f"{number}.name"] = inner.op_type, inner.name
        own[f"{number}.inputs"] = text_of(places[name] for name in inner.input)
        own[f"{number}.outputs"] = text_of(places[name] for name in inner.output)
        for attribute in inner.attribute:
            renamed = node.attribute.add()
            renamed.CopyFrom(attribute)
            renamed.name = f"{number}.{attribute.name}"
    node.attribute.extend(helper.make_attribute(name, value) for name, value in own.items())
    return node


def buffers_of(nodes: Sequence[NodeProto], made: Sequence[str]) -> list[int]:
    """For every tensor made on the way, the number of the memory it is in: free again after its last reader."""
    last = {name: place for place, node in enumerate(nodes) for name in (*node.output, *node.input)}
    free: list[int] = []
    of: dict[str, int] = {}
    count = 0
    for place, node in enumerate(nodes):
        for name in node.output:
            if name in made:
                if not free:
                    free, count = [count], count + 1
                of[name] = free.pop()
        free += [of[name] for name in dict.fromkeys((*node.input, *node.output)) if name in of and last[name] == place]
    return [of[name] for name in made]


def text_of(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))

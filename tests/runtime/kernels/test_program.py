"""A program that is damaged is refused, and an error inside one names the node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper
from support.kernel_checks import attributes
from support.kernel_sessions import open_model
from support.step_programs import CONFIG, VOCAB, first_inputs, open_plan, step_program

from seq2engine.export.kernel_forms.program import MOST_BUFFERS, as_program
from seq2engine.export.kernel_forms.step import kernel_encoder
from seq2engine.export.to_onnx import graphs_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.runtime.ort.graphs import node_in

pytestmark = pytest.mark.usefixtures("built")
Values = dict[str, Any]  # attributes of a program
Refused = ort.capi.onnxruntime_pybind11_state.InvalidArgument
STEPS = 4


def with_attributes(change: Callable[[Values], None]) -> onnx.ModelProto:
    """The program with other attributes."""
    made = onnx.ModelProto()
    made.CopyFrom(step_program())
    (node,) = made.graph.node
    values = attributes(node)
    change(values)
    del node.attribute[:]
    node.attribute.extend(helper.make_attribute(name, value) for name, value in values.items())
    return made


def run(model: onnx.ModelProto) -> None:
    """A call for one step, and one for several."""
    session, inputs = open_model(model), first_inputs(2, 8)
    session.run(["best_tokens"], inputs)
    session.run(["chosen"], {**inputs, **open_plan(2, STEPS).inputs(STEPS)})


def setting(name: str, value: object) -> Callable[[Values], None]:
    def change(values: Values) -> None:
        assert name in values
        values[name] = value

    return change


def adding(name: str, number: int) -> Callable[[Values], None]:
    return lambda values: values.__setitem__(name, values[name] + number)


def test_as_it_is_it_runs() -> None:
    run(with_attributes(lambda values: None))


DAMAGED: dict[str, Callable[[Values], None]] = {
    "an unknown operator": setting("3.operator", "Convolution"),
    "an operator without a name": setting("3.operator", ""),
    "a program inside": setting("3.operator", "StepProgram"),
    "no operator": lambda values: values.pop("3.operator"),
    "more nodes than there are": adding("nodes", 1),
    "fewer nodes than there are": adding("nodes", -1),
    "no nodes": setting("nodes", 0),
    "fewer outputs than there are": adding("outputs", -1),
    "more outputs than there are": adding("outputs", 1),
    "fewer variables than there are": adding("variables", -1),
    "more constants than there are": adding("constants", 1),
    "an output that no node writes": lambda values: values.update({"2.outputs": values["6.outputs"]}),
    "very many nodes": setting("nodes", 1 << 40),
    "a negative number of nodes": setting("nodes", -1),
    "a negative number of variables": setting("variables", -3),
    "a negative number of constants": setting("constants", -3),
    "a negative number of outputs": setting("outputs", -3),
    "a negative number of made values": setting("made", -3),
    "very many made values": setting("made", 1 << 30),
    "no made values": setting("made", 0),
    "more made values than buffers": adding("made", 1),
    "a buffer number that is too large": lambda values: values.update(buffers=values["buffers"] + b" 16"),
    "no more than the buffers": lambda values: values.update(buffers=values["buffers"][:-1] + b"16"),
    "a negative buffer": lambda values: values.update(buffers=b"-1" + values["buffers"][1:]),
    "buffers that are no numbers": setting("buffers", "zero one"),
    "no buffers": lambda values: values.pop("buffers"),
    "an input that is no value": setting("2.inputs", "9999 1 2"),
    "an input far from all values": setting("2.inputs", "99999999999999999999"),
    "an input before all values": setting("2.inputs", "-2"),
    "inputs that are no numbers": setting("2.inputs", "x"),
    "more inputs than an operator has": setting("2.inputs", " ".join(["0"] * 11)),
    "no inputs": lambda values: values.pop("2.inputs"),
    "a required input that is absent": setting("2.inputs", "-1"),
    "an output that is no value": setting("2.outputs", "9999"),
    "an output that is an input": setting("2.outputs", "0"),
    "more outputs than an operator has": setting("2.outputs", "40 41 42 43 44"),
    "a required output that is absent": setting("2.outputs", "-1"),
    "no outputs": lambda values: values.pop("2.outputs"),
    "a chain without its tokens": setting("chain.tokens", 9999),
    "a chain before all values": setting("chain.position", -7),
    "a chain that reads an output": lambda values: values.update({"chain.limit": values["chain.ran"]}),
    "a chain that writes to an input": lambda values: values.update({"chain.chosen": values["chain.tokens"]}),
    "a chain that reads a constant": lambda values: values.update({"chain.target": values["variables"]}),
    "a cache that is no value": setting("chain.caches", "9999 1"),
    "a cache without an output": setting("chain.caches", "4"),
    "a cache that is written to an input": setting("chain.caches", "0 1"),
    "caches that are no numbers": setting("chain.caches", "all"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_program_is_refused(name: str) -> None:
    with pytest.raises(Exception, match="Program: "):
        run(with_attributes(DAMAGED[name]))


def test_buffers_are_as_many_as_the_library_has() -> None:
    """One more is refused there (above), so programs are made with no more."""
    assert MOST_BUFFERS == 16


def test_a_program_without_one_of_its_constants_is_refused() -> None:
    made = with_attributes(lambda values: None)
    del made.graph.node[0].input[-1]
    with pytest.raises(Exception, match="Program: an input or an output is missing"):
        run(made)


def test_a_program_without_one_of_its_inputs_is_refused() -> None:
    made = with_attributes(lambda values: None)
    (node,) = made.graph.node
    node.input[list(node.input).index("tokens")] = ""
    with pytest.raises(Exception, match="is absent, but not optional"):  # by ONNX Runtime
        run(made)


def test_values_that_are_read_before_they_are_made_are_absent() -> None:
    """Of nodes in another order: an error, as that input is required."""

    def change(values: Values) -> None:
        made = values["variables"] + values["constants"] + values["outputs"]
        values["1.inputs"] = f"{made + values['made'] - 1} " + values["1.inputs"].decode().partition(" ")[2]

    with pytest.raises(Refused, match="Linear"):
        run(with_attributes(change))


def errors_of(model: onnx.ModelProto, inputs: dict[str, np.ndarray], output: str) -> tuple[str, str]:
    with pytest.raises(Refused) as failed:
        open_model(model).run([output], inputs)
    return str(failed.value), node_in(str(failed.value))


@pytest.mark.parametrize("steps", [0, STEPS])
@pytest.mark.parametrize("token", [-1, VOCAB])
def test_an_error_names_the_node_inside(token: int, steps: int) -> None:
    inputs = {**first_inputs(2, 8), **open_plan(2, STEPS).inputs(steps)}
    inputs["tokens"][1] = token
    message, node = errors_of(step_program(), inputs, "chosen" if steps else "best_tokens")
    assert "a token or a position is not in its table" in message
    assert node == "target_embedding.tokens/Gather", message


def test_an_error_in_a_later_step_names_the_node_inside() -> None:
    """A forced token of a plan for a larger vocabulary than the table's."""
    plan = open_plan(2, STEPS)
    plan.target[1, 1] = VOCAB + 5
    inputs = {**first_inputs(2, 8), **plan.inputs(STEPS), "banned": np.zeros((4, VOCAB + 9), dtype=bool)}
    message, node = errors_of(step_program(), inputs, "chosen")
    assert "a token or a position is not in its table" in message
    assert node == "target_embedding.tokens/Gather"


def test_an_error_names_the_node_inside_an_encoder() -> None:
    made = as_program(kernel_encoder(graphs_from_model(random_model(CONFIG, 1))["encoder"]))
    inputs = {"source_ids": np.array([[5, VOCAB]]), "source_mask": np.ones((1, 2), dtype=bool)}
    message, node = errors_of(made, inputs, "encoder_states")
    assert "a token or a position is not in its table" in message
    assert node == "target_embedding.tokens/Gather", message
    longer = np.full((1, CONFIG.max_source + 1), 5)
    _, node = errors_of(made, {"source_ids": longer, "source_mask": longer > 0}, "encoder_states")
    assert node == "target_embedding.tokens/Gather"

"""A graph of our operators as one: the bits of its nodes, and memory that is free when it is reused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import NodeProto, TensorProto, helper, numpy_helper
from support.all_pairs import Case, all_pairs
from support.kernel_cases import FACTORS, SMALL, config_of, feeds_of_form, in_form, in_precision, is_all_ours
from support.kernel_checks import attributes
from support.kernel_sessions import open_model, run_in_place, same_bits

from seq2engine.export.contract import graph_specs
from seq2engine.export.kernel_forms import ops, program
from seq2engine.export.kernel_forms.program import (
    BEAMS,
    CHOSEN,
    MOST_BUFFERS,
    PLAN,
    STEP_OUTPUTS,
    as_program,
    buffers_of,
)
from seq2engine.export.kernel_forms.step import kernel_encoder, kernel_step
from seq2engine.export.ort_forms.beam_positions import beam_positions
from seq2engine.export.ort_forms.screened_argmax import WANTED
from seq2engine.export.to_onnx import graphs_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.config import ModelConfig
from seq2engine.runtime.kernels.library import library

needs_library = pytest.mark.skipif(library() is None, reason="the kernel library is not built here, or needs AVX2")
# Wide enough that operators share their work among threads.
WIDE = ModelConfig(1, 2, 2, 64, 96, 600, 600, max_source=12, max_target=12)
OURS = FACTORS | {
    "positions": ("sinusoidal", "learned"),
    "activation": ("relu", "gelu", "silu"),
    "gated": ("plain",),
    "embedding": ("scaled embedding", "embedding"),
    "cache": ("static",),
    "threads": ("1", "2"),
}
STEPS, _ = all_pairs(OURS | {"scale": ("scaled",), "cache memory": ("in place", "anew")}, is_all_ours)
ENCODERS, _ = all_pairs(OURS | {"output": ("tied",), "weights": ("hidden",), "beams": ("1",)}, is_all_ours)


def copy_of(model: onnx.ModelProto) -> onnx.ModelProto:
    made = onnx.ModelProto()
    made.CopyFrom(model)
    return made


def names_of(values: object) -> list[str]:
    return [value.name for value in values]  # type: ignore[attr-defined]


@needs_library
@pytest.mark.parametrize("case", STEPS, ids=lambda case: ", ".join(case.values()))
def test_a_step_has_the_bits_of_its_nodes(case: Case, feeds_for: Callable) -> None:
    base, batch = (WIDE, 60) if case["threads"] == "2" else (SMALL, 3)
    config, beams = config_of(case, base), int(case["beams"])
    plain = graphs_from_model(random_model(config, 5))["decoder_step"]
    nodes = kernel_step(in_form(in_precision(plain, case["precision"]), case), screened=True)
    made = as_program(copy_of(nodes))
    assert [node.op_type for node in made.graph.node] == [ops.STEP_PROGRAM]
    onnx.checker.check_model(made)

    sizes = {"B": batch, "K": beams, "S": 5, "L": 7, "M": 7 + beams}
    spec = graph_specs(config, "fp32", "static")["decoder_step"]
    feeds = feeds_of_form(feeds_for(spec, sizes, vocab=base.target_vocab, positions=12), case)
    names = names_of(nodes.graph.output)
    one, other = open_model(nodes), open_model(made, int(case["threads"]))
    for wanted in (0, 3, -3):
        given = {**feeds, WANTED.name: np.array([wanted])}
        expected = dict(zip(names, one.run(names, given), strict=True))
        if case["cache memory"] == "in place":
            found = run_in_place(other, given, names)
        else:
            found = dict(zip(names, other.run(names, given), strict=True))
        for name in names:
            assert same_bits(found[name], expected[name]), f"{name}, wanted {wanted}"


@needs_library
@pytest.mark.parametrize("case", ENCODERS, ids=lambda case: ", ".join(case.values()))
def test_an_encoder_has_the_bits_of_its_nodes(case: Case, feeds_for: Callable) -> None:
    base, batch = (WIDE, 60) if case["threads"] == "2" else (SMALL, 3)
    config = config_of(case, base)
    plain = graphs_from_model(random_model(config, 6))["encoder"]
    nodes = kernel_encoder(in_form(in_precision(plain, case["precision"]), case))
    made = as_program(copy_of(nodes))
    assert [node.op_type for node in made.graph.node] == [ops.ENCODER_PROGRAM]
    onnx.checker.check_model(made)
    names, session = names_of(nodes.graph.output), open_model(made, int(case["threads"]))
    assert names_of(made.graph.output) == names
    for length in (6, 11, 1):  # one session, and memory of other sizes
        feeds = feeds_for(graph_specs(config)["encoder"], {"B": batch, "S": length}, vocab=base.source_vocab)
        expected = open_model(nodes).run(names, feeds)
        for name, array, wanted in zip(names, session.run(names, feeds), expected, strict=True):
            assert same_bits(array, wanted), f"{name}, {length} tokens"


FOREIGN = {
    "rotary": {"positions": "rotary"},
    "relative": {"positions": "relative"},
    "growing": {"cache": "growing"},
    "another activation": {"activation": "gelu_tanh"},
    "gated": {"gated": "gated"},
    "normalised embedding": {"embedding": "normalised embedding"},
    "scaled states before a tied table": {"scale": "not scaled"},
}
USUAL: Case = {name: values[0] for name, values in FACTORS.items()}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_graph_with_operators_of_others_stays(name: str) -> None:
    case = {**USUAL, **FOREIGN[name]}
    graphs = graphs_from_model(random_model(config_of(case), 5), case["cache"])
    made = {"decoder_step": kernel_step(graphs["decoder_step"], screened=True)}
    if name not in ("growing", "scaled states before a tied table"):  # which encoders do not have
        made["encoder"] = kernel_encoder(graphs["encoder"])
    for graph in made.values():
        before = graph.SerializeToString(deterministic=True)
        assert as_program(graph).SerializeToString(deterministic=True) == before


@pytest.fixture(scope="module")
def step() -> onnx.ModelProto:
    """A decoder step by its nodes."""
    return kernel_step(graphs_from_model(random_model(SMALL, 1))["decoder_step"], screened=True)


def test_inputs_and_outputs_are_those_of_the_nodes_and_a_plan(step: onnx.ModelProto) -> None:
    made = as_program(copy_of(step))
    assert [opset.domain for opset in made.opset_import if opset.domain] == [ops.DOMAIN]
    assert list(made.graph.input)[: len(step.graph.input)] == list(step.graph.input)
    assert list(made.graph.output)[: len(step.graph.output)] == list(step.graph.output)
    assert names_of(made.graph.input)[len(step.graph.input) :] == names_of(PLAN)
    assert names_of(made.graph.output)[len(step.graph.output) :] == names_of((*CHOSEN, *BEAMS))
    defaults = {weight.name: numpy_helper.to_array(weight) for weight in made.graph.initializer}
    for tensor in PLAN:
        assert defaults[tensor.name].dtype == tensor.dtype
        assert not defaults[tensor.name].any(), "0 steps: one, as the inputs say"
    kept = {weight.name: weight for weight in made.graph.initializer}
    assert all(kept[weight.name] == weight for weight in step.graph.initializer)
    (node,) = made.graph.node
    assert list(node.output)[: len(STEP_OUTPUTS)] == list(STEP_OUTPUTS)


def test_a_step_with_a_position_for_every_beam_takes_a_plan() -> None:
    plain = beam_positions(graphs_from_model(random_model(SMALL, 1))["decoder_step"])
    made = as_program(kernel_step(plain, screened=True))
    onnx.checker.check_model(made)
    assert names_of(made.graph.input)[-len(PLAN) :] == names_of(PLAN)
    position = next(given for given in made.graph.input if given.name == "position")
    assert [axis.dim_param for axis in position.type.tensor_type.shape.dim] == ["B", "K"]


@needs_library
@pytest.mark.parametrize("layers", [1, 2])
def test_a_step_with_more_caches_than_the_library_moves_takes_no_plan(
    layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "MOST_CACHES", 2)
    config = dataclasses.replace(SMALL, decoder_layers=layers)
    made = as_program(kernel_step(graphs_from_model(random_model(config, 1))["decoder_step"], screened=True))
    assert [node.op_type for node in made.graph.node] == [ops.STEP_PROGRAM]
    assert ("chosen" in names_of(made.graph.output)) == (layers == 1)
    open_model(made)


def test_attributes_of_nodes_are_kept(step: onnx.ModelProto) -> None:
    found = attributes(as_program(copy_of(step)).graph.node[0])
    assert found["nodes"] == len(step.graph.node)
    for number, inner in enumerate(step.graph.node):
        assert (found[f"{number}.operator"], found[f"{number}.name"]) == (inner.op_type.encode(), inner.name.encode())
        for name, value in attributes(inner).items():
            assert found[f"{number}.{name}"] == value


# --- memory between nodes ---------------------------------------------------------------------------------------------


@st.composite
def graphs(draw: Callable) -> tuple[list[NodeProto], list[str]]:
    """Nodes that read anything made before them, and the names of what is made on the way."""
    nodes, known = [], ["x", "weight"]
    for place in range(draw(st.integers(1, 12))):
        read = draw(st.lists(st.sampled_from([*known, ""]), min_size=1, max_size=4))
        count = draw(st.integers(1, 3))
        written = [f"t{place}.{i}" if i == 0 or draw(st.booleans()) else "" for i in range(count)]
        nodes.append(helper.make_node("Any", read, written))
        known += [name for name in written if name]
    made = [name for name in known[2:] if draw(st.integers(0, 4))]  # the others are outputs
    return nodes, made


def lives(nodes: list[NodeProto], name: str) -> range:
    """The nodes during which a tensor is written or may yet be read."""
    places = [place for place, node in enumerate(nodes) if name in (*node.input, *node.output)]
    return range(places[0], places[-1] + 1)


@given(graphs())
@settings(max_examples=100)
def test_tensors_that_live_at_the_same_time_share_no_memory(made: tuple[list[NodeProto], list[str]]) -> None:
    nodes, names = made
    buffers = buffers_of(nodes, names)
    assert len(buffers) == len(names)
    for i, one in enumerate(names):
        for j, other in enumerate(names[:i]):
            if set(lives(nodes, one)) & set(lives(nodes, other)):
                assert buffers[i] != buffers[j], (one, other)
    most = max((sum(place in lives(nodes, name) for name in names) for place in range(len(nodes))), default=0)
    assert max(buffers, default=-1) + 1 == most, "no more memory than lives at a time"


def linears(weights: int) -> Iterator[NodeProto]:
    """As many products of one input, and their sum: all of them live at a time."""
    for i in range(weights):
        yield ops.linear(f"product{i}", f"p{i}", x="x", weight=f"w{i}")
    total = "p0"
    for i in range(1, weights):
        yield ops.linear(f"sum{i}", f"s{i}", x=f"p{i}", weight="unit", residual=total)
        total = f"s{i}"


def graph_of_linears(count: int) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    nodes = list(linears(count))
    stored = {f"w{i}": rng.normal(size=(4, 4)).astype(np.float32) for i in range(count)} | {"unit": np.eye(4)}
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])]
    last = [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, ["N", 4])]
    weights = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in stored.items()]
    graph = helper.make_graph(nodes, "linears", given, last, weights)
    imports = [helper.make_opsetid("", 20), helper.make_opsetid(ops.DOMAIN, ops.VERSION)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


@needs_library
def test_as_much_memory_as_a_program_has() -> None:
    nodes = graph_of_linears(MOST_BUFFERS - 1)  # and the sum
    made = as_program(copy_of(nodes))
    (node,) = made.graph.node
    assert len(set(attributes(node)["buffers"].split())) == MOST_BUFFERS
    x = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)
    found, expected = (open_model(model).run(None, {"x": x})[0] for model in (made, nodes))
    assert same_bits(found, expected)


def test_a_graph_that_needs_more_memory_stays() -> None:
    nodes = graph_of_linears(MOST_BUFFERS + 1)
    assert as_program(copy_of(nodes)) == nodes


def test_a_graph_with_an_input_that_is_an_output_stays() -> None:
    nodes = graph_of_linears(2)
    nodes.graph.output.append(nodes.graph.input[0])
    assert as_program(copy_of(nodes)) == nodes

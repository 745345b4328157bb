"""The census counts what a graph is made of, and neither graph nor engine passes for a precision that it is not."""

from __future__ import annotations

import pytest
from onnx import TensorProto, helper, numpy_helper

from seq2engine.errors import BuildError, ExportError
from seq2engine.export.contract import GRAPHS, PRECISIONS, STORED, VOCABULARY
from seq2engine.export.precision.census import audit_precision, census_of, check_engine, stored_types
from seq2engine.export.precision.passes import PASSES, fp16_from_fp32
from seq2engine.export.precision.quantise import weights_from_graph
from seq2engine.export.to_onnx import graphs_from_model
from seq2engine.model.checkpoint import random_model


@pytest.fixture(scope="module")
def graphs():
    return graphs_from_model(random_model("tiny"))


@pytest.fixture(scope="module")
def step(graphs):
    return graphs["decoder_step"]


def folded(model, chosen):
    """The graph as a tool leaves it that folds constants: a weight restored once and for all, in fp32."""
    arrays = {name: stored.array for name, stored in weights_from_graph(model).items()}
    nodes = [n for n in model.graph.node if not (n.op_type == "DequantizeLinear" and n.output[0] in chosen)]
    for name in chosen:
        model.graph.initializer.append(numpy_helper.from_array(arrays[name].T.copy(), f"{name}/folded"))
        nodes.insert(
            0, helper.make_node("Cast", [f"{name}/folded"], [name], name=f"{name}/Cast", to=TensorProto.FLOAT16)
        )
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


# --- graphs -----------------------------------------------------------------------------------------------------------


def test_the_census_counts_what_is_there(step):
    census = census_of(step)
    assert census["nodes"] == len(step.graph.node)
    assert census["attentions"] == 4
    assert census["products"] == {"float32": 2 * 10 + 1}
    assert census["product_weights"] == {"float32": 2 * 6 + 1}  # the products of an attention have no weight
    assert census["weight_bytes"]["float32"] == sum(
        numpy_helper.to_array(w).nbytes for w in step.graph.initializer if w.data_type == TensorProto.FLOAT
    )
    assert sum(census["tensors"].values()) == sum(len(node.output) for node in step.graph.node)
    half = census_of(fp16_from_fp32(step))
    assert half["products"] == {"float16": 21}
    assert half["weight_bytes"]["float16"] * 2 == census["weight_bytes"]["float32"]
    assert "float32" not in half["weight_bytes"]
    assert half["tensors"]["float32"] == 1  # the logits


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_pass_makes_what_it_is_called(precision, step):
    model = PASSES[precision](step, ())
    audit_precision(model, precision)
    census = census_of(model)
    assert census["products"] == {PRECISIONS[precision]: 21}
    head = {"int8": 1} if precision == "int4" else {}
    assert census["product_weights"] == {STORED[precision]: 13 - len(head), **head}
    assert max(census["weight_bytes"], key=census["weight_bytes"].get) == STORED[precision]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_encoder_is_counted_as_well(precision, graphs):
    """Two layers of four products with weights, two of attention; and keys and values for two decoder layers."""
    census = census_of(PASSES[precision](graphs["encoder"], ()))
    assert census["attentions"] == 2
    assert census["products"] == {PRECISIONS[precision]: 2 * 6 + 2}
    assert census["product_weights"] == {STORED[precision]: 2 * 4 + 2}
    assert max(census["weight_bytes"], key=census["weight_bytes"].get) in (STORED[precision], VOCABULARY[precision])


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("other", PRECISIONS)
def test_no_graph_passes_for_another_precision(precision, other, graph, graphs):
    model = PASSES[other](graphs[graph], ())
    if precision == other:
        audit_precision(model, precision)
    else:
        first = f"{graph.removesuffix('_step')}.0.self_attn.qkv/MatMul"
        with pytest.raises(ExportError, match=f"graph {graph} is not {precision}: {first}"):
            audit_precision(model, precision)


def test_one_folded_weight_is_found(step):
    model = folded(PASSES["int8"](step, ()), ["decoder.1.cross_attn.q.weight"])
    assert stored_types(model)["decoder.1.cross_attn.q/MatMul"] == "float32"
    with pytest.raises(ExportError) as error:
        audit_precision(model, "int8")
    assert str(error.value) == "graph decoder_step is not int8: decoder.1.cross_attn.q/MatMul reads weights in float32"


def test_a_fallback_node_may_and_must_compute_in_fp32(step):
    fp32_nodes = {"decoder.0.feed_forward.up/MatMul"}
    model = fp16_from_fp32(step, fp32_nodes)
    audit_precision(model, "fp16", fp32_nodes)
    with pytest.raises(ExportError, match=r"up/MatMul computes in float32"):
        audit_precision(model, "fp16")
    with pytest.raises(ExportError, match=r"up/MatMul computes in float16"):
        audit_precision(fp16_from_fp32(step), "fp16", fp32_nodes)


# --- what an engine holds, by numbers ---------------------------------------------------------------------------------

GRAPH = {"weight_bytes": {"int8": 8_000_000, "float16": 120_000, "int64": 128}}


@pytest.mark.parametrize(
    "weights",
    [
        {"int8": 8_000_000, "float16": 120_000},
        {"int8": 16_000_000, "float16": 121_000, "float32": 80},  # two layouts, and constants of kernels
    ],
)
def test_an_engine_that_kept_its_types_passes(weights):
    check_engine(weights, GRAPH, "int8", "encoder.engine")


@pytest.mark.parametrize(
    "weights",
    [
        {},
        {"float16": 16_120_000},  # all restored
        {"float32": 32_000_000, "float16": 120_000},
        {"int8": 7_000_000, "float16": 2_120_000},  # an eighth of them
        {"int8": 8_000_000, "float16": 120_000, "float32": 1_000_000},
    ],
)
def test_an_engine_of_other_types_is_an_error_in_one_line(weights):
    with pytest.raises(BuildError) as error:
        check_engine(weights, GRAPH, "int8", "encoder.engine")
    message = str(error.value)
    assert message.startswith("encoder.engine was built in another precision than int8: it holds ")
    assert message.endswith(
        ", expected 8000000 bytes of int8, 120000 bytes of float16; it was not kept: build again, and if it fails "
        "again choose another --precision"
    )
    assert "\n" not in message

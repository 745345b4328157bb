"""Whole graphs in fused operators: the same numbers for pairs of all options of a model, and nothing left that fits."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, shape_inference
from support.all_pairs import all_pairs
from support.kernel_cases import FACTORS, SMALL, config_of, feeds_of_form, in_form, in_precision, is_all_ours
from support.kernel_checks import check_nodes, check_rest, fused_nodes, run_kernels
from support.rounding import tensor_error

from seq2engine.errors import ExportError
from seq2engine.export.contract import graph_specs
from seq2engine.export.graph_index import makers_of
from seq2engine.export.kernel_forms import ops
from seq2engine.export.kernel_forms.step import kernel_encoder, kernel_layers, kernel_step
from seq2engine.export.kernel_forms.vocabulary import fits
from seq2engine.export.ort_forms.int8_matmul import row_products
from seq2engine.export.ort_forms.screened_argmax import WANTED
from seq2engine.export.to_onnx import graphs_from_model
from seq2engine.model.checkpoint import random_model

CASES, _ = all_pairs(FACTORS, lambda case: True)


def constant_products(graph: onnx.GraphProto) -> int:
    """Products with a stored weight, restored and transposed or not."""
    weights = {weight.name for weight in graph.initializer}
    for node in graph.node:
        if node.op_type in ("DequantizeLinear", "Transpose") and node.input[0] in weights:
            weights.update(node.output)
    return sum(node.op_type == "MatMul" and node.input[1] in weights for node in graph.node)


def counts(model: onnx.ModelProto) -> dict[str, int]:
    kinds = [node.op_type for node in fused_nodes(model)]
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: ", ".join(case.values()))
def test_a_decoder_step_computes_the_same(case, feeds_for, run_onnx):
    config = config_of(case)
    graphs = graphs_from_model(random_model(config, 5), case["cache"])
    plain = in_form(in_precision(graphs["decoder_step"], case["precision"]), case)
    made = kernel_step(plain, screened=True)
    onnx.checker.check_model(made)
    int8 = case["precision"] != "fp32"
    before = row_products(plain) if int8 else plain

    products, layers = constant_products(plain.graph), config.decoder_layers
    fused = case["cache"] == "static" and case["positions"] in ("sinusoidal", "learned")
    expected = {
        ops.LINEAR_INT8 if int8 else ops.LINEAR: products - 1,
        ops.CROSS_ATTENTION: layers,
        ops.CANDIDATES_INT8 if int8 else ops.CANDIDATES: 1,
        ops.EMBEDDING_INT8 if int8 else ops.EMBEDDING: 1,
    } | ({ops.SELF_ATTENTION: layers} if fused else {})
    assert counts(made) == expected
    left = [node.op_type for node in made.graph.node]
    assert left.count("MatMul") == (0 if fused else 2 * layers)
    assert not {"DequantizeLinear", "MatMulIntegerToFloat"} & set(left)
    check_rest(before, made)

    spec = graph_specs(config, "fp32", case["cache"])["decoder_step"]
    beams = int(case["beams"])
    feeds = feeds_for(spec, {"B": 3, "K": beams, "S": 5, "L": 7, "M": 7 + beams}, vocab=40, positions=12)
    feeds = feeds_of_form(feeds, case)
    given = {**feeds, WANTED.name: np.array([0])}
    check_nodes(before, made, given)
    if not int8:  # of int8 rows, a number that is rounded up here and down there is no error of ours
        found = run_kernels(made, given)
        for name, array in run_onnx(plain, feeds).items():
            near = tensor_error(config, array)
            np.testing.assert_allclose(found[name], array, rtol=0, atol=near, err_msg=name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: ", ".join(case.values()))
def test_an_encoder_computes_the_same(case, feeds_for, run_onnx):
    config = config_of(case)
    graphs = graphs_from_model(random_model(config, 6), case["cache"])
    plain = in_form(in_precision(graphs["encoder"], case["precision"]), case)
    made = kernel_encoder(plain)
    onnx.checker.check_model(made)
    int8 = case["precision"] != "fp32"
    before = row_products(plain) if int8 else plain
    fused = case["positions"] in ("sinusoidal", "learned")
    assert counts(made) == {
        ops.LINEAR_INT8 if int8 else ops.LINEAR: constant_products(plain.graph),
        ops.EMBEDDING_INT8 if int8 else ops.EMBEDDING: 1,
        ops.SOURCE_HEADS: config.decoder_layers,
    } | ({ops.ENCODER_ATTENTION: config.encoder_layers} if fused else {})
    left = [node.op_type for node in made.graph.node]
    others = {node.op_type for node in made.graph.node if not node.domain}
    if fused:  # with positions of another kind, rotations and biases of distances are looked up, and heads are cut
        assert not {"Shape", "Squeeze", "Range", "Unsqueeze", "Gather", "Reshape", "Transpose"} & others
        assert "Split" not in others or config.gated
    assert not others or not is_all_ours(case)
    assert left.count("MatMul") == (0 if fused else 2 * config.encoder_layers)
    check_rest(before, made)
    assert made.graph.output == plain.graph.output
    feeds = feeds_for(graph_specs(config)["encoder"], {"B": 3, "S": 6}, vocab=40)
    check_nodes(before, made, feeds)
    if not int8:
        found = run_kernels(made, feeds)
        for name, array in run_onnx(plain, feeds).items():
            near = tensor_error(config, array)
            np.testing.assert_allclose(found[name], array, rtol=0, atol=near, err_msg=name)


@pytest.fixture(scope="module")
def steps():
    """Decoder steps of the small model, by precision."""
    graph = graphs_from_model(random_model(SMALL, 1))["decoder_step"]
    return {precision: in_precision(graph, precision) for precision in FACTORS["precision"]}


def test_weights_need_not_be_loaded(bundles):
    path = bundles().graph_path("fp32", "decoder_step")
    loaded, stored = (onnx.load(path, load_external_data=load) for load in (True, False))
    assert any(weight.external_data for weight in stored.graph.initializer)
    made, without = (kernel_step(model, screened=True) for model in (loaded, stored))
    assert list(made.graph.node) == list(without.graph.node)
    kept = {weight.name: weight for weight in stored.graph.initializer}
    assert all(weight == kept[weight.name] for weight in without.graph.initializer)


@pytest.mark.parametrize("precision", FACTORS["precision"])
def test_the_given_graph_is_not_changed(steps, precision):
    before = steps[precision].SerializeToString(deterministic=True)
    kernel_step(steps[precision], screened=True)
    assert steps[precision].SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("precision", FACTORS["precision"])
def test_only_domains_of_nodes_are_imported(steps, precision):
    plain = shape_inference.infer_shapes(steps[precision])
    assert plain.graph.value_info
    made = kernel_step(plain, screened=True)
    assert [opset.domain for opset in made.opset_import] == ["", ops.DOMAIN]
    assert not made.graph.value_info, "of tensors that are gone"


def test_a_step_that_drafts_has_quantised_products(steps):
    def marks(model):
        return {
            attribute.i for node in fused_nodes(model) for attribute in node.attribute if attribute.name == "quantised"
        }

    assert marks(kernel_step(steps["fp32"], screened=True)) == {0}
    made = kernel_layers(steps["fp32"])
    assert marks(made) == {1}
    assert makers_of(made.graph.node)["logits"].domain == "", "the projection is the draft's own"


@pytest.mark.parametrize("precision", ["fp32", "w8a8"])
def test_logits_that_are_no_product_are_refused(steps, precision):
    plain = onnx.ModelProto()
    plain.CopyFrom(steps[precision])
    last = next(node for node in plain.graph.node if "logits" in node.output)
    last.output[0] = "scores"
    plain.graph.node.append(helper.make_node("Tanh", ["scores"], ["logits"], name="capped"))
    assert fits(steps[precision])
    assert not fits(plain)
    with pytest.raises(ExportError, match="no logits that are a product with a stored table"):
        kernel_step(plain, screened=True)

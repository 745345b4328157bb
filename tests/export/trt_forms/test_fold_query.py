"""The query of cross-attention, folded into the products before it, is the query that the portable graph makes."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from seq2engine.export.contract import graph_specs
from seq2engine.export.precision.passes import PASSES
from seq2engine.export.to_onnx import graphs_from_model
from seq2engine.export.trt_forms import fold_query as trt_fold
from seq2engine.export.trt_forms.fold_query import fold_queries, query_paths
from seq2engine.export.trt_forms.step import heads_of
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS

TINY = PRESETS["tiny"]
PARTS = (
    "self_attn.qkv.weight",
    "self_attn.qkv.bias",
    "self_attn.out.weight",
    "cross_attn.q.weight",
    "cross_attn.q.bias",
)
SIZES = {"B": 3, "K": 2, "S": 5, "L": 12, "M": 14}


def uneven_model(config, seed=3):
    """Norms whose gains and biases matter, and rows with a mean, as trained models have: fresh ones are 1 and 0."""
    model = random_model(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter += 0.5 * torch.randn(parameter.shape, generator=generator) + 0.3
    return model


def step_of(model, cache_form="static", precision="fp32"):
    return PASSES[precision](graphs_from_model(model, cache_form)["decoder_step"])


def folded(step, folder=""):
    form = onnx.ModelProto()
    form.CopyFrom(step)
    assert fold_queries(form, heads_of(step), folder)
    onnx.checker.check_model(form, full_check=True)
    return form


@pytest.mark.each_value
@pytest.mark.parametrize("positions", ["sinusoidal", "rotary"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("cache_form", ["static", "growing"])
def test_the_folded_step_computes_what_pytorch_computes(
    positions, precision, cache_form, feeds_for, run_onnx, check_close
):
    model = uneven_model(dataclasses.replace(TINY, positions=positions))
    spec = graph_specs(model.config, precision, cache_form)["decoder_step"]
    feeds = feeds_for(spec, SIZES)
    check_close(
        run_onnx(folded(step_of(model, cache_form, precision)), feeds), model, spec, feeds, cache_form, precision
    )


def test_it_errs_no_more_than_the_portable_graph(feeds_for, run_onnx, run_torch):
    """Centring is moved into the weights: were it left out, a mean in the rows would cost digits."""
    model = uneven_model(TINY)
    with torch.no_grad():
        model.decoder[0].self_attn.out.bias += 30
    step, spec = step_of(model), graph_specs(TINY)["decoder_step"]
    feeds = feeds_for(spec, SIZES)
    exact = run_torch(model, spec, feeds, dtype=torch.float64)["logits"]
    portable, fold = (np.abs(run_onnx(form, feeds)["logits"] - exact).max() for form in (step, folded(step)))
    assert fold <= 4 * portable


def test_products_of_the_query_are_gone_and_others_wider():
    step = step_of(uneven_model(TINY))
    form = folded(step)
    weights = {weight.name: list(weight.dims) for weight in form.graph.initializer}
    d = TINY.d_model
    for layer in range(TINY.decoder_layers):
        assert weights[f"trt/decoder.{layer}/qkv_and_q"] == [d, 4 * d]
        assert weights[f"trt/decoder.{layer}/out_and_q"] == [d, 2 * d]
        assert not {f"decoder.{layer}.{part}" for part in PARTS} & set(weights)
    products = [sum(node.op_type == "MatMul" for node in model.graph.node) for model in (step, form)]
    assert products[0] - products[1] == TINY.decoder_layers
    assert [value.name for value in form.graph.input] == [value.name for value in step.graph.input]


def test_weights_beside_the_graph_are_read_from_there(tmp_path, feeds_for, run_onnx):
    step = step_of(uneven_model(TINY))
    onnx.save_model(step, tmp_path / "step.onnx", save_as_external_data=True, location="step.data", size_threshold=64)
    beside = onnx.load(tmp_path / "step.onnx", load_external_data=False)
    whole = folded(onnx.load(tmp_path / "step.onnx"))
    form = onnx.ModelProto()
    form.CopyFrom(beside)
    assert fold_queries(form, heads_of(beside), tmp_path)
    made = {weight.name: weight for weight in form.graph.initializer if weight.name.startswith("trt/")}
    assert len(made) > 10
    for weight in whole.graph.initializer:
        if weight.name in made:
            np.testing.assert_array_equal(numpy_helper.to_array(made[weight.name]), numpy_helper.to_array(weight))


def unfoldable(step):
    form = onnx.ModelProto()
    form.CopyFrom(step)
    before = form.SerializeToString(deterministic=True)
    assert not fold_queries(form, heads_of(step), "")
    assert form.SerializeToString(deterministic=True) == before


def test_a_pre_norm_layer_is_left_alone():
    unfoldable(step_of(random_model(dataclasses.replace(TINY, norm="pre"))))


def test_a_wide_model_is_left_alone(monkeypatch):
    monkeypatch.setattr(trt_fold, "WIDEST", TINY.d_model - 1)
    unfoldable(step_of(random_model(TINY)))


@pytest.mark.parametrize("part", ["self_attn.qkv", "self_attn.out", "cross_attn.q"])
def test_a_weight_that_is_made_in_the_graph_is_left_alone(part):
    """As a quantised weight is: only the other layer is folded."""
    step = step_of(random_model(TINY))
    node = next(node for node in step.graph.node if node.name == f"decoder.0.{part}/MatMul")
    made = onnx.helper.make_node("Identity", [node.input[1]], ["made"], name="made")
    node.input[1] = "made"
    step.graph.node.insert(0, made)
    weights = {weight.name for weight in step.graph.initializer}
    assert [path.layer for path in query_paths(step.graph, weights)] == ["decoder.1"]
    folded(step)

"""The form TensorRT fuses best computes what the portable graph computes."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest
import torch

from seq2engine.export.contract import graph_specs
from seq2engine.export.graph_index import find_attentions
from seq2engine.export.precision.passes import PASSES
from seq2engine.export.to_onnx import graphs_from_model
from seq2engine.export.trt_forms.step import frozen_axes, heads_of, step_for_tensorrt
from seq2engine.model.checkpoint import random_model
from seq2engine.model.config import ModelConfig
from seq2engine.model.presets import PRESETS

TINY = PRESETS["tiny"]
ROTARY = ModelConfig(
    encoder_layers=1,
    decoder_layers=3,
    heads=2,
    d_model=48,
    d_ff=64,
    source_vocab=256,
    target_vocab=256,
    norm="pre",
    positions="rotary",
    max_source=64,
    max_target=64,
)
T5 = dataclasses.replace(
    ROTARY,
    positions="relative",
    max_distance=9,
    norm_kind="rms",
    biases=False,
    scale_attention=False,
    scale_embeddings=False,
    scale_output=True,
)
UMT5 = dataclasses.replace(T5, distances_per_layer=True, gated=True, activation="gelu_tanh", d_kv=8)  # small heads too
MODELS = {
    "tiny": random_model(TINY),
    "rotary, three layers": random_model(ROTARY),
    "t5": random_model(T5),
    "umt5": random_model(UMT5),
}
SLOTS = 12


@pytest.fixture(scope="module")
def portable():
    """(model, cache form, precision) -> the decoder step as it is exported."""
    made = {}

    def step(name, cache_form, precision="fp32"):
        if (name, cache_form) not in made:
            made[name, cache_form] = graphs_from_model(MODELS[name], cache_form)["decoder_step"]
        return PASSES[precision](made[name, cache_form])

    return step


def ops(model):
    return [node.op_type for node in model.graph.node]


def axes(model):
    return {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*model.graph.input, *model.graph.output)
    }


@pytest.mark.each_value
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cache_form", ["static", "growing"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("beams", [1, 4])
def test_the_rewritten_step_computes_what_pytorch_computes(
    name, cache_form, precision, beams, portable, feeds_for, run_onnx, check_close
):
    model, step = MODELS[name], portable(name, cache_form, precision)
    spec = graph_specs(model.config, precision, cache_form)["decoder_step"]
    form = step_for_tensorrt(step, cache_form, beams, SLOTS)
    onnx.checker.check_model(form, full_check=True)  # that nodes come in an order that can be run, too
    for batch, source in ((1, 1), (3, 5)):
        sizes = {"B": batch, "K": beams, "S": source, "L": SLOTS, "M": SLOTS + beams}
        feeds = feeds_for(spec, sizes, seed=batch)
        check_close(run_onnx(form, feeds), model, spec, feeds, cache_form, precision)


@pytest.mark.parametrize("cache_form", ["static", "growing"])
@pytest.mark.parametrize("beams", [1, 4])
def test_both_forms_agree_with_each_other(cache_form, beams, portable, feeds_for, run_onnx, run_torch):
    """Within what PyTorch in fp32 errs: neither may be further from the other than both may be from the truth."""
    step, spec = portable("tiny", cache_form), graph_specs(TINY, "fp32", cache_form)["decoder_step"]
    feeds = feeds_for(spec, {"B": 4, "K": beams, "S": 9, "L": SLOTS, "M": SLOTS + beams}, seed=7)
    first, second = run_onnx(step, feeds), run_onnx(step_for_tensorrt(step, cache_form, beams, SLOTS), feeds)
    fp32 = run_torch(MODELS["tiny"], spec, feeds, cache_form)
    fp64 = run_torch(MODELS["tiny"], spec, feeds, cache_form, dtype=torch.float64)
    for name in first:
        assert np.abs(first[name] - second[name]).max() <= 16 * np.abs(fp32[name] - fp64[name]).max()


@pytest.mark.parametrize("beams", [2, 4])
def test_beams_do_not_see_each_others_slots(beams, portable, feeds_for, run_onnx):
    """Beams become heads: were the fold in another order, a beam would use another's mask."""
    spec = graph_specs(TINY)["decoder_step"]
    form = step_for_tensorrt(portable("tiny", "static"), "static", beams, SLOTS)
    feeds = feeds_for(spec, {"B": 2, "K": beams, "S": 5, "L": SLOTS})
    feeds["write_index"][:] = SLOTS - beams
    feeds["self_mask"][:] = False
    own = np.arange(beams)
    feeds["self_mask"][:, own, SLOTS - beams + own] = True  # every beam sees itself,
    feeds["self_mask"][:, own, own] = True  # and one ancestor that is no other beam's
    before = run_onnx(form, feeds)["logits"]
    for part in "kv":
        for layer in range(TINY.decoder_layers):
            feeds[f"self_{part}.{layer}"][:, :, 0] += 1
    after = run_onnx(form, feeds)["logits"]
    assert not np.array_equal(after[:, 0], before[:, 0])
    np.testing.assert_array_equal(after[:, 1:], before[:, 1:])


@pytest.mark.parametrize("cache_form", ["static", "growing"])
def test_every_attention_is_found_with_its_parts(cache_form, portable):
    step = portable("tiny", cache_form)
    found = find_attentions(step)
    assert len(found) == 2 * TINY.decoder_layers
    assert [attention.is_self for attention in found] == [True, False, True, False]
    assert len({index for attention in found for index in attention.nodes}) == 6 * len(found)  # none shared
    for layer, (self_attention, cross_attention) in enumerate(zip(found[::2], found[1::2], strict=True)):
        assert (self_attention.k, self_attention.v) == (f"new_self_k.{layer}", f"new_self_v.{layer}")
        assert (cross_attention.k, cross_attention.v) == (f"cross_k.{layer}", f"cross_v.{layer}")
        assert self_attention.output.startswith(f"decoder.{layer}.self_attn/")
        assert self_attention.scale == cross_attention.scale == TINY.head_dim**-0.5
    assert len({attention.mask for attention in found}) == 2  # one for all self-attentions, one for all others


def test_an_attention_that_is_not_ours_is_refused(portable, copy_of):
    step = copy_of(portable("tiny", "static"))
    node = next(node for node in step.graph.node if node.op_type == "Where")
    node.op_type = "Add"
    with pytest.raises(AssertionError, match="not an attention of ours"):
        find_attentions(step)


@pytest.mark.parametrize(
    ("cache_form", "beams", "rewritten"),
    [
        ("static", 1, 2),  # cross-attention only
        ("growing", 1, 2),
        ("static", 4, 4),
        ("growing", 4, 4),
        ("static", None, 0),
        ("growing", None, 0),
    ],
)
def test_attentions_are_rewritten_where_it_helps(cache_form, beams, rewritten, portable):
    step = portable("tiny", cache_form)
    before = step.SerializeToString(deterministic=True)
    form = step_for_tensorrt(step, cache_form, beams, SLOTS)
    assert ops(form).count("Attention") == rewritten
    assert ops(form).count("Softmax") == 2 * TINY.decoder_layers - rewritten
    assert step.SerializeToString(deterministic=True) == before  # the portable graph stays what it was
    assert form.opset_import[0].version >= (23 if rewritten else 20)
    # One mask serves all layers: it is widened once.
    assert ops(form).count("Expand") == (1 if beams == 4 else 0)


@pytest.mark.parametrize(("cache_form", "beams"), [("static", None), ("growing", 4)])
def test_fp16_beams_read_packed_keys_and_values(cache_form, beams, portable):
    """One pack for all of the source's keys and values and one for each layer's cache; attentions read nothing else."""
    before = portable("rotary, three layers", cache_form, "fp16")
    form = step_for_tensorrt(before, cache_form, beams, slots=32)
    packs = [node for node in form.graph.node if node.name.endswith("/Concat") and node.name.startswith("trt/")]
    layers = len(find_attentions(before)) // 2
    assert [len(node.input) for node in packs] == [2 * layers] + [2] * layers
    assert len(form.graph.node) == len(before.graph.node) + 2 * len(packs)
    for attention in find_attentions(form):
        assert attention.k.endswith("/packed")
        assert attention.v.endswith("/packed")
    onnx.checker.check_model(form, full_check=True)


def test_fp16_beams_that_write_late_pack_the_source_only(portable):
    form = step_for_tensorrt(portable("rotary, three layers", "static", "fp16"), "static", 4, slots=32)
    for layer, (own, cross) in enumerate(zip(find_attentions(form)[::2], find_attentions(form)[1::2], strict=True)):
        assert (own.k, own.v) == (f"trt/new_self_k.{layer}", f"trt/new_self_v.{layer}")
        assert (cross.k, cross.v) == (f"cross_k.{layer}/packed", f"cross_v.{layer}/packed")


@pytest.mark.parametrize("cache_form", ["static", "growing"])
def test_dynamic_beams_in_fp32_leave_a_pre_norm_graph_alone(cache_form, portable):
    step = portable("rotary, three layers", cache_form)
    form = step_for_tensorrt(step, cache_form, None, SLOTS)
    assert form.graph.node == step.graph.node
    assert form.opset_import == step.opset_import
    assert axes(form)["tokens"] == ["B", "K"]


def test_only_what_a_build_fixes_is_fixed(portable):
    static = axes(step_for_tensorrt(portable("tiny", "static"), "static", 4, SLOTS))
    assert static["self_k.0"] == static["new_self_k.0"] == ["B", 4, SLOTS, 16]
    assert static["self_mask"] == ["B", 4, SLOTS]
    assert static["logits"] == ["B", 4, 256]
    assert static["cross_k.0"] == ["B", 4, "S", 16]
    growing = axes(step_for_tensorrt(portable("tiny", "growing"), "growing", 1, SLOTS))
    assert growing["self_k.0"] == ["B", 4, "L", 16]
    assert growing["self_mask"] == ["B", 1, "M"]


def test_axes_are_frozen_by_letter(portable, copy_of):
    step = copy_of(portable("tiny", "static"))
    frozen_axes(step, {"B": 7, "X": 9})
    assert {shape[0] for shape in axes(step).values()} == {7}
    assert axes(step)["tokens"] == [7, "K"]


def test_heads_are_read_from_the_cache(portable):
    assert heads_of(portable("tiny", "static")) == (4, 16)
    assert heads_of(portable("rotary, three layers", "growing")) == (2, 24)


def test_beams_over_a_fully_masked_source_stay_finite(portable, feeds_for, run_onnx):
    feeds = feeds_for(graph_specs(TINY)["decoder_step"], {"B": 2, "K": 4, "S": 5, "L": SLOTS})
    feeds["source_mask"][1] = False
    outputs = run_onnx(step_for_tensorrt(portable("tiny", "static"), "static", 4, SLOTS), feeds)
    assert all(np.isfinite(array).all() for array in outputs.values())

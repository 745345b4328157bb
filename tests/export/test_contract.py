"""The contract, written out once by hand: every name, type and axis of both graphs in both cache forms."""

from __future__ import annotations

import dataclasses

import pytest

from seq2engine.errors import ConfigError
from seq2engine.export.contract import OPSET, PRECISIONS, STORED, VOCABULARY, TensorSpec, graph_specs
from seq2engine.model.config import ModelConfig

# Every size differs from every other, so that no two axes can be mixed up unseen.
CONFIG = ModelConfig(
    encoder_layers=3,
    decoder_layers=2,
    heads=4,
    d_model=24,
    d_ff=40,
    source_vocab=90,
    target_vocab=70,
    share_embeddings=False,
)


def written(tensors):
    return [str(tensor) for tensor in tensors]


ENCODER_INPUTS = ["source_ids int64 [B, S]", "source_mask bool [B, S]"]
ENCODER_OUTPUTS = [
    "cross_k.0 {real} [B, 4, S, 6]",
    "cross_v.0 {real} [B, 4, S, 6]",
    "cross_k.1 {real} [B, 4, S, 6]",
    "cross_v.1 {real} [B, 4, S, 6]",
    "encoder_states {real} [B, S, 24]",
]
STEP_INPUTS = {
    "static": ["tokens int64 [B, K]", "position int64 [B]", "write_index int64 [B]", "self_mask bool [B, K, L]"],
    "growing": ["tokens int64 [B, K]", "position int64 [B]", "self_mask bool [B, K, M]"],
}
STEP_STATE = [
    "source_mask bool [B, S]",
    *ENCODER_OUTPUTS[:4],
    "self_k.0 {real} [B, 4, L, 6]",
    "self_v.0 {real} [B, 4, L, 6]",
    "self_k.1 {real} [B, 4, L, 6]",
    "self_v.1 {real} [B, 4, L, 6]",
]
STEP_CACHE = [f"new_self_{part}.{i} {{real}} [B, 4, {{attended}}, 6]" for i in range(2) for part in "kv"]


@pytest.mark.parametrize("cache_form", ["static", "growing"])
@pytest.mark.parametrize(("precision", "real"), [("fp32", "float32"), ("fp16", "float16")])
def test_both_graphs_are_as_written_down_here(precision, real, cache_form):
    specs = graph_specs(CONFIG, precision, cache_form)
    attended = {"static": "L", "growing": "M"}[cache_form]

    def expected(lines):
        return [line.format(real=real, attended=attended) for line in lines]

    assert list(specs) == ["encoder", "decoder_step"]
    assert written(specs["encoder"].inputs) == ENCODER_INPUTS
    assert written(specs["encoder"].outputs) == expected(ENCODER_OUTPUTS)
    assert written(specs["decoder_step"].inputs) == expected([*STEP_INPUTS[cache_form], *STEP_STATE])
    # The logits leave in fp32 whatever the graph computes in.
    assert written(specs["decoder_step"].outputs) == ["logits float32 [B, K, 70]", *expected(STEP_CACHE)]


def test_fp32_and_the_static_cache_are_the_default():
    assert graph_specs(CONFIG) == graph_specs(CONFIG, "fp32", "static")


def test_a_shape_follows_from_the_sizes_of_its_letters():
    tensor = TensorSpec("self_k.0", "float16", ("B", 8, "L", 64))
    assert tensor.shape({"B": 3, "L": 0, "S": 5}) == (3, 8, 0, 64)


def test_tensors_are_found_by_name():
    step = graph_specs(CONFIG)["decoder_step"]
    assert step.input("self_v.1") is step.inputs[-1]
    assert step.output("logits") is step.outputs[0]


def test_the_number_of_layers_is_the_decoders():
    deep = dataclasses.replace(CONFIG, encoder_layers=1, decoder_layers=11)
    names = [tensor.name for tensor in graph_specs(deep)["encoder"].outputs]
    assert len(names) == 2 * 11 + 1
    assert names[20:22] == ["cross_k.10", "cross_v.10"]


def test_every_unknown_choice_is_named_at_once():
    with pytest.raises(ConfigError) as error:
        graph_specs(CONFIG, "fp6", "paged")
    assert str(error.value) == (
        "unknown precision 'fp6', expected one of fp32, fp16, bf16, int8, int4, fp8, w8a8; "
        "unknown cache form 'paged', expected one of static, growing"
    )


def test_the_tables_of_choices_agree_with_each_other():
    assert set(PRECISIONS) == set(STORED) == set(VOCABULARY) == {"fp32", "fp16", "bf16", "int8", "int4", "fp8", "w8a8"}
    assert OPSET == {"static": 24, "growing": 20}  # a higher one locks out runtimes for nothing

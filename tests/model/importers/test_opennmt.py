"""OpenNMT-py 3 checkpoints, written here under its names from an nn.Transformer, compute the same."""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.nn_reference import Reference, assert_same_model, lively_reference, refusal_of
from torch import Tensor

from seq2engine.model.importers import opennmt
from seq2engine.model.importers.opennmt import checkpoint_from_opennmt

LENGTH = 12
VOCAB = 30
TABLE = "embeddings.make_embedding.emb_luts.0.weight"
TOKENS = ["<unk>", "<blank>", "<s>", "</s>", *(f"word{i}" for i in range(VOCAB - 4))]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are cut at a length that decodes in no time."""
    monkeypatch.setattr(opennmt, "LONGEST", LENGTH)


def interleaved(rows: int, width: int) -> Tensor:
    """The formula of OpenNMT-py's PositionalEncoding."""
    table = torch.zeros(rows, width)
    rates = torch.exp(torch.arange(0, width, 2, dtype=torch.float) * -(math.log(10000.0) / width))
    table[:, 0::2] = torch.sin(torch.arange(rows).unsqueeze(1).float() * rates)
    table[:, 1::2] = torch.cos(torch.arange(rows).unsqueeze(1).float() * rates)
    return table


def opennmt_weights(reference: Reference) -> dict[str, Tensor]:
    """A state dict with the names of OpenNMT-py; biases that are all zero are left out."""
    state = reference.state_dict()
    stacks = {"encoder": "encoder.transformer", "decoder": "decoder.transformer_layers"}
    norms = {
        "encoder": {"norm1": "layer_norm", "norm2": "feed_forward.layer_norm"},
        "decoder": {"norm1": "layer_norm_1", "norm2": "layer_norm_2", "norm3": "feed_forward.layer_norm"},
    }
    parts = {"linear1": "feed_forward.w_1", "linear2": "feed_forward.w_2"}
    attentions = {"self_attn": "self_attn", "multihead_attn": "context_attn"}
    weights = {}
    for name, tensor in state.items():
        if not name.startswith("transformer."):
            continue
        side, *rest = name.removeprefix("transformer.").split(".")
        if rest[0] == "norm":
            weights[f"{side}.layer_norm.{rest[1]}"] = tensor
            continue
        _, i, part, *leaf = rest
        layer = f"{stacks[side]}.{i}"
        if leaf[0].startswith("in_proj_"):
            for word, rows in zip(("query", "keys", "values"), tensor.chunk(3), strict=True):
                kind = leaf[0].removeprefix("in_proj_")
                weights[f"{layer}.{attentions[part]}.linear_{word}.{kind}"] = rows.clone()
        elif leaf[0] == "out_proj":
            weights[f"{layer}.{attentions[part]}.final_linear.{leaf[1]}"] = tensor
        else:
            weights[f"{layer}.{norms[side].get(part) or parts[part]}.{leaf[0]}"] = tensor
    for side, table in (("encoder", "source"), ("decoder", "target")):
        weights[f"{side}.{TABLE}"] = state[f"{table}.weight"]
        weights[f"{side}.embeddings.make_embedding.pe.pe"] = interleaved(50, 16).unsqueeze(1)
    return {name: tensor for name, tensor in weights.items() if tensor.any()}


def opennmt_options(**changes: Any) -> dict[str, Any]:
    options = {"encoder_type": "transformer", "decoder_type": "transformer", "model_task": "seq2seq", "heads": 4}
    options |= {"enc_layers": 2, "dec_layers": 2, "transformer_ff": 24, "hidden_size": 16, "position_encoding": True}
    options |= {"add_qkvbias": True, "add_ffnbias": True, "max_relative_positions": 0, "layer_norm": "standard"}
    options |= {"self_attn_type": "scaled-dot", "pos_ffn_activation_fn": "relu", "generator_function": "softmax"}
    options |= {"share_embeddings": False, "share_decoder_embeddings": False, "norm_eps": 1e-6, "num_kv": 0}
    return options | changes


def write(path: Path, reference: Reference, vocab: dict[str, Any] | None = None, **changes: Any) -> Path:
    content = {
        "model": opennmt_weights(reference),
        "generator": {
            name.removeprefix("output."): t for name, t in reference.state_dict().items() if "output." in name
        },
        "vocab": {"src": TOKENS, "tgt": TOKENS, "data_task": "seq2seq", **(vocab or {})},
        "opt": argparse.Namespace(**opennmt_options(**changes)),
        "optim": {"training_step": 1},
    }
    torch.save(content, path)
    return path


def reference_of(lively: bool = False, **options: Any) -> Reference:
    options = {"norm_first": True, "final_norms": True, "epsilon": 1e-6, "output_bias": True} | options
    positions = (interleaved(LENGTH, 16),) * 2
    if lively:
        return lively_reference(2, 3, LENGTH, positions=positions, **options)
    return Reference(positions=positions, **options)


def without(reference: Reference, *kinds: str) -> Reference:
    """Zero biases, which the writer leaves out."""
    for name, parameter in reference.transformer.named_parameters():
        if "bias" in name and any(kind in name for kind in kinds):
            parameter.data.zero_()
    return reference


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return write(tmp_path / "model.pt", reference_of())


def damaged(path: Path, **changes: Any) -> Path:
    content = torch.load(path, weights_only=False)
    vars(content["opt"]).update(changes.pop("opt", {}))
    for name in changes.pop("without", ()):
        del content["model"][name]
    for entry, values in changes.items():
        content[entry].update(values)
    torch.save(content, path)
    return path


error_of = partial(refusal_of, checkpoint_from_opennmt)


# The same model


def test_a_model_with_all_its_biases(tmp_path: Path) -> None:
    reference = reference_of(lively=True)
    write(tmp_path / "model.pt", reference)
    imported = checkpoint_from_opennmt(tmp_path)  # the only .pt file in it
    config = imported.model.config
    assert (config.norm, config.norm_epsilon, config.max_source, config.output_bias) == ("pre", 1e-6, LENGTH, True)
    assert (config.pad_id, config.start_id, config.end_id) == (1, 2, 3)
    assert (imported.kind, imported.generation) == ("OpenNMT-py", {})
    assert_same_model(reference, imported.model, tmp_path / "bundle")


def test_a_model_without_biases_of_attention_and_with_shared_tables(tmp_path: Path) -> None:
    reference = without(reference_of(activation="gelu", share=True, tie=True, seed=2), "in_proj", "out_proj")
    changes = {"share_embeddings": True, "share_decoder_embeddings": True, "pos_ffn_activation_fn": "gelu"}
    path = write(tmp_path / "model.pt", reference, add_qkvbias=False, **changes)
    imported = checkpoint_from_opennmt(path)
    config = imported.model.config
    assert (config.share_embeddings, config.tie_output, config.activation) == (True, True, "gelu")
    assert not imported.model.decoder[0].cross_attn.kv.bias.any()
    assert imported.model.decoder[0].feed_forward.up.bias.any()
    assert_same_model(reference, imported.model, tmp_path / "bundle")


def test_a_model_without_biases_of_the_feed_forward(tmp_path: Path) -> None:
    path = write(tmp_path / "model.pt", without(reference_of(), "linear"), add_ffnbias=False)
    assert not checkpoint_from_opennmt(path).model.encoder[1].feed_forward.down.bias.any()


def test_a_start_token_of_its_own(tmp_path: Path) -> None:
    path = write(tmp_path / "model.pt", reference_of(), vocab={"decoder_start_token": "</s>"})
    assert checkpoint_from_opennmt(path).model.config.start_id == 3


def test_a_longer_table_than_anybody_decodes_is_cut(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkpoint_from_opennmt(saved).notes[1] == "sources and outputs of up to 12 tokens"
    monkeypatch.setattr(opennmt, "LONGEST", 1024)
    assert checkpoint_from_opennmt(saved).model.config.max_target == 50  # all that the file has


# What cannot be imported


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("max_relative_positions", 20, "0"),
        ("max_relative_positions", -1, "0"),
        ("layer_norm", "rms", "standard"),
        ("parallel_residual", True, "False"),
        ("multiquery", True, "False"),
        ("num_kv", 1, "0"),
        ("pos_ffn_activation_fn", "gated-gelu", "relu or gelu"),
        ("pos_ffn_activation_fn", "silu", "relu or gelu"),
        ("self_attn_type", "average", "scaled-dot or scaled-dot-flash"),
        ("position_encoding", False, "True"),
        ("copy_attn", True, "False"),
        ("decoder_type", "transformer_lm", "transformer"),
    ],
)
def test_options_that_cannot_be_kept_are_named(saved: Path, option: str, value: Any, expected: str) -> None:
    message = error_of(damaged(saved, opt={option: value}))
    assert message == f"{saved} cannot be imported: it has {option} {value}, expected {expected}"


def test_source_features_and_other_vocabularies(saved: Path) -> None:
    assert "source features (src_feats)" in error_of(damaged(saved, vocab={"src_feats": [["a"]]}))
    assert "a vocab of another version" in error_of(damaged(saved, vocab={"src": {"itos": []}}))


def test_a_vocabulary_of_another_model(saved: Path) -> None:
    message = error_of(damaged(saved, vocab={"tgt": TOKENS[:-1]}))
    assert message == f"{saved}: tgt has 29 tokens, but decoder.{TABLE} has 30 rows"


def test_special_tokens_that_are_missing_or_elsewhere(saved: Path) -> None:
    other = ["<blank>", "<unk>", *TOKENS[2:]]
    assert "<blank> is token 1 of tgt but not of src" in error_of(damaged(saved, vocab={"src": other}))
    renamed = ["x", "y", "z", *TOKENS[3:]]
    assert error_of(damaged(saved, vocab={"tgt": renamed})).endswith("the tgt vocabulary has no <blank>, <s>")


def test_leftover_and_missing_weights_are_listed(saved: Path) -> None:
    missing = "decoder.transformer_layers.1.context_attn.linear_keys.weight"
    damaged(saved, model={"encoder.transformer.0.self_attn.lora_A": torch.zeros(2)}, without=[missing])
    assert error_of(saved).endswith(f": missing {missing}; not understood encoder.transformer.0.self_attn.lora_A")


def test_one_bias_that_is_missing_is_a_gap(saved: Path) -> None:
    missing = "encoder.transformer.1.self_attn.linear_keys.bias"
    assert error_of(damaged(saved, without=[missing])).endswith(f": missing {missing}")


def test_biases_must_match_the_options(saved: Path) -> None:
    bias = "encoder.transformer.0.self_attn.linear_query.bias"
    message = error_of(damaged(saved, opt={"add_qkvbias": False}))
    assert message == f"{saved}: add_qkvbias is False, but there is a {bias}"


def test_tables_that_are_one_by_the_options_only(saved: Path) -> None:
    assert "share_embeddings claims that encoder." in error_of(damaged(saved, opt={"share_embeddings": True}))


def test_no_positions(saved: Path) -> None:
    name = "decoder.embeddings.make_embedding.pe.pe"
    assert f"has no {name}" in error_of(damaged(saved, without=[name]))


def test_heads_that_do_not_divide_the_width(saved: Path) -> None:
    assert error_of(damaged(saved, opt={"heads": 3})) == f"{saved}: d_model 16 is not divisible by heads 3"


def test_a_file_of_something_else(tmp_path: Path) -> None:
    torch.save({"weights": torch.zeros(2)}, tmp_path / "x.pt")
    message = error_of(tmp_path / "x.pt")
    assert message == f"{tmp_path}/x.pt has no 'model', so it is not a checkpoint of OpenNMT-py; it holds: weights"

"""State dicts around torch.nn.Transformer, with a seq2engine.json that describes them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.nn_reference import Reference, assert_same_model, lively_reference, refusal_of

from seq2engine.model.importers import torch_transformer
from seq2engine.model.importers.torch_transformer import checkpoint_from_torch
from seq2engine.model.layers import sinusoids

LENGTH = 12


def about(**changes: Any) -> dict[str, Any]:
    fields = {"weights": "model.pt", "state_dict": None, "transformer": "transformer.", "heads": 4}
    fields |= {"activation": "relu", "norm_first": False, "norm_epsilon": 1e-5, "final_norms": False, "bias": True}
    fields |= {"source_embedding": "source.weight", "target_embedding": "target.weight"}
    fields |= {"output_weight": "output.weight", "output_bias": None, "scale_embeddings": True}
    fields |= {"positions": "learned", "source_positions": "source_positions", "target_positions": "target_positions"}
    fields |= {"max_source": LENGTH, "max_target": LENGTH, "pad_id": 0, "start_id": 1, "end_id": 2, "ignored": []}
    return fields | changes


def write(folder: Path, reference: Reference, **changes: Any) -> Path:
    folder.mkdir()
    fields = about(**changes)
    weights = reference.state_dict()
    if fields["weights"].endswith(".safetensors"):
        save_file({name: tensor.clone() for name, tensor in weights.items()}, folder / fields["weights"])
    else:
        inside = fields["state_dict"]
        torch.save({"epoch": 3, inside: weights} if inside else weights, folder / fields["weights"])
    (folder / "seq2engine.json").write_text(json.dumps(fields))
    return folder


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return write(tmp_path / "saved", Reference())


def changed(folder: Path, **changes: Any) -> Path:
    (folder / "seq2engine.json").write_text(json.dumps(about(**changes)))
    return folder


error_of = partial(refusal_of, checkpoint_from_torch)


# The same model


def test_post_norm_with_final_norms_as_torch_makes_it(tmp_path: Path) -> None:
    reference = lively_reference(
        1, 2, LENGTH, seed=10, vocab=(30, 26), layers=(1, 3), final_norms=True, output_bias=True
    )
    folder = write(tmp_path / "saved", reference, final_norms=True, output_bias="output.bias")
    imported = checkpoint_from_torch(folder)
    config = imported.model.config
    assert (config.encoder_layers, config.decoder_layers, config.d_ff) == (1, 3, 24)
    assert (config.source_vocab, config.target_vocab, config.final_norm) == (30, 26, True)
    assert (config.share_embeddings, config.tie_output) == (False, False)
    assert (imported.kind, imported.generation) == ("torch.nn.Transformer", {})
    assert_same_model(reference, imported.model, tmp_path / "bundle")


def test_pre_norm_without_biases_and_with_one_table(tmp_path: Path) -> None:
    shape = {"norm_first": True, "final_norms": True, "activation": "gelu", "bias": False}
    positions = (sinusoids(LENGTH, 16),) * 2
    reference = lively_reference(1, 2, LENGTH, seed=6, positions=positions, share=True, tie=True, epsilon=1e-4, **shape)
    names = {"positions": "sinusoidal", "source_positions": None, "target_positions": None}
    ignored = ["source_positions", "target_positions"]
    changes = {"weights": "model.safetensors", "norm_epsilon": 1e-4, "ignored": ignored}
    imported = checkpoint_from_torch(write(tmp_path / "saved", reference, **changes, **names, **shape))
    config = imported.model.config
    assert (config.positions, config.share_embeddings, config.tie_output) == ("sinusoidal", True, True)
    assert not any(tensor.any() for name, tensor in imported.model.state_dict().items() if name.endswith(".bias"))
    assert_same_model(reference, imported.model, tmp_path / "bundle")


def test_post_norm_inside_an_entry_with_one_long_table_of_positions(tmp_path: Path) -> None:
    table = torch.randn(40, 16, generator=torch.Generator().manual_seed(5))
    reference = lively_reference(1, 2, LENGTH, seed=37, positions=(table, table), scale=False)
    reference.register_buffer("pe", table[:, None])  # [length, 1, D], as tutorials have it
    ignored = ["source_positions", "target_positions"]
    names = {"source_positions": "pe", "target_positions": "pe", "ignored": ignored, "scale_embeddings": False}
    folder = write(tmp_path / "saved", reference, state_dict="model_state_dict", max_source=10, **names)
    imported = checkpoint_from_torch(folder)
    assert (imported.model.config.max_source, imported.model.config.max_target) == (10, LENGTH)
    assert_same_model(reference, imported.model, tmp_path / "bundle")


def test_the_documented_json_has_every_field() -> None:
    lines = [line.strip() for line in (torch_transformer.__doc__ or "").splitlines()]
    fields = [line.split('"')[1] for line in lines if line.startswith('"')]
    assert fields == list(about())


# What cannot be imported


def test_a_folder_without_a_description(tmp_path: Path) -> None:
    assert error_of(tmp_path).startswith(f"no seq2engine.json in {tmp_path}; expected next to the weights")


@pytest.mark.parametrize(("text", "problem"), [("{", "not JSON"), ("[]", "it is [], expected an object")])
def test_a_description_that_is_none(saved: Path, text: str, problem: str) -> None:
    (saved / "seq2engine.json").write_text(text)
    assert problem in error_of(saved)


def test_all_fields_that_are_wrong_are_listed(saved: Path) -> None:
    fields = about(heads="4", n_layers=6, output_bias=3)
    del fields["bias"], fields["end_id"]
    (saved / "seq2engine.json").write_text(json.dumps(fields))
    assert error_of(saved) == (
        f"{saved}/seq2engine.json: unknown field 'n_layers'; missing field 'bias'; missing field 'end_id'; "
        "heads is '4', expected int; output_bias is 3, expected str or null"
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"weights": "../model.pt"}, "weights is '../model.pt', expected a file in the same folder"),
        ({"ignored": [1]}, "ignored is not a list of names"),
        ({"norm_first": True}, "norm_first without final_norms, which is not supported"),
        ({"positions": "rotary"}, "positions is 'rotary', expected one of sinusoidal, learned"),
        ({"positions": "sinusoidal"}, "source_positions is 'source_positions', expected a name with learned positions"),
        ({"target_positions": None}, "target_positions is None, expected a name with learned positions and null"),
        ({"heads": 3}, "d_model 16 is not divisible by heads 3"),
        ({"activation": "tanh"}, "activation is 'tanh', expected one of relu, gelu, gelu_tanh, silu"),
    ],
)
def test_fields_that_do_not_go_together(saved: Path, changes: dict[str, Any], problem: str) -> None:
    assert problem in error_of(changed(saved, **changes))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"transformer": "model."}, "has no model.encoder.layers.0.linear1.weight; its weights are output.weight, "),
        ({"source_embedding": "src"}, "has no src; its weights are output.weight, "),
        ({"output_weight": "source_norm"}, "has no source_norm; its weights are"),
        (
            {"source_embedding": "transformer.encoder.layers.0.norm1.bias"},
            "norm1.bias is [16], expected rows and columns",
        ),
        ({"output_bias": "output.bias"}, "missing output.bias"),
        ({"final_norms": True}, "missing transformer.decoder.norm.bias; missing transformer.decoder.norm.weight"),
        ({"bias": False}, "bias is False, but there is a transformer.encoder.layers.0.self_attn.in_proj_bias[q]"),
        ({"target_positions": "pe"}, "missing pe; not understood target_positions"),
        ({"max_source": 100}, "source_embedding.positions is [24, 16], expected [100, 16]"),
        ({"state_dict": "model"}, "has no 'model', so it is not a checkpoint of seq2engine.json's kind"),
        ({"weights": "other.safetensors"}, "other.safetensors; expected the weights that seq2engine.json names"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_weights_that_are_not_as_described(saved: Path, changes: dict[str, Any], problem: str) -> None:
    assert problem in error_of(changed(saved, **changes))


def test_a_bias_that_is_missing_alone(saved: Path) -> None:
    weights = torch.load(saved / "model.pt")
    del weights["transformer.decoder.layers.0.multihead_attn.in_proj_bias"]
    torch.save(weights, saved / "model.pt")
    assert "missing transformer.decoder.layers.0.multihead_attn.in_proj_bias[k]; " in error_of(saved)


def test_a_projection_that_is_a_number(saved: Path) -> None:
    weights = torch.load(saved / "model.pt")
    name = "transformer.encoder.layers.0.self_attn.in_proj_weight"
    torch.save(weights | {name: torch.tensor(1.0)}, saved / "model.pt")
    assert f"missing {name}[k]; " in error_of(saved)


def test_a_damaged_safetensors_file(saved: Path) -> None:
    (saved / "model.safetensors").write_bytes(b"nothing")
    assert "cannot be read" in error_of(changed(saved, weights="model.safetensors"))

"""fairseq checkpoints, written here under its names and options from an nn.Transformer, compute the same."""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.nn_reference import Reference, assert_same_model, lively_reference, refusal_of
from support.rounding import EXP, FP32, apart
from torch import Tensor

from seq2engine.model.importers.fairseq import checkpoint_from_fairseq
from seq2engine.model.importers.imported import Imported

LENGTH = 12
VOCAB = 30


def tensor2tensor(rows: int, width: int) -> Tensor:
    """The formula of fairseq's SinusoidalPositionalEmbedding, with the row of the padding still in it."""
    step = math.log(10000) / (width // 2 - 1)
    rates = torch.exp(torch.arange(width // 2, dtype=torch.float) * -step)
    angles = torch.arange(rows, dtype=torch.float).unsqueeze(1) * rates.unsqueeze(0)
    return torch.cat([torch.sin(angles), torch.cos(angles)], dim=1)


def fairseq_weights(reference: Reference, learned: bool, old: bool = False) -> dict[str, Tensor]:
    """A state dict with the names of fairseq, of today or of before 0.6."""
    state = reference.state_dict()
    norms = {
        "encoder": {"norm1": "self_attn_layer_norm", "norm2": "final_layer_norm"},
        "decoder": {"norm1": "self_attn_layer_norm", "norm2": "encoder_attn_layer_norm", "norm3": "final_layer_norm"},
    }
    parts = {"self_attn": "self_attn", "multihead_attn": "encoder_attn", "linear1": "fc1", "linear2": "fc2"}
    weights = {"encoder.version": torch.tensor([3.0]), "decoder.version": torch.tensor([3.0])}
    for name, tensor in state.items():
        if not name.startswith("transformer."):
            continue
        side, *rest = name.removeprefix("transformer.").split(".")
        if rest[0] == "norm":
            weights[f"{side}.layer_norm.{rest[1]}"] = tensor
            continue
        _, i, part, *leaf = rest
        layer = f"{side}.layers.{i}"
        if part in norms[side]:
            new = f"layer_norms.{int(part[-1]) - 1}" if old else norms[side][part]
            weights[f"{layer}.{new}.{leaf[0]}"] = tensor
        elif leaf[0].startswith("in_proj_") and not old:
            for letter, rows in zip("qkv", tensor.chunk(3), strict=True):
                weights[f"{layer}.{parts[part]}.{letter}_proj.{leaf[0].removeprefix('in_proj_')}"] = rows.clone()
        else:
            weights[f"{layer}.{parts[part]}.{'.'.join(leaf)}"] = tensor
    for side, table in (("encoder", "source"), ("decoder", "target")):
        weights[f"{side}.embed_tokens.weight"] = state[f"{table}.weight"]
        if f"{table}_norm.weight" in state:
            weights[f"{side}.layernorm_embedding.weight"] = state[f"{table}_norm.weight"]
            weights[f"{side}.layernorm_embedding.bias"] = state[f"{table}_norm.bias"]
        if learned:
            padding = torch.full((2, state["source.weight"].shape[1]), 7.0)  # rows that nothing may read
            weights[f"{side}.embed_positions.weight"] = torch.cat((padding, state[f"{table}_positions"]))
        else:
            weights[f"{side}.embed_positions._float_tensor"] = torch.zeros(1)
    weights["decoder.embed_out" if old else "decoder.output_projection.weight"] = state["output.weight"]
    return weights


def fairseq_options(**changes: Any) -> dict[str, Any]:
    options = {"arch": "transformer_iwslt_de_en", "task": "translation", "source_lang": "de", "target_lang": "en"}
    for side in ("encoder", "decoder"):
        options |= {f"{side}_layers": 2, f"{side}_embed_dim": 16, f"{side}_ffn_embed_dim": 24}
        options |= {f"{side}_attention_heads": 4, f"{side}_normalize_before": False, f"{side}_learned_pos": False}
    options |= {"activation_fn": "relu", "max_source_positions": LENGTH, "max_target_positions": LENGTH}
    options |= {"encoder_layerdrop": 0.1, "adaptive_softmax_cutoff": None, "no_cross_attention": False, "dropout": 0.3}
    return options | changes


def write(folder: Path, content: dict[str, Any], name: str = "checkpoint_best.pt") -> Path:
    folder.mkdir(exist_ok=True)
    torch.save({"extra_state": {"epoch": 3}, "optimizer_history": [], **content}, folder / name)
    for language in ("de", "en"):
        lines = [f"word{i} {100 - i}" for i in range(VOCAB - 4 - 2)] + ["madeupword0000 0", "madeupword0001 0"]
        (folder / f"dict.{language}.txt").write_text("\n".join(lines) + "\n")
    return folder


def sinusoids() -> tuple[Tensor, Tensor]:
    return (tensor2tensor(LENGTH + 2, 16)[2:],) * 2


@pytest.fixture
def plain() -> Reference:
    return Reference(positions=sinusoids())


@pytest.fixture
def saved(tmp_path: Path, plain: Reference) -> Path:
    content = {"args": argparse.Namespace(**fairseq_options()), "model": fairseq_weights(plain, learned=False)}
    return write(tmp_path / "saved", content)


def damaged(folder: Path, **changes: Any) -> Path:
    """The saved checkpoint with entries of `model` or options in `args` changed."""
    path = folder / "checkpoint_best.pt"
    content = torch.load(path, weights_only=False)
    vars(content["args"]).update(changes.get("args", {}))
    content["model"].update(changes.get("model", {}))
    for name in changes.get("without", ()):
        del content["model"][name]
    torch.save(content, path)
    return folder


error_of = partial(refusal_of, checkpoint_from_fairseq)


# The same model


def test_post_norm_with_sinusoids_and_one_table_for_all(tmp_path: Path) -> None:
    reference = lively_reference(2, 2, LENGTH, last=2, seed=7, positions=sinusoids(), share=True, tie=True)
    options = fairseq_options(share_all_embeddings=True)
    content = {"args": argparse.Namespace(**options), "model": fairseq_weights(reference, learned=False)}
    imported = checkpoint_from_fairseq(write(tmp_path / "saved", content))
    config = imported.model.config
    assert (config.norm, config.final_norm, config.share_embeddings, config.tie_output) == ("post", False, True, True)
    assert (config.pad_id, config.start_id, config.end_id, config.max_source) == (1, 2, 2, LENGTH)
    assert isinstance(imported, Imported)
    assert (imported.kind, imported.generation) == ("fairseq", {})
    assert_same_model(reference, imported.model, tmp_path / "bundle", last=2)


def test_pre_norm_with_learned_positions_and_norms_of_embeddings(tmp_path: Path) -> None:
    positions = tuple(torch.randn(LENGTH, 16, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    norms = {"norm_first": True, "final_norms": True, "embedding_norm": True}
    made = {"activation": "gelu", "scale": False, "positions": positions, **norms}
    reference = lively_reference(2, 2, LENGTH, last=2, seed=4, **made)
    flags = {f"{side}_{name}": True for side in ("encoder", "decoder") for name in ("normalize_before", "learned_pos")}
    options = fairseq_options(activation_fn="gelu", no_scale_embedding=True, layernorm_embedding=True, **flags)
    task = {"_name": options.pop("task"), "source_lang": options.pop("source_lang"), "target_lang": "en"}
    model = {"_name": options.pop("arch"), **options}
    content = {"args": None, "cfg": {"task": task, "model": model}, "model": fairseq_weights(reference, learned=True)}
    imported = checkpoint_from_fairseq(write(tmp_path / "saved", content, "mine.pt"))
    assert (imported.model.config.norm, imported.model.config.embedding_norm) == ("pre", True)
    assert_same_model(reference, imported.model, tmp_path / "bundle", last=2)


def test_the_names_of_old_versions(tmp_path: Path) -> None:
    reference = lively_reference(2, 2, LENGTH, last=2, seed=71, positions=sinusoids())
    weights = fairseq_weights(reference, learned=False, old=True)
    assert {"encoder.layers.0.self_attn.in_proj_weight", "decoder.layers.1.layer_norms.2.bias"} <= weights.keys()
    options = fairseq_options()
    del options["activation_fn"]  # an option that came later
    folder = write(tmp_path / "saved", {"args": argparse.Namespace(**options), "model": weights}, "checkpoint_last.pt")
    imported = checkpoint_from_fairseq(folder / "checkpoint_last.pt")
    assert_same_model(reference, imported.model, tmp_path / "bundle", last=2)


def test_nested_options_and_an_output_tied_to_the_target_table(tmp_path: Path) -> None:
    reference = Reference(positions=sinusoids(), tie=True)
    flat = fairseq_options(share_decoder_input_output_embed=True)
    model: dict[str, Any] = {"_name": "transformer", "encoder": {}, "decoder": {}, "quant_noise": {"pq": 0.0}}
    for name, value in flat.items():
        side, _, rest = name.partition("_")
        (model[side] if side in ("encoder", "decoder") else model)[rest if side in model else name] = value
    cfg = {"task": {"_name": "translation"}, "model": model}
    folder = write(tmp_path / "saved", {"cfg": cfg, "model": fairseq_weights(reference, learned=False)})
    config = checkpoint_from_fairseq(folder).model.config
    assert (config.encoder_layers, config.share_embeddings, config.tie_output) == (2, False, True)


def test_positions_are_those_of_tensor2tensor(saved: Path) -> None:
    table = checkpoint_from_fairseq(saved).model.source_embedding.positions
    assert table is not None
    for position in range(LENGTH):
        for i in range(8):
            angle = (position + 2) * 10000 ** (-i / 7)
            near = apart([(1, FP32)]) + apart([(EXP, FP32)]) * angle  # the angle is made in fp32, by an exponential
            assert table[position, i].item() == pytest.approx(math.sin(angle), rel=0, abs=near)
            assert table[position, i + 8].item() == pytest.approx(math.cos(angle), rel=0, abs=near)


# What cannot be imported


def test_a_folder_without_a_dictionary(saved: Path) -> None:
    (saved / "dict.en.txt").unlink()
    assert error_of(saved) == f"{saved} has no dict.en.txt; copy it there from the folder of the training data"


def test_a_dictionary_of_another_model(saved: Path) -> None:
    (saved / "dict.de.txt").write_text("one 1\ntwo 1\n")
    made = f"{saved}/dict.de.txt makes a vocabulary of 6 (4 specials and its lines)"
    assert error_of(saved).startswith(f"{made}, but encoder.embed_tokens.weight has 30 rows; copy the dictionary")


def test_leftover_and_missing_weights_are_listed(saved: Path) -> None:
    missing = "decoder.layers.0.encoder_attn.k_proj.weight"
    damaged(saved, model={"encoder.layers.0.adapter.weight": torch.zeros(2)}, without=[missing])
    assert error_of(saved).endswith(f": missing {missing}; not understood encoder.layers.0.adapter.weight")


def test_unexpected_learned_positions_are_refused(saved: Path) -> None:
    damaged(saved, model={"encoder.embed_positions.weight": torch.zeros(14, 16)})
    assert error_of(saved).endswith("not understood encoder.embed_positions.weight")


def test_learned_positions_that_are_missing(saved: Path) -> None:
    damaged(saved, args={"decoder_learned_pos": True})
    assert error_of(saved).endswith("missing decoder.embed_positions.weight")


def test_weights_of_odd_shapes_are_named(saved: Path) -> None:
    layer = "encoder.layers.0.self_attn"
    damaged(saved, model={f"{layer}.k_proj.weight": torch.zeros(16, 9), f"{layer}.out_proj.bias": torch.tensor(1.0)})
    message = error_of(saved)
    assert f"{layer}.v_proj.weight cannot be stacked, being [16, 16] and [16, 9] and [16, 16]" in message
    assert f"{layer}.out_proj.bias cannot be stacked, being []" in message
    damaged(saved, args={"encoder_learned_pos": True}, model={"encoder.embed_positions.weight": torch.tensor(1.0)})
    assert "encoder.embed_positions.weight cannot be stacked, being []" in error_of(saved)


def test_a_layer_of_another_size_is_named(saved: Path) -> None:
    damaged(saved, model={"decoder.layers.1.fc1.weight": torch.zeros(20, 16)})
    assert error_of(saved).endswith("decoder.1.feed_forward.up.weight is [20, 16], expected [24, 16]")


def test_one_table_with_two_contents(saved: Path) -> None:
    damaged(saved, args={"share_all_embeddings": True})
    assert "share_all_embeddings claims that encoder.embed_tokens.weight is decoder.embed_tokens" in error_of(saved)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"arch": "lstm"}, "arch lstm, expected transformer..."),
        ({"arch": "transformer_lm_big"}, "arch transformer_lm_big, expected transformer..."),
        ({"task": "translation_multi_simple_epoch"}, "task translation_multi_simple_epoch, expected translation"),
        ({"adaptive_softmax_cutoff": [100]}, "adaptive_softmax_cutoff [100], which is not supported"),
        ({"no_cross_attention": True}, "no_cross_attention True, which is not supported"),
        ({"quant_noise_pq": 0.1}, "quant_noise_pq 0.1, which is not supported"),
        ({"activation_fn": "gelu_fast"}, "activation_fn gelu_fast, expected one of relu, gelu, swish"),
        ({"decoder_layers": None}, "decoder_layers None, expected a number"),
        ({"encoder_normalize_before": True}, "encoder_normalize_before True and decoder_normalize_before False"),
        ({"decoder_ffn_embed_dim": 32}, "encoder_ffn_embed_dim 24 and decoder_ffn_embed_dim 32, expected the same"),
        ({"decoder_output_dim": 8}, "decoder_output_dim 8, expected decoder_embed_dim 16"),
        (
            {"no_decoder_final_norm": True, "encoder_normalize_before": True, "decoder_normalize_before": True},
            "no_decoder_final_norm True with decoder_normalize_before True",
        ),
        ({"encoder_embed_dim": 2, "decoder_embed_dim": 2}, "encoder_embed_dim below 4"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_that_cannot_be_kept_are_named(saved: Path, options: dict[str, Any], problem: str) -> None:
    assert f"cannot be imported: it has {problem}" in error_of(damaged(saved, args=options))


def test_all_problems_are_named_at_once(saved: Path) -> None:
    message = error_of(damaged(saved, args={"char_inputs": True, "base_layers": 2, "decoder_attention_heads": 8}))
    assert all(name in message for name in ("char_inputs", "base_layers", "decoder_attention_heads 8"))


def test_a_model_that_names_no_language(saved: Path) -> None:
    assert "names no source_lang" in error_of(damaged(saved, args={"source_lang": None}))


def test_heads_that_do_not_divide_the_width(saved: Path) -> None:
    damaged(saved, args={"encoder_attention_heads": 3, "decoder_attention_heads": 3})
    assert error_of(saved) == f"{saved}/checkpoint_best.pt: d_model 16 is not divisible by heads 3"


def test_several_checkpoints_of_which_none_is_the_best(saved: Path) -> None:
    (saved / "checkpoint_best.pt").rename(saved / "checkpoint1.pt")
    (saved / "checkpoint2.pt").write_bytes(b"")
    assert error_of(saved).startswith(f"{saved} has checkpoint1.pt, checkpoint2.pt; expected checkpoint_best.pt or ")


def test_a_file_without_options(tmp_path: Path, plain: Reference) -> None:
    folder = write(tmp_path / "saved", {"model": fairseq_weights(plain, learned=False)})
    assert "has no 'cfg', so it is not a checkpoint of fairseq (nor 'args')" in error_of(folder)

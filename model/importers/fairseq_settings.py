"""The options of a fairseq checkpoint: read, checked and converted to a config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seq2engine.errors import CheckpointError, ConfigError

from ..config import ModelConfig, config_problem
from .files.pickles import entry, settings_of

PAD, END = 1, 2
SIDES = ("encoder", "decoder")
SIZES = ("layers", "embed_dim", "ffn_embed_dim", "attention_heads")
EQUAL = ("embed_dim", "ffn_embed_dim", "attention_heads", "normalize_before")  # our model has one of each
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "silu"}
REFUSED = (  # options that change what is computed
    "adaptive_input",
    "adaptive_softmax_cutoff",
    "base_layers",
    "char_inputs",
    "cross_self_attention",
    "decoder_layers_to_keep",
    "decoder_xformers_att_config",
    "encoder_layers_to_keep",
    "encoder_xformers_att_config",
    "merge_src_tgt_embed",
    "no_cross_attention",
    "no_token_positional_embeddings",
    "quant_noise_pq",
    "quant_noise_scalar",
)


def settings_from_content(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The options of a model and its task by their flat names (`encoder_layers`), however they were saved."""
    if content.get("args") is not None:
        return settings_of(content["args"], "args", path)
    sections = settings_of(entry(content, "cfg", path, "fairseq (nor 'args')"), "cfg", path)
    task = settings_of(entry(sections, "task", path, "fairseq"), "task", path)
    model = settings_of(entry(sections, "model", path, "fairseq"), "model", path)
    flat = {**task, **model, "arch": model.get("arch") or model.get("_name"), "task": task.get("_name")}
    for group in ("encoder", "decoder", "quant_noise"):  # nested, where hydra made them
        if isinstance(flat.get(group), Mapping):
            flat |= {f"{group}_{name}": value for name, value in flat.pop(group).items()}
    return flat


def refuse(settings: Mapping[str, Any], path: Path) -> None:
    """Names every setting that this importer cannot keep."""
    arch, task = settings.get("arch"), settings.get("task") or "translation"
    problems = []
    if not str(arch).startswith("transformer") or str(arch).startswith("transformer_lm"):
        problems.append(f"arch {arch}, expected transformer...")
    if task != "translation":
        problems.append(f"task {task}, expected translation")
    problems += [f"{name} {settings[name]}, which is not supported" for name in REFUSED if settings.get(name)]
    for name in (f"{side}_{size}" for side in SIDES for size in SIZES):
        if type(settings.get(name)) is not int or settings[name] < 1:
            problems.append(f"{name} {settings.get(name)}, expected a number")
    if settings.get("encoder_embed_dim") in (1, 2, 3):
        problems.append("encoder_embed_dim below 4, for which fairseq has no positions")
    for name in EQUAL:
        one, other = (settings.get(f"{side}_{name}") or False for side in SIDES)
        if one != other:
            problems.append(f"encoder_{name} {one} and decoder_{name} {other}, expected the same")
    for name in ("decoder_input_dim", "decoder_output_dim"):
        if settings.get(name, settings.get("decoder_embed_dim")) != settings.get("decoder_embed_dim"):
            problems.append(f"{name} {settings[name]}, expected decoder_embed_dim {settings.get('decoder_embed_dim')}")
    if settings.get("no_decoder_final_norm") and settings.get("decoder_normalize_before"):
        problems.append("no_decoder_final_norm True with decoder_normalize_before True, which is not supported")
    if settings.get("activation_fn", "relu") not in ACTIVATIONS:
        problems.append(f"activation_fn {settings['activation_fn']}, expected one of {', '.join(ACTIVATIONS)}")
    if problems:
        raise CheckpointError(f"{path} cannot be imported: it has " + "; ".join(problems))


def config_from_settings(settings: Mapping[str, Any], vocabularies: list[int], path: Path) -> ModelConfig:
    all_shared = bool(settings.get("share_all_embeddings"))
    try:
        return ModelConfig(
            encoder_layers=settings["encoder_layers"],
            decoder_layers=settings["decoder_layers"],
            heads=settings["encoder_attention_heads"],
            d_model=settings["encoder_embed_dim"],
            d_ff=settings["encoder_ffn_embed_dim"],
            source_vocab=vocabularies[0],
            target_vocab=vocabularies[1],
            norm="pre" if settings.get("encoder_normalize_before") else "post",
            positions="learned",
            activation=ACTIVATIONS[settings.get("activation_fn", "relu")],
            share_embeddings=all_shared,
            tie_output=all_shared or bool(settings.get("share_decoder_input_output_embed")),
            scale_embeddings=not settings.get("no_scale_embedding"),
            embedding_norm=bool(settings.get("layernorm_embedding")),
            max_source=settings.get("max_source_positions") or 1024,
            max_target=settings.get("max_target_positions") or 1024,
            pad_id=PAD,
            start_id=END,
            end_id=END,
        )
    except ConfigError as error:
        raise config_problem(path, error) from error

"""Hugging Face's T5 and its relatives (v1.1, FLAN, mT5, UMT5, ByT5, MADLAD-400) as our checkpoints.

The library sorts distances into buckets and looks up a bias by bucket. Here the biases are stored by distance, with the
library's own float arithmetic, so that a graph only looks them up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seq2engine.errors import CheckpointError, ConfigError

from ..checkpoint import model_from_weights
from ..config import ModelConfig, config_problem
from ..tokenizers.importing import tokenizer_from_hugging_face
from .conversion.position_tables import distance_buckets
from .conversion.renames import layer_renames, renamed_weights
from .files.weights import read_weights
from .hugging_face_config import single_token, start_field
from .hugging_face_generation import generation_from_files
from .imported import Imported, tokenizer_or_note

ACTIVATIONS = {  # their name -> ours
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
# Relative positions have no end, so nothing in a file limits lengths. This is what caches and engines are planned for.
LONGEST = 1024
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
    "is_encoder_decoder": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
MULTILINGUAL_DEFAULTS = {
    "vocab_size": 250112,
    "d_ff": 1024,
    "num_layers": 8,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
    "decoder_start_token_id": 0,
}


@dataclass(frozen=True)
class T5Family:
    """Properties of a model_type that are not fields of config.json. `scales`: None if the file has them."""

    kind: str
    scales: bool | None  # whether the output projection's input is scaled
    distances_per_layer: bool
    defaults: Mapping[str, Any]


T5_FAMILIES = {  # model_type -> family; ByT5, FLAN and MADLAD-400 are "t5"
    "t5": T5Family("T5", None, False, DEFAULTS),
    "mt5": T5Family("mT5", False, False, DEFAULTS | MULTILINGUAL_DEFAULTS),
    "umt5": T5Family("UMT5", True, True, DEFAULTS | MULTILINGUAL_DEFAULTS),
}

SHARED = "shared.weight"
SOURCE, TARGET = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"
OUTPUT = "lm_head.weight"
# A table in early files that no version of the library reads.
UNREAD = {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"}
BUCKETS = "{side}.block.{i}.layer.0.SelfAttention.relative_attention_bias.weight"


def self_attention(side: str) -> dict[str, tuple[str, ...]]:
    """The first part of a layer of either side."""
    theirs = f"{side}.block.{{i}}.layer.0"
    return {
        f"{side}.{{i}}.self_attn.qkv.weight": tuple(f"{theirs}.SelfAttention.{name}.weight" for name in "qkv"),
        f"{side}.{{i}}.self_attn.out.weight": (f"{theirs}.SelfAttention.o.weight",),
        f"{side}.{{i}}.self_residual.norm.weight": (f"{theirs}.layer_norm.weight",),
    }


def feed_forward(side: str, place: int, gated: bool) -> dict[str, tuple[str, ...]]:
    """The last part of a layer, which is its `place`th."""
    theirs = f"{side}.block.{{i}}.layer.{place}"
    up = ("wi_0", "wi_1") if gated else ("wi",)  # the gate first
    return {
        f"{side}.{{i}}.feed_forward.up.weight": tuple(f"{theirs}.DenseReluDense.{name}.weight" for name in up),
        f"{side}.{{i}}.feed_forward.down.weight": (f"{theirs}.DenseReluDense.wo.weight",),
        f"{side}.{{i}}.feed_residual.norm.weight": (f"{theirs}.layer_norm.weight",),
    }


CROSS_ATTENTION = {
    "decoder.{i}.cross_attn.q.weight": ("decoder.block.{i}.layer.1.EncDecAttention.q.weight",),
    "decoder.{i}.cross_attn.kv.weight": (
        "decoder.block.{i}.layer.1.EncDecAttention.k.weight",
        "decoder.block.{i}.layer.1.EncDecAttention.v.weight",
    ),
    "decoder.{i}.cross_attn.out.weight": ("decoder.block.{i}.layer.1.EncDecAttention.o.weight",),
    "decoder.{i}.cross_residual.norm.weight": ("decoder.block.{i}.layer.1.layer_norm.weight",),
}
FINAL_NORMS = {
    "encoder_norm.weight": ("encoder.final_layer_norm.weight",),
    "decoder_norm.weight": ("decoder.final_layer_norm.weight",),
}


def checkpoint_from_t5(
    source: Path, values: dict[str, Any], own: dict[str, Any] | None, where: str, own_where: str
) -> Imported:
    """The model of a folder with these fields of config.json and, if it has that file, of generation_config.json."""
    family = T5_FAMILIES[values["model_type"]]
    settings = t5_settings(family, values, where)
    generation, notes = generation_from_files(values, own, own_where)
    weights = read_weights(source)
    tables = embedding_tables(weights, str(source))
    config = config_from_t5(
        family,
        settings,
        own or {},
        share_embeddings=torch.equal(weights[tables[SOURCE]], weights[tables[TARGET]]),
        tie_output=torch.equal(weights[tables[OUTPUT]], weights[tables[TARGET]]),
        where=where,
    )
    with_distances(weights, config, settings["relative_attention_num_buckets"], str(source))
    ignored = {SHARED, SOURCE, TARGET, OUTPUT} | UNREAD
    ours = renamed_weights(weights, renames_of(config, tables), ignored, str(source))
    for side in ("encoder", "decoder"):
        ours[f"{side}_distances.table"] = ours[f"{side}_distances.table"].T  # heads were stacked
    notes.append(
        f"{family.kind}'s relative positions have no end: sources and outputs are limited to {config.max_source} "
        "tokens here (max_source and max_target in the checkpoint's config.json)"
    )
    tokenizer, why = tokenizer_or_note(lambda: tokenizer_from_hugging_face(source))
    model = model_from_weights(config, ours, str(source))
    return Imported(model, generation, (*notes, *why), family.kind, tokenizer)


def embedding_tables(weights: Mapping[str, Tensor], where: str) -> dict[str, str]:
    """Which stored tensor is the source's table, the target's and the output's: its own, or else the shared one."""
    tables = {}
    for name, others in {SOURCE: (SHARED, TARGET), TARGET: (SHARED, SOURCE), OUTPUT: (SHARED, TARGET)}.items():
        present = [candidate for candidate in (name, *others) if candidate in weights]
        if not present:
            raise CheckpointError(f"{where} has no weights for {name}; expected one of {name}, {', '.join(others)}")
        tables[name] = present[0]
    return tables


def with_distances(weights: dict[str, Tensor], config: ModelConfig, buckets: int, where: str) -> None:
    """Replaces the tables by bucket [buckets, H] by tables by distance [distances, H] of the same names."""
    for side, ahead in (("encoder", True), ("decoder", False)):
        rows = distance_buckets(buckets, config.max_distance, ahead)
        for layer in range(layers_with_distances(config, side)):
            name = BUCKETS.format(side=side, i=layer)
            table = weights.get(name)
            if table is not None and list(table.shape) != [buckets, config.heads]:
                raise CheckpointError(f"{where}: {name} is {list(table.shape)}, expected {[buckets, config.heads]}")
            if table is not None:
                weights[name] = table[rows].T  # [H, distances]: tables of several layers are stacked by their heads


def layers_with_distances(config: ModelConfig, side: str) -> int:
    layers = config.encoder_layers if side == "encoder" else config.decoder_layers
    return layers if config.distances_per_layer else 1


def renames_of(config: ModelConfig, tables: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The table of names for one model: which of its stored weights become which of ours."""
    encoder = self_attention("encoder") | feed_forward("encoder", 1, config.gated)
    decoder = self_attention("decoder") | CROSS_ATTENTION | feed_forward("decoder", 2, config.gated)
    renames = {
        **layer_renames(encoder, config.encoder_layers),
        **layer_renames(decoder, config.decoder_layers),
        **FINAL_NORMS,
        "target_embedding.tokens.weight": (tables[TARGET],),
    }
    for side in ("encoder", "decoder"):
        names = (BUCKETS.format(side=side, i=layer) for layer in range(layers_with_distances(config, side)))
        renames[f"{side}_distances.table"] = tuple(names)
    if not config.share_embeddings:
        renames["source_embedding.tokens.weight"] = (tables[SOURCE],)
    if not config.tie_output:
        renames["output.weight"] = (tables[OUTPUT],)
    return renames


def t5_settings(family: T5Family, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """All fields that matter, the family's own defaults included; everything that cannot be ours is listed."""
    given = {name: value for name, value in values.items() if value is not None}
    settings = {**family.defaults, **given}
    settings.setdefault("num_decoder_layers", settings["num_layers"])
    wanted = {name: type(value) for name, value in family.defaults.items() if not name.endswith("_token_id")}
    problems = [
        f"{name} is {settings[name]!r}, expected {kind.__name__}"
        for name, kind in {**wanted, "num_decoder_layers": int}.items()
        if type(settings[name]) is not kind
    ]
    if problems:
        raise CheckpointError(f"{where}: " + "; ".join(problems))
    if not settings["is_encoder_decoder"]:
        problems.append(f"is_encoder_decoder is False, supported for {family.kind} is True")
    gated, name = activation_of(settings)
    settings |= {"dense_act_fn": name, "is_gated_act": gated}
    if name not in tuple(ACTIVATIONS):
        problems.append(
            f"feed_forward_proj is {settings['feed_forward_proj']!r}, supported are {', '.join(ACTIVATIONS)}"
        )
    least = settings["relative_attention_num_buckets"] // 2
    if not 2 <= least < settings["relative_attention_max_distance"]:
        problems.append(
            f"relative_attention_num_buckets {2 * least} and relative_attention_max_distance "
            f"{settings['relative_attention_max_distance']}, expected at least 4 buckets and more than half as far"
        )
    if problems:
        raise CheckpointError(f"{where}: " + "; ".join(problems))
    return settings


def activation_of(settings: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether the feed-forward is gated, and the library's name of its activation."""
    proj = settings["feed_forward_proj"]
    name = "gelu_new" if proj == "gated-gelu" else proj.rpartition("-")[2]  # a peculiarity of the first v1.1 files
    return settings.get("is_gated_act", proj.startswith("gated-")), settings.get("dense_act_fn", name)


def scales_output(family: T5Family, values: Mapping[str, Any]) -> bool:
    """Whether the head's input is scaled: in T5 v1.0 yes, in v1.1 no. The config has no field of its own for it."""
    if family.scales is not None:
        return family.scales
    return bool(values.get("scale_decoder_outputs", values.get("tie_word_embeddings") is not False))


def config_from_t5(
    family: T5Family,
    settings: Mapping[str, Any],
    generation: Mapping[str, Any],
    share_embeddings: bool,
    tie_output: bool,
    where: str,
) -> ModelConfig:
    """Our config. Which tables are shared is given by the weights: the file's own flag tells nothing about it."""
    longest = max(LONGEST, settings["n_positions"] if type(settings.get("n_positions")) is int else 0)
    end = generation.get("eos_token_id")
    start_name, start = start_field(settings, generation)
    try:
        return ModelConfig(
            encoder_layers=settings["num_layers"],
            decoder_layers=settings["num_decoder_layers"],
            heads=settings["num_heads"],
            d_model=settings["d_model"],
            d_kv=settings["d_kv"],
            d_ff=settings["d_ff"],
            source_vocab=settings["vocab_size"],
            target_vocab=settings["vocab_size"],
            norm="pre",
            norm_kind="rms",
            positions="relative",
            max_distance=settings["relative_attention_max_distance"],
            distances_per_layer=family.distances_per_layer,
            activation=ACTIVATIONS[settings["dense_act_fn"]],
            gated=settings["is_gated_act"],
            biases=False,
            scale_attention=False,
            share_embeddings=share_embeddings,
            tie_output=tie_output,
            scale_embeddings=False,
            scale_output=scales_output(family, settings),
            norm_epsilon=settings["layer_norm_epsilon"],
            max_source=longest,
            max_target=longest,
            pad_id=single_token(settings["pad_token_id"], "pad_token_id", where),
            start_id=single_token(start, start_name, where),
            end_id=single_token(settings["eos_token_id"] if end is None else end, "eos_token_id", where),
        )
    except ConfigError as error:
        raise config_problem(where, error) from error

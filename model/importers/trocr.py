"""TrOCR: Hugging Face's VisionEncoderDecoderModel with a ViT or DeiT encoder and the TrOCR decoder.

The decoder's layers are named as in Hugging Face's other families, behind a prefix. The encoder has sizes, a norm and
an activation of its own; in front of it are a product for each patch of the image, class tokens and positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seq2engine.errors import CheckpointError, ConfigError

from ..checkpoint import model_from_weights
from ..config import ModelConfig, config_problem
from ..tokenizers.importing import tokenizer_from_hugging_face
from .conversion.image_processor import images_from_folder
from .conversion.position_tables import m2m_positions
from .conversion.renames import layer_renames, renamed_weights
from .conversion.weight_fixes import zero_biases
from .files.weights import read_weights
from .hugging_face import CONFIG, DECODER_LAYER, GENERATION, both
from .hugging_face_config import ACTIVATIONS, read_json, single_token, start_field
from .hugging_face_generation import FIELDS, generation_from_files
from .imported import Imported, tokenizer_or_note

PREFIX = "decoder.model."  # of the decoder's weights; without it they have the names of the other families
TABLE, OUTPUT = "model.decoder.embed_tokens.weight", "decoder.output_projection.weight"
TARGET_POSITIONS = "model.decoder.embed_positions.weight"
SOURCE_POSITIONS, PATCHES = "encoder.embeddings.position_embeddings", "encoder.embeddings.patch_embeddings.projection"
CLASS_TOKENS = {  # model_type of the encoder -> the vectors before those of the patches
    "vit": ("encoder.embeddings.cls_token",),
    "deit": ("encoder.embeddings.cls_token", "encoder.embeddings.distillation_token"),
}
UNSET_LENGTH = 20  # max_length of the decoder in old files, which then nobody has set
OFFSET = 2  # rows of a learned table of the decoder that are never read
# The pooled output is not read by a decoder; `_float_tensor` is in old files only.
UNREAD = {
    *("encoder.pooler.dense.weight", "encoder.pooler.dense.bias", "encoder.embeddings.mask_token"),
    "model.decoder.embed_positions._float_tensor",
}
LAYER = "encoder.encoder.layer.{i}"
ENCODER_LAYER = {
    **both("encoder.{i}.self_attn.qkv", *(f"{LAYER}.attention.attention.{name}" for name in ("query", "key", "value"))),
    **both("encoder.{i}.self_attn.out", f"{LAYER}.attention.output.dense"),
    **both("encoder.{i}.self_residual.norm", f"{LAYER}.layernorm_before"),
    **both("encoder.{i}.feed_forward.up", f"{LAYER}.intermediate.dense"),
    **both("encoder.{i}.feed_forward.down", f"{LAYER}.output.dense"),
    **both("encoder.{i}.feed_residual.norm", f"{LAYER}.layernorm_after"),
}
# Fields of the two parts of config.json, and what the library takes where a file does not name them.
ENCODER: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "num_channels": 3,
    "qkv_bias": True,
}
SIZES = {"image_size": 224, "patch_size": 16}  # a number, or height and width
DECODER: dict[str, Any] = {
    "vocab_size": 50265,
    "d_model": 1024,
    "decoder_layers": 12,
    "decoder_attention_heads": 16,
    "decoder_ffn_dim": 4096,
    "activation_function": "gelu",
    "max_position_embeddings": 512,
    "scale_embedding": False,
    "use_learned_position_embeddings": True,
    "layernorm_embedding": True,
    "tie_word_embeddings": True,
}
TOKENS = {"decoder_start_token_id": 2, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}


def checkpoint_from_trocr(source: Path) -> Imported:
    """A folder of config.json, weights and preprocessor_config.json, as `save_pretrained` writes it."""
    where = str(source / CONFIG)
    values = read_json(source / CONFIG)
    encoder, decoder = parts_of(values, where)
    own = read_json(source / GENERATION) if (source / GENERATION).is_file() else None
    tokens = TOKENS | {
        name: given[name] for given in (decoder, values) for name in TOKENS if given.get(name) is not None
    }
    legacy = {name: given[name] for given in (decoder, values) for name in FIELDS if given.get(name) is not None}
    if "max_length" not in values and legacy.get("max_length") == UNSET_LENGTH:
        del legacy["max_length"]
    generation, notes = generation_from_files({} if own is not None else legacy, own, where)

    weights = without_prefix(read_weights(source))
    check_tables(weights, decoder, str(source))
    config = config_from_parts(
        encoder,
        decoder,
        tokens,
        own or {},
        tie_output=OUTPUT not in weights or torch.equal(weights[OUTPUT], weights[TABLE]),
        where=where,
    )
    notes += with_positions(weights, config, decoder)
    biases = {name for theirs in qkv_of(config) for name in theirs}
    weights = zero_biases(weights, biases, encoder["qkv_bias"], "qkv_bias", str(source))
    for name in (SOURCE_POSITIONS, *CLASS_TOKENS[encoder["model_type"]]):
        if name in weights:
            weights[name] = weights[name].flatten(0, -2)  # [1, S, D] -> [S, D]
    renames = renames_of(config, CLASS_TOKENS[encoder["model_type"]])
    ours = renamed_weights(weights, renames, {OUTPUT} | UNREAD, str(source))
    images, image_notes = images_from_folder(source, config)
    tokenizer, why = tokenizer_or_note(lambda: tokenizer_from_hugging_face(source))
    model = model_from_weights(config, ours, str(source))
    return Imported(model, generation, (*notes, *image_notes, *why), "TrOCR", tokenizer, images=images)


def parts_of(values: Mapping[str, Any], where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of encoder and decoder; everything that cannot be ours is listed."""
    problems, parts = [], []
    kinds = {"encoder": (ENCODER, tuple(CLASS_TOKENS)), "decoder": (DECODER, ("trocr",))}
    for name, (defaults, known) in kinds.items():
        given = values.get(name)
        if not isinstance(given, dict) or given.get("model_type") not in known:
            kind = given.get("model_type") if isinstance(given, dict) else given
            problems.append(f"the {name} is {kind!r}, supported are {' and '.join(known)}")
            continue
        settings = {**defaults, **{field: value for field, value in given.items() if value is not None}}
        problems += [
            f"{name} {field} is {settings[field]!r}, expected {type(default).__name__}"
            for field, default in defaults.items()
            if type(settings[field]) is not type(default)
        ]
        parts.append(settings)
    if problems:
        raise CheckpointError(f"{where}: " + "; ".join(problems))
    encoder, decoder = parts
    for settings, field in ((encoder, "hidden_act"), (decoder, "activation_function")):
        if settings[field] not in tuple(ACTIVATIONS):
            problems.append(f"{field} is {settings[field]!r}, supported are {', '.join(ACTIVATIONS)}")
    for field, default in SIZES.items():
        encoder[field] = pair = pair_of(encoder.get(field, default))
        if pair is None:
            problems.append(f"{field} is {values['encoder'][field]!r}, expected a number or height and width")
        elif min(pair) < 1:
            problems.append(f"{field} is {values['encoder'][field]!r}, expected at least 1")
    width = decoder.get("cross_attention_hidden_size")
    if width is not None and width != encoder["hidden_size"]:
        problems.append(f"cross_attention_hidden_size is {width!r}, expected the encoder's {encoder['hidden_size']}")
    if encoder.get("head_dim") not in (None, encoder["hidden_size"] // max(1, encoder["num_attention_heads"])):
        problems.append(f"head_dim is {encoder['head_dim']!r}, supported is hidden_size / num_attention_heads")
    if problems:
        raise CheckpointError(f"{where}: " + "; ".join(problems))
    return encoder, decoder


def pair_of(size: Any) -> tuple[int, int] | None:
    """Height and width."""
    pair = size if isinstance(size, list) else [size, size]
    return (pair[0], pair[1]) if len(pair) == 2 and all(type(one) is int for one in pair) else None


def without_prefix(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix("decoder.") if name.startswith(PREFIX) else name: tensor for name, tensor in weights.items()
    }


def check_tables(weights: Mapping[str, Tensor], decoder: Mapping[str, Any], where: str) -> None:
    if TABLE not in weights:
        raise CheckpointError(f"{where} has no {PREFIX}{TABLE.removeprefix('model.')}, expected the decoder's table")
    if OUTPUT not in weights and not decoder["tie_word_embeddings"]:
        raise CheckpointError(f"{where} has no {OUTPUT}, but its config does not tie it to the decoder's table")


def with_positions(weights: dict[str, Tensor], config: ModelConfig, decoder: Mapping[str, Any]) -> list[str]:
    """Cuts a learned table of the decoder to the rows that are read; puts the computed one where there is none."""
    if decoder["use_learned_position_embeddings"]:
        if TARGET_POSITIONS in weights:
            weights[TARGET_POSITIONS] = weights[TARGET_POSITIONS][OFFSET:]
        return []
    table = m2m_positions(config.max_target, config.d_model, config.pad_id)
    if config.start_id == config.pad_id:
        table[0] = 0.0  # a padding token has no position, even where the decoder starts on one
    weights[TARGET_POSITIONS] = table
    return [f"TrOCR's sinusoidal positions are stored as a table of {config.max_target} positions"]


def qkv_of(config: ModelConfig) -> list[tuple[str, ...]]:
    """The names of the biases of queries, keys and values in the encoder."""
    renames = layer_renames(ENCODER_LAYER, config.encoder_layers)
    return [theirs for ours, theirs in renames.items() if ours.endswith("qkv.bias")]


def renames_of(config: ModelConfig, class_tokens: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The table of names for one model: which of its stored weights become which of ours."""
    renames = {
        **both("source_embedding.patches", PATCHES),
        "source_embedding.class_tokens": class_tokens,
        "source_embedding.positions": (SOURCE_POSITIONS,),
        "target_embedding.tokens.weight": (TABLE,),
        "target_embedding.positions": (TARGET_POSITIONS,),
        **both("encoder_norm", "encoder.layernorm"),
        **layer_renames(ENCODER_LAYER, config.encoder_layers),
        **layer_renames(DECODER_LAYER, config.decoder_layers),
    }
    if config.embedding_norm:
        renames |= both("target_embedding.norm", "model.decoder.layernorm_embedding")
    if config.project_states:
        renames |= both("state_projection", "enc_to_dec_proj")
    if not config.tie_output:
        renames["output.weight"] = (OUTPUT,)
    return renames


def image_fields(encoder: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of our config for the front end: the image, its patches, and the positions that they make."""
    (height, width), (patch_height, patch_width) = encoder["image_size"], encoder["patch_size"]
    class_tokens = len(CLASS_TOKENS[encoder["model_type"]])
    return {
        "front_end": "image",
        "channels": encoder["num_channels"],
        "image_height": height,
        "image_width": width,
        "patch_height": patch_height,
        "patch_width": patch_width,
        "class_tokens": class_tokens,
        "max_source": class_tokens + (height // patch_height) * (width // patch_width),
    }


def encoder_fields(encoder: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of our config for the encoder's layers, whose sizes are not the decoder's."""
    return {
        "encoder_layers": encoder["num_hidden_layers"],
        "encoder_width": encoder["hidden_size"],
        "encoder_heads": encoder["num_attention_heads"],
        "encoder_d_ff": encoder["intermediate_size"],
        "encoder_norm": "pre",
        "encoder_activation": ACTIVATIONS[encoder["hidden_act"]],
        "encoder_norm_epsilon": encoder["layer_norm_eps"],
    }


def config_from_parts(
    encoder: Mapping[str, Any],
    decoder: Mapping[str, Any],
    tokens: Mapping[str, Any],
    generation: Mapping[str, Any],
    tie_output: bool,
    where: str,
) -> ModelConfig:
    """Our config. Whether the output is tied is given by the weights, not by the file."""
    start_name, start = start_field(tokens, generation)
    end = generation.get("eos_token_id")
    differs = encoder["hidden_size"] != decoder["d_model"]
    try:
        return ModelConfig(
            **image_fields(encoder),
            **encoder_fields(encoder),
            decoder_layers=decoder["decoder_layers"],
            heads=decoder["decoder_attention_heads"],
            d_model=decoder["d_model"],
            d_ff=decoder["decoder_ffn_dim"],
            source_vocab=0,
            target_vocab=decoder["vocab_size"],
            norm="post",
            positions="learned",
            activation=ACTIVATIONS[decoder["activation_function"]],
            share_embeddings=False,
            tie_output=tie_output,
            scale_embeddings=decoder["scale_embedding"],
            embedding_norm=decoder["layernorm_embedding"],
            project_states=differs and decoder.get("cross_attention_hidden_size") is None,
            max_target=decoder["max_position_embeddings"],
            pad_id=single_token(tokens["pad_token_id"], "pad_token_id", where),
            start_id=single_token(start, start_name, where),
            end_id=single_token(tokens["eos_token_id"] if end is None else end, "eos_token_id", where),
        )
    except ConfigError as error:
        raise config_problem(where, error) from error

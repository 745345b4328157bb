"""Hugging Face's config.json as one of our configs: a literal table of families; all else is refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seq2engine.common.json_files import read_object
from seq2engine.errors import CheckpointError, ConfigError

from ..config import ModelConfig, config_problem

ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "silu": "silu", "swish": "silu"}  # their name -> ours


@dataclass(frozen=True)
class Family:
    """Properties of a model_type that are not fields of config.json.

    `positions` is how its table comes about: "learned", or the name of a computed one. The first `offset` rows of a
    stored table are never read. `defaults` stand in for fields that a file does not name.
    """

    kind: str
    norm: str
    embedding_norm: bool
    positions: str
    offset: int
    defaults: Mapping[str, Any]


DEFAULTS: dict[str, Any] = {
    "vocab_size": 50265,
    "max_position_embeddings": 1024,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
    "d_model": 1024,
    "activation_function": "gelu",
    "scale_embedding": False,
    "tie_word_embeddings": True,
    "is_encoder_decoder": True,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
BLENDERBOT_DEFAULTS = {
    "vocab_size": 8008,
    "max_position_embeddings": 128,
    "encoder_layers": 2,
    "decoder_layers": 24,
    "encoder_attention_heads": 32,
    "decoder_attention_heads": 32,
    "encoder_ffn_dim": 10240,
    "decoder_ffn_dim": 10240,
    "d_model": 2560,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "decoder_start_token_id": 1,
}
MARIAN_DEFAULTS = {
    "vocab_size": 58101,
    "share_encoder_decoder_embeddings": True,
    "pad_token_id": 58100,
    "bos_token_id": None,
    "eos_token_id": 0,
    "decoder_start_token_id": 58100,
}
M2M_DEFAULTS = {"vocab_size": 128112, "activation_function": "relu", "scale_embedding": True}
PEGASUS_DEFAULTS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "decoder_start_token_id": 0}

FAMILIES = {  # model_type -> family
    "marian": Family("Marian", "post", False, "marian", 0, DEFAULTS | MARIAN_DEFAULTS),
    "bart": Family("BART", "post", True, "learned", 2, DEFAULTS),
    "mbart": Family("mBART", "pre", True, "learned", 2, DEFAULTS | {"decoder_start_token_id": None}),
    "m2m_100": Family("M2M100", "pre", False, "m2m", 0, DEFAULTS | M2M_DEFAULTS),
    "pegasus": Family("Pegasus", "pre", False, "marian", 0, DEFAULTS | PEGASUS_DEFAULTS),
    "blenderbot": Family("Blenderbot", "pre", False, "learned", 0, DEFAULTS | BLENDERBOT_DEFAULTS),
}


def read_json(path: Path) -> dict[str, Any]:
    """The fields of a JSON file."""
    try:
        return read_object(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be used ({error}); copy the model again") from error


def family_of(values: Mapping[str, Any], where: str, others: Iterable[str] = ()) -> Family:
    """The family of a file's model_type; `others` are the types that another importer reads."""
    name = values.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise CheckpointError(f"{where}: model_type is {name!r}, expected one of {', '.join((*FAMILIES, *others))}")
    return FAMILIES[name]


def settings_of(family: Family, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """All fields that matter, the family's own defaults included; everything that cannot be ours is listed.

    A token may be null, meaning none; for all other fields null means absent.
    """
    given = {name: value for name, value in values.items() if value is not None or name.endswith("_token_id")}
    settings = {**family.defaults, **given}
    problems = []
    for name, default in family.defaults.items():
        token = name.endswith("_token_id")
        if not (token or type(settings[name]) is type(default)):
            problems.append(f"{name} is {settings[name]!r}, expected {type(default).__name__}")
        elif token and type(settings[name]) not in (int, list, type(None)):
            problems.append(f"{name} is {settings[name]!r}, expected int")
    for name, wanted in required_values(family, settings).items():
        if settings.get(name, wanted) != wanted:
            problems.append(f"{name} is {settings[name]!r}, supported for {family.kind} is {wanted!r}")
    if settings["activation_function"] not in tuple(ACTIVATIONS):
        known = ", ".join(ACTIVATIONS)
        problems.append(f"activation_function is {settings['activation_function']!r}, supported are {known}")
    if problems:
        raise CheckpointError(f"{where}: " + "; ".join(problems))
    return settings


def required_values(family: Family, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a field must be if it is there: our encoder and decoder are alike, and a family has one structure.

    The structure's fields are of older files. The library itself no longer reads them; a file that differs was
    trained as another model than the one the library would make of it.
    """
    pre = family.norm == "pre"
    return {
        "decoder_attention_heads": settings["encoder_attention_heads"],
        "decoder_ffn_dim": settings["encoder_ffn_dim"],
        "is_encoder_decoder": True,
        "position_embedding_type": "absolute",
        "normalize_before": pre,
        "add_final_layer_norm": pre,
        "normalize_embedding": family.embedding_norm,
        "layernorm_embedding": family.embedding_norm,
        "static_position_embeddings": family.positions != "learned",
    }


def start_field(settings: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[str, Any]:
    """What the decoder is fed first, and its field, looked up in the order of `generate`.

    `generation` are the fields of generation_config.json (empty without that file). Where a file names no start token
    it is the bos token.
    """
    for fields in (generation, settings):
        for name in ("decoder_start_token_id", "bos_token_id"):
            if fields.get(name) is not None:
                return name, fields[name]
    return "decoder_start_token_id", None


def single_token(value: Any, name: str, where: str) -> int:
    """A token id; a list of one is accepted."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if type(value) is not int:
        raise CheckpointError(f"{where}: {name} is {value!r}, supported is one token id")
    return value


def config_from_settings(
    family: Family,
    settings: Mapping[str, Any],
    generation: Mapping[str, Any],
    share_embeddings: bool,
    tie_output: bool,
    output_bias: bool,
    where: str,
) -> ModelConfig:
    """Our config. Which tables are shared is given by the weights, not by the file."""
    length = settings["max_position_embeddings"]
    vocab = settings["vocab_size"]
    own_target = not settings.get("share_encoder_decoder_embeddings", True)
    end = generation.get("eos_token_id")
    start_name, start = start_field(settings, generation)
    try:
        return ModelConfig(
            encoder_layers=settings["encoder_layers"],
            decoder_layers=settings["decoder_layers"],
            heads=settings["encoder_attention_heads"],
            d_model=settings["d_model"],
            d_ff=settings["encoder_ffn_dim"],
            source_vocab=vocab,
            target_vocab=(settings.get("decoder_vocab_size") or vocab) if own_target else vocab,
            norm=family.norm,
            positions="learned",
            activation=ACTIVATIONS[settings["activation_function"]],
            share_embeddings=share_embeddings,
            tie_output=tie_output,
            scale_embeddings=settings["scale_embedding"],
            output_bias=output_bias,
            embedding_norm=family.embedding_norm,
            final_norm=False,
            max_source=length,
            max_target=length,
            pad_id=single_token(settings["pad_token_id"], "pad_token_id", where),
            start_id=single_token(start, start_name, where),
            end_id=single_token(settings["eos_token_id"] if end is None else end, "eos_token_id", where),
        )
    except ConfigError as error:
        raise config_problem(where, error) from error

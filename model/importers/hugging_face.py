"""Hugging Face's encoder-decoders (Marian, BART, mBART, M2M100 and NLLB, Pegasus, Blenderbot) as our checkpoints.

The six are one architecture with small differences, so one table of names serves all. What differs is in
`hugging_face_config.FAMILIES`. Every kind of positions becomes a table that is stored with the weights. Other
architectures have a module of their own: READERS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seq2engine.errors import CheckpointError

from ..checkpoint import model_from_weights
from ..config import ModelConfig, check_computed_positions
from ..tokenizers.importing import tokenizer_from_hugging_face
from .conversion.position_tables import m2m_positions, marian_positions
from .conversion.renames import layer_renames, renamed_weights
from .files.weights import read_weights
from .hugging_face_config import Family, config_from_settings, family_of, read_json, settings_of, start_field
from .hugging_face_generation import generation_from_files
from .imported import Imported, tokenizer_or_note
from .t5 import T5_FAMILIES, checkpoint_from_t5

CONFIG, GENERATION = "config.json", "generation_config.json"

# model_type -> what reads the folder, given the fields of its two files and how an error names them
READERS: dict[str, Callable[[Path, dict[str, Any], dict[str, Any] | None, str, str], Imported]] = {
    **dict.fromkeys(T5_FAMILIES, checkpoint_from_t5),
}
ELSEWHERE = ("whisper", "vision-encoder-decoder")  # model types that detect.py gives to whisper.py and trocr.py

SHARED = "model.shared.weight"
SOURCE = "model.encoder.embed_tokens.weight"
TARGET = "model.decoder.embed_tokens.weight"
OUTPUT = "lm_head.weight"
BIAS = "final_logits_bias"
POSITIONS = {
    "source_embedding.positions": "model.encoder.embed_positions.weight",
    "target_embedding.positions": "model.decoder.embed_positions.weight",
}
# In some old files, and not read by the library either: it computes M2M100's table itself.
UNREAD = {f"model.{part}.{name}" for part in ("encoder", "decoder") for name in ("embed_positions.weights", "version")}


def both(ours: str, *theirs: str) -> dict[str, tuple[str, ...]]:
    """The lines of a table for a part's weight and bias."""
    return {f"{ours}.{kind}": tuple(f"{name}.{kind}" for name in theirs) for kind in ("weight", "bias")}


def attention_and_feed_forward(ours: str, theirs: str) -> dict[str, tuple[str, ...]]:
    """What a layer of the encoder and one of the decoder have in common."""
    qkv = [f"{theirs}.self_attn.{name}_proj" for name in "qkv"]
    return {
        **both(f"{ours}.self_attn.qkv", *qkv),
        **both(f"{ours}.self_attn.out", f"{theirs}.self_attn.out_proj"),
        **both(f"{ours}.self_residual.norm", f"{theirs}.self_attn_layer_norm"),
        **both(f"{ours}.feed_forward.up", f"{theirs}.fc1"),
        **both(f"{ours}.feed_forward.down", f"{theirs}.fc2"),
        **both(f"{ours}.feed_residual.norm", f"{theirs}.final_layer_norm"),
    }


ENCODER_LAYER = attention_and_feed_forward("encoder.{i}", "model.encoder.layers.{i}")
DECODER_LAYER = {
    **attention_and_feed_forward("decoder.{i}", "model.decoder.layers.{i}"),
    **both("decoder.{i}.cross_attn.q", "model.decoder.layers.{i}.encoder_attn.q_proj"),
    **both(
        "decoder.{i}.cross_attn.kv",
        "model.decoder.layers.{i}.encoder_attn.k_proj",
        "model.decoder.layers.{i}.encoder_attn.v_proj",
    ),
    **both("decoder.{i}.cross_attn.out", "model.decoder.layers.{i}.encoder_attn.out_proj"),
    **both("decoder.{i}.cross_residual.norm", "model.decoder.layers.{i}.encoder_attn_layer_norm"),
}
EMBEDDING_NORMS = {
    **both("source_embedding.norm", "model.encoder.layernorm_embedding"),
    **both("target_embedding.norm", "model.decoder.layernorm_embedding"),
}
FINAL_NORMS = {**both("encoder_norm", "model.encoder.layer_norm"), **both("decoder_norm", "model.decoder.layer_norm")}


def checkpoint_from_hugging_face(source: Path) -> Imported:
    """A folder of config.json and weights, as `save_pretrained` writes it, as a model of ours."""
    where = str(source / CONFIG)
    if not (source / CONFIG).is_file():
        raise CheckpointError(f"{source} has no {CONFIG}; expected a Hugging Face model folder")
    values = read_json(source / CONFIG)
    own = read_json(source / GENERATION) if (source / GENERATION).is_file() else None
    own_where = where if own is None else str(source / GENERATION)
    if (name := values.get("model_type")) in tuple(READERS):
        return READERS[name](source, values, own, where, own_where)
    family = family_of(values, where, (*READERS, *ELSEWHERE))
    settings = settings_of(family, values, where)
    generation, notes = generation_from_files(values, own, own_where)

    weights = with_prefix(read_weights(source))
    tables, table_notes = embedding_tables(weights, settings, str(source))
    bias = weights.get(BIAS)
    config = config_from_settings(
        family,
        settings,
        own or {},
        share_embeddings=torch.equal(weights[tables[SOURCE]], weights[tables[TARGET]]),
        tie_output=torch.equal(weights[tables[OUTPUT]], weights[tables[TARGET]]),
        output_bias=bias is not None and bool(bias.any()),
        where=where,
    )
    if config.output_bias:
        weights[BIAS] = weights[BIAS].flatten()  # [1, V] -> [V]
    notes += table_notes + with_positions(weights, family, config, where)
    notes += language_notes(family, start_field(settings, own or {})[0], generation)

    renames = renames_of(family, config, tables)
    ours = renamed_weights(weights, renames, {SHARED, SOURCE, TARGET, OUTPUT, BIAS} | UNREAD, str(source))
    for name in POSITIONS:
        ours[name] = ours[name][family.offset :]
    tokenizer, why = tokenizer_or_note(lambda: tokenizer_from_hugging_face(source))
    model = model_from_weights(config, ours, str(source))
    return Imported(model, generation, (*notes, *why), family.kind, tokenizer)


def with_prefix(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Files of the bare model (BartModel and the like) lack the `model.` before every name."""
    if any(name.startswith("model.") for name in weights):
        return dict(weights)
    return {name if name in (OUTPUT, BIAS) else f"model.{name}": tensor for name, tensor in weights.items()}


def embedding_tables(
    weights: Mapping[str, Tensor], settings: Mapping[str, Any], where: str
) -> tuple[dict[str, str], list[str]]:
    """Which stored tensor is the source's table, the target's and the output's, and notes on those that should be one.

    Tied tables are stored once, under any one of their names, or several times. As in the library, a table stored
    under its own name is that table, whatever the config states about tying; a missing one is the one it is tied to.
    """
    shared = settings.get("share_encoder_decoder_embeddings", True)
    tied = settings["tie_word_embeddings"]
    outputs = (OUTPUT,) if tied else ()
    choices = {
        SOURCE: (SOURCE, SHARED, TARGET, *outputs) if shared else (SOURCE,),
        TARGET: (TARGET, SHARED, SOURCE, *outputs) if shared else (TARGET, *outputs),
        OUTPUT: (OUTPUT, SHARED, TARGET, SOURCE) if tied and shared else (OUTPUT, TARGET) if tied else (OUTPUT,),
    }
    tables = {}
    for name, stored in choices.items():
        present = [candidate for candidate in stored if candidate in weights]
        if not present:
            raise CheckpointError(f"{where} has no weights for {name}; expected one of {', '.join(stored)}")
        tables[name] = present[0]
    notes = []
    if tied:
        pairs = [(OUTPUT, TARGET), (SOURCE, TARGET)] if shared else [(OUTPUT, TARGET)]
        for one, other in pairs:
            if not torch.equal(weights[tables[one]], weights[tables[other]]):
                notes.append(f"the config ties {one} to {other}, but they differ in the file, so they stay two tables")
    unread = shared and SHARED in weights and SHARED not in tables.values()
    if unread and not torch.equal(weights[SHARED], weights[tables[TARGET]]):
        notes.append(f"{SHARED} differs from the tables of the encoder and the decoder, and neither reads it")
    return tables, notes


def with_positions(weights: dict[str, Tensor], family: Family, config: ModelConfig, where: str) -> list[str]:
    """Puts a computed position table where a learned one would be; an old file's own table stays, as in the library."""
    if family.positions == "learned":
        return []
    for ours, theirs in POSITIONS.items():
        if family.positions == "marian" and theirs in weights:
            continue
        check_computed_positions(config, where)
        if family.positions == "marian":
            weights[theirs] = marian_positions(config.max_source, config.d_model)
            continue
        table = m2m_positions(config.max_source, config.d_model, config.pad_id)
        if ours.startswith("target") and config.start_id == config.pad_id:
            table[0] = 0.0  # M2M100 gives a padding token no position, even where the decoder starts on one
        weights[theirs] = table
    return [f"{family.kind}'s sinusoidal positions are stored as a table of {config.max_source} positions"]


def language_notes(family: Family, start: str, generation: Mapping[str, Any]) -> list[str]:
    """Many multilingual models take the target language as first token; only the user knows it."""
    if family.kind == "M2M100" and "forced_bos" not in generation:
        return ["no forced_bos_token_id: the target language's token must be given as forced_bos when decoding"]
    if start == "bos_token_id":
        hint = "; an mBART starts on the target language's token" if family.kind == "mBART" else ""
        return [f"no decoder_start_token_id: decoding starts on the bos token{hint}"]
    return []


def renames_of(family: Family, config: ModelConfig, tables: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The table of names for one model: which of its stored weights become which of ours."""
    renames = {
        **layer_renames(ENCODER_LAYER, config.encoder_layers),
        **layer_renames(DECODER_LAYER, config.decoder_layers),
        **{ours: (theirs,) for ours, theirs in POSITIONS.items()},
        "target_embedding.tokens.weight": (tables[TARGET],),
    }
    if not config.share_embeddings:
        renames["source_embedding.tokens.weight"] = (tables[SOURCE],)
    if not config.tie_output:
        renames["output.weight"] = (tables[OUTPUT],)
    if config.output_bias:
        renames["output.bias"] = (BIAS,)
    if family.embedding_norm:
        renames |= EMBEDDING_NORMS
    if family.norm == "pre":
        renames |= FINAL_NORMS
    return renames

"""Our weights as a Hugging Face model folder, the form that every peer can read.

A model with relative positions becomes a T5, one that takes audio a Whisper. Of the others a post-norm model becomes a
Marian, a pre-norm one a Pegasus: these two families have the same structure as ours. Two vocabularies
become one, in which the source's ids are never output: a peer's token is ours plus `Ids.target`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from seq2engine.errors import RequestError
from seq2engine.model.config import ModelConfig
from seq2engine.model.importers.conversion.renames import layer_renames
from seq2engine.model.importers.hugging_face import (
    BIAS,
    DECODER_LAYER,
    ENCODER_LAYER,
    FINAL_NORMS,
    OUTPUT,
    POSITIONS,
    SHARED,
    SOURCE,
    TARGET,
)
from seq2engine.model.transformer import Embedding, Transformer

from .ids import Ids, cut_weights, ids_of
from .t5_from_model import t5_config, t5_problems, t5_weights
from .whisper_from_model import special_words, whisper_config, whisper_ids, whisper_problems, whisper_weights

FAMILIES = {  # norm -> architecture and model type
    "post": ("MarianMTModel", "marian"),
    "pre": ("PegasusForConditionalGeneration", "pegasus"),
}
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "silu": "swish"}
UNREACHABLE = -1e9  # a logit that never wins, and is a number in every precision a peer computes its output in


@dataclass(frozen=True)
class Family:
    """The conversion to a family: its missing features, and settings, ids and weights of the converted model."""

    problems: Callable[[ModelConfig], list[str]]
    ids: Callable[[ModelConfig], Ids]
    config: Callable[[ModelConfig, Ids], dict[str, Any]]
    weights: Callable[[Transformer, Ids], dict[str, Tensor]]


def family_of(config: ModelConfig) -> Family:
    if config.takes_audio:
        return Family(whisper_problems, whisper_ids, whisper_config, whisper_weights)
    if config.relative:
        return Family(t5_problems, ids_of, t5_config, t5_weights)
    return Family(what_no_family_has, ids_of, their_config, their_weights)


def hugging_face_from_model(model: Transformer, folder: Path) -> Ids:
    """Writes config.json, generation_config.json and model.safetensors into a folder that is there."""
    config = model.config
    family = family_of(config)
    if problems := family.problems(config):
        raise RequestError(f"the peers cannot run this model: {'; '.join(problems)}; leave out --peers")
    ids = family.ids(config)
    save_file(family.weights(model, ids), folder / "model.safetensors", metadata={"format": "pt"})
    settings = family.config(config, ids)
    (folder / "config.json").write_text(json.dumps(settings, indent=1))
    tokens = {name: settings[name] for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(tokens, indent=1))
    words = special_words(config) if config.takes_audio else {}
    (folder / "ids.json").write_text(json.dumps({**asdict(ids), "words": words}))
    return ids


def what_no_family_has(config: ModelConfig) -> list[str]:
    found = []
    if config.takes_images:
        found.append("it takes images")
    if config.positions == "rotary":
        found.append("it has rotary positions")
    if config.embedding_norm:
        found.append("it has a norm after the embeddings")
    if config.final_norm and config.norm == "post":
        found.append("it is post-norm with a final norm")
    if config.norm_epsilon != 1e-5:
        found.append(f"its norm_epsilon is {config.norm_epsilon}, theirs 1e-05")
    if config.max_source != config.max_target:
        found.append(f"its position tables have {config.max_source} and {config.max_target} rows, theirs one length")
    return found


def their_config(config: ModelConfig, ids: Ids) -> dict[str, Any]:
    architecture, kind = FAMILIES[config.norm]
    return {
        "architectures": [architecture],
        "model_type": kind,
        "dtype": "float32",
        "d_model": config.d_model,
        "encoder_layers": config.encoder_layers,
        "decoder_layers": config.decoder_layers,
        "num_hidden_layers": config.encoder_layers,
        "encoder_attention_heads": config.heads,
        "decoder_attention_heads": config.heads,
        "encoder_ffn_dim": config.d_ff,
        "decoder_ffn_dim": config.d_ff,
        "vocab_size": ids.vocab,
        "decoder_vocab_size": ids.vocab,
        "share_encoder_decoder_embeddings": True,
        "tie_word_embeddings": config.tie_output,
        "max_position_embeddings": config.max_source,
        "activation_function": ACTIVATIONS[config.activation],
        "scale_embedding": config.scale_embeddings,
        "static_position_embeddings": True,
        "is_encoder_decoder": True,
        "use_cache": True,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "pad_token_id": ids.pad,
        "eos_token_id": ids.end,
        "decoder_start_token_id": ids.start,
        "bos_token_id": None,
        "forced_eos_token_id": None,
        "bad_words_ids": None,
    }


def their_weights(model: Transformer, ids: Ids) -> dict[str, Tensor]:
    config = model.config
    renames = {
        **layer_renames(ENCODER_LAYER, config.encoder_layers),
        **layer_renames(DECODER_LAYER, config.decoder_layers),
    }
    if config.norm == "pre":
        renames |= FINAL_NORMS
    theirs = cut_weights(model, renames)
    embeddings = {"source": model.source_embedding, "target": model.target_embedding}
    for ours_name, theirs_name in POSITIONS.items():
        table = embeddings[ours_name.split("_")[0]].positions
        assert table is not None
        theirs[theirs_name] = table.detach().clone()
    target = model.target_embedding.tokens.weight.detach()
    source = cast(Embedding, model.source_embedding).tokens.weight.detach()
    tables = [target] if config.share_embeddings else [source, target]
    theirs[SHARED] = torch.cat(tables)
    bias = torch.full((1, ids.vocab), UNREACHABLE)
    bias[0, ids.target :] = 0.0 if model.output.bias is None else model.output.bias.detach()
    theirs[BIAS] = bias
    if not config.tie_output:  # then the library ties the two other tables to the shared one no longer, either
        theirs |= {name: theirs[SHARED].clone() for name in (SOURCE, TARGET)}
        theirs[OUTPUT] = torch.cat([torch.zeros(ids.target, config.d_model), model.output.weight.detach()])
    return theirs

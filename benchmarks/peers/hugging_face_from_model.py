"""Our weights as a Hugging Face model folder, the form that every peer can read.

A post-norm model becomes a Marian, a pre-norm one a Pegasus: of all families these two have what ours have, and
nothing besides. Two vocabularies become one, the target's ids behind the source's, with the source's ids out of reach
of the output: a peer's token is ours plus `Ids.target`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from seq2engine.errors import RequestError
from seq2engine.model.config import ModelConfig
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
from seq2engine.model.importers.renames import layer_renames
from seq2engine.model.transformer import Transformer

FAMILIES = {  # norm -> architecture and model type
    "post": ("MarianMTModel", "marian"),
    "pre": ("PegasusForConditionalGeneration", "pegasus"),
}
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "silu": "swish"}
UNREACHABLE = -1e9  # a logit that never wins, and is a number in every precision a peer computes its output in


@dataclass(frozen=True)
class Ids:
    """What a peer adds to our ids, and its special tokens."""

    source: int
    target: int
    vocab: int
    pad: int
    start: int
    end: int


def ids_of(config: ModelConfig) -> Ids:
    shift = 0 if config.share_embeddings else config.source_vocab
    return Ids(
        source=0,
        target=shift,
        vocab=shift + config.target_vocab,
        pad=shift + config.pad_id,
        start=shift + config.start_id,
        end=shift + config.end_id,
    )


def hugging_face_from_model(model: Transformer, folder: Path) -> Ids:
    """Writes config.json, generation_config.json and model.safetensors into a folder that is there."""
    config = model.config
    if problems := what_no_family_has(config):
        raise RequestError(f"the peers cannot run this model: {'; '.join(problems)}; leave out --peers")
    ids = ids_of(config)
    save_file(their_weights(model, ids), folder / "model.safetensors", metadata={"format": "pt"})
    settings = their_config(config, ids)
    (folder / "config.json").write_text(json.dumps(settings, indent=1))
    tokens = {name: settings[name] for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(tokens, indent=1))
    (folder / "ids.json").write_text(json.dumps(asdict(ids)))
    return ids


def what_no_family_has(config: ModelConfig) -> list[str]:
    found = []
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
    """Our weights under their names; what we keep in one tensor (q|k|v) is cut into its parts."""
    config = model.config
    ours = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    renames = {
        **layer_renames(ENCODER_LAYER, config.encoder_layers),
        **layer_renames(DECODER_LAYER, config.decoder_layers),
    }
    if config.norm == "pre":
        renames |= FINAL_NORMS
    theirs: dict[str, Tensor] = {}
    for name, parts in renames.items():
        pieces = ours[name].chunk(len(parts))
        theirs |= {part: piece.clone() for part, piece in zip(parts, pieces, strict=True)}

    embeddings = {"source": model.source_embedding, "target": model.target_embedding}
    for ours_name, theirs_name in POSITIONS.items():
        table = embeddings[ours_name.split("_")[0]].positions
        assert table is not None
        theirs[theirs_name] = table.detach().clone()
    target = model.target_embedding.tokens.weight.detach()
    tables = [target] if config.share_embeddings else [model.source_embedding.tokens.weight.detach(), target]
    theirs[SHARED] = torch.cat(tables)
    bias = torch.full((1, ids.vocab), UNREACHABLE)
    bias[0, ids.target :] = 0.0 if model.output.bias is None else model.output.bias.detach()
    theirs[BIAS] = bias
    if not config.tie_output:  # then the library ties the two other tables to the shared one no longer, either
        theirs |= {name: theirs[SHARED].clone() for name in (SOURCE, TARGET)}
        theirs[OUTPUT] = torch.cat([torch.zeros(ids.target, config.d_model), model.output.weight.detach()])
    return theirs

"""A model that takes audio as a Hugging Face Whisper.

Peers know the special tokens of OpenAI's vocabularies only by their names, so the vocabulary must be one of those.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from seq2engine.model.config import ModelConfig
from seq2engine.model.importers.conversion.renames import layer_renames
from seq2engine.model.importers.hugging_face import DECODER_LAYER, ENCODER_LAYER, FINAL_NORMS
from seq2engine.model.importers.whisper import FRONT_END
from seq2engine.model.transformer import Transformer
from seq2engine.model.whisper_tokens import layout_of

from ..cases import audio_prompt
from .ids import Ids, cut_weights, ids_of


def whisper_problems(config: ModelConfig) -> list[str]:
    """What a Whisper does not have."""
    wanted: dict[str, object] = {
        "norm": "pre",
        "norm_kind": "layer",
        "activation": "gelu",
        "gated": False,
        "biases": True,
        "tie_output": True,
        "scale_attention": True,
        "scale_embeddings": False,
        "embedding_norm": False,
        "output_bias": False,
        "norm_epsilon": 1e-5,
    }
    found = [
        f"its {name} is {getattr(config, name)}, a Whisper's {value}"
        for name, value in wanted.items()
        if getattr(config, name) != value
    ]
    if layout_of(config.target_vocab) is None:
        found.append(f"its vocabulary is {config.target_vocab}, a Whisper's 51864, 51865 or 51866")
    return found


def whisper_ids(config: ModelConfig) -> Ids:
    return dataclasses.replace(ids_of(config), source=0, target=0, prompt=audio_prompt(config))


def whisper_config(config: ModelConfig, ids: Ids) -> dict[str, Any]:
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "dtype": "float32",
        "d_model": config.d_model,
        "num_mel_bins": config.mels,
        "encoder_layers": config.encoder_layers,
        "decoder_layers": config.decoder_layers,
        "encoder_attention_heads": config.heads,
        "decoder_attention_heads": config.heads,
        "encoder_ffn_dim": config.d_ff,
        "decoder_ffn_dim": config.d_ff,
        "vocab_size": config.target_vocab,
        "max_source_positions": config.max_source,
        "max_target_positions": config.max_target,
        "activation_function": "gelu",
        "scale_embedding": False,
        "is_encoder_decoder": True,
        "use_cache": True,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "pad_token_id": ids.pad,
        "bos_token_id": ids.end,
        "eos_token_id": ids.end,
        "decoder_start_token_id": ids.start,
    }


def whisper_weights(model: Transformer, ids: Ids) -> dict[str, Tensor]:
    config = model.config
    theirs = cut_weights(
        model,
        {
            **FRONT_END,
            **FINAL_NORMS,
            **layer_renames(ENCODER_LAYER, config.encoder_layers),
            **layer_renames(DECODER_LAYER, config.decoder_layers),
        },
    )
    # Keys have no bias there. Of one query, it adds the same to every score, so attention is the same without it.
    return {name: tensor for name, tensor in theirs.items() if not name.endswith(".k_proj.bias")}


def special_words(config: ModelConfig) -> dict[int, str]:
    """The names of special tokens, by their ids."""
    layout = layout_of(config.target_vocab)
    assert layout is not None
    return dict(enumerate(layout.special_tokens(), start=layout.end))

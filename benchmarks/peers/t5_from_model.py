"""A model with relative positions as a Hugging Face T5, or a UMT5 where every layer has distances of its own.

The library sorts distances into buckets. Ours are any table by distance, so there are as many buckets as it takes for
every distance to have its own: a quarter of them are exact on either side of the encoder, half in the decoder.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seq2engine.model.config import ModelConfig
from seq2engine.model.importers.t5 import (
    ACTIVATIONS,
    BUCKETS,
    OUTPUT,
    SHARED,
    SOURCE,
    TARGET,
    layers_with_distances,
    renames_of,
)
from seq2engine.model.transformer import Transformer

from .ids import Ids, cut_weights

EPSILON = 1e-6  # CTranslate2's, of every RMS norm


def t5_problems(config: ModelConfig) -> list[str]:
    """What a T5 does not have."""
    wanted: dict[str, object] = {
        "norm": "pre",
        "norm_kind": "rms",
        "biases": False,
        "scale_attention": False,
        "scale_embeddings": False,
        "share_embeddings": True,
        "embedding_norm": False,
        "output_bias": False,
        "norm_epsilon": EPSILON,
    }
    found = [
        f"its {name} is {getattr(config, name)}, a T5's {value}"
        for name, value in wanted.items()
        if getattr(config, name) != value
    ]
    if config.distances_per_layer and not config.scale_output:
        found.append("every layer has its own distances and the output is not scaled, a UMT5's always is")
    return found


def t5_config(config: ModelConfig, ids: Ids) -> dict[str, Any]:
    kind = "umt5" if config.distances_per_layer else "t5"
    activation = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config.activation)
    return {
        "architectures": [f"{kind.upper()}ForConditionalGeneration"],
        "model_type": kind,
        "dtype": "float32",
        "d_model": config.d_model,
        "d_kv": config.head_dim,
        "d_ff": config.d_ff,
        "num_layers": config.encoder_layers,
        "num_decoder_layers": config.decoder_layers,
        "num_heads": config.heads,
        "vocab_size": ids.vocab,
        "relative_attention_num_buckets": buckets_of(config),
        "relative_attention_max_distance": 2 * buckets_of(config),
        "layer_norm_epsilon": config.norm_epsilon,
        "feed_forward_proj": f"gated-{activation}" if config.gated else activation,
        "dense_act_fn": activation,
        "is_gated_act": config.gated,
        "tie_word_embeddings": config.scale_output,  # what the library reads the flag for
        "is_encoder_decoder": True,
        "use_cache": True,
        "dropout_rate": 0.0,
        "pad_token_id": ids.pad,
        "eos_token_id": ids.end,
        "decoder_start_token_id": ids.start,
    }


def buckets_of(config: ModelConfig) -> int:
    return 4 * (config.max_distance + 1)


def t5_weights(model: Transformer, ids: Ids) -> dict[str, Tensor]:
    config = model.config
    renames = renames_of(config, {SOURCE: SHARED, TARGET: SHARED, OUTPUT: OUTPUT})
    distances = {f"{side}_distances.table" for side in ("encoder", "decoder")}
    theirs = cut_weights(model, {ours: names for ours, names in renames.items() if ours not in distances})
    theirs[OUTPUT] = model.output.weight.detach().clone()  # also where it is tied
    for side in ("encoder", "decoder"):
        table = model.state_dict()[f"{side}_distances.table"]
        layers = layers_with_distances(config, side)
        for layer, own in enumerate(table[rows_by_bucket(config, side == "encoder")].chunk(layers, dim=1)):
            theirs[BUCKETS.format(side=side, i=layer)] = own.clone()
    return theirs


def rows_by_bucket(config: ModelConfig, ahead: bool) -> Tensor:
    """The row of our table for every bucket of the library.

    In the encoder its first half are keys at and before the query, from near to far, and its second half those after.
    """
    most, half = config.max_distance, buckets_of(config) // 2
    if not ahead:
        return torch.arange(2 * half).clamp(max=most)
    far = torch.arange(half).clamp(max=most)
    return torch.cat([far, -far]) + most

"""Models with numbers that stand out, as trained checkpoints have them: nothing of it may hide a defect."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import torch

from seq2engine.export.artifact.bundle import Bundle
from seq2engine.exporting import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.config import ModelConfig
from seq2engine.model.transformer import Transformer
from support.mutations import Mutation
from support.parity_cases import SMALL

BIASED = dataclasses.replace(SMALL, output_bias=True)
MANY = slice(SMALL.target_vocab // 3, None)  # two thirds of the vocabulary


def masked(tokens: slice, value: float) -> Callable[[Transformer], None]:
    def edit(model: Transformer) -> None:
        model.output.bias[tokens] = value

    return edit


def huge_weight(model: Transformer) -> None:
    """One channel of the encoder states, and of one layer's values, is some thousand times as large as the others."""
    model.encoder[1].feed_residual.norm.weight[9] = 3e3
    for layer in model.decoder:
        layer.cross_attn.kv.weight[:, 9] = 0.0
    model.decoder[1].cross_attn.kv.weight[-3, 9] = 1.0
    model.decoder[1].cross_attn.out.weight[:, -3] *= 1e-3


def huge_activation(model: Transformer) -> None:
    """One channel of the residual stream."""
    model.decoder[0].feed_forward.down.bias[7] = 50.0


def dead_channel(model: Transformer) -> None:
    model.encoder[1].feed_residual.norm.weight[5] = 0.0
    model.encoder[1].feed_residual.norm.bias[5] = 0.0
    model.decoder[0].cross_attn.kv.weight[3] = 0.0
    model.decoder[0].cross_attn.kv.bias[3] = 0.0


def constant_row(model: Transformer) -> None:
    """Some tokens have an embedding of one number, or of zeros."""
    for table in (model.source_embedding.tokens, model.target_embedding.tokens):
        table.weight[8] = 0.1
        table.weight[11] = 0.0


OUTLIERS: dict[str, Callable[[Transformer], None]] = {
    **{f"one token {value:g}": masked(slice(-1, None), value) for value in (-1e9, -1e4, -math.inf)},
    **{f"many tokens {value:g}": masked(MANY, value) for value in (-1e9, -1e4, -math.inf)},
    "a huge weight": huge_weight,
    "a huge activation": huge_activation,
    "a dead channel": dead_channel,
    "a constant row": constant_row,
}


@torch.no_grad()
def outlier_bundle(
    outlier: str, folder: Path, precisions: tuple[str, ...], config: ModelConfig = BIASED, seed: int = 3
) -> Bundle:
    model = random_model(config, seed)
    OUTLIERS[outlier](model)
    return onnx_from_model(model, folder, precisions)


def config_of(mutation: Mutation) -> ModelConfig:
    return dataclasses.replace(BIASED, **dict(mutation.config))  # type: ignore[arg-type]

"""A small model whose greedy decodes are worth comparing: each source has its own output, of its own length."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.config import ModelConfig
from seq2engine.model.presets import PRESETS
from seq2engine.model.transformer import Transformer

VOCAB, LONGEST = 64, 128
CONFIG = dataclasses.replace(
    PRESETS["tiny"],
    norm="pre",
    positions="learned",
    tie_output=False,
    share_embeddings=False,
    source_vocab=VOCAB,
    target_vocab=VOCAB,
    max_source=16,
    max_target=LONGEST,
    end_id=35,  # a token that most of its outputs come to, sooner or later
)
LARGER = {"cross_attn": 6**0.5, "self_attn": 2.0, "feed_forward": 2.0}  # weights of the decoder, so that they matter


def lively_model(config: ModelConfig = CONFIG) -> Transformer:
    model = random_model(config, 12)
    with torch.no_grad():
        model.get_parameter("target_embedding.positions").mul_(4)
        for name, weight in model.named_parameters():
            if name.startswith("decoder") and weight.dim() > 1:
                weight.mul_(next((factor for part, factor in LARGER.items() if part in name), 1.0))
    return model


def lively_bundle(folder: Path, precisions: Sequence[str] = ("fp32", "w8a8"), config: ModelConfig = CONFIG) -> Bundle:
    return onnx_from_model(lively_model(config), folder, tuple(precisions))


def lively_sources(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, rng.integers(1, 16)).tolist() for _ in range(count)]

"""Small models in double, sources and targets for them, and decodes of one token at a time."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from seq2engine.model.checkpoint import random_model
from seq2engine.model.config import ModelConfig
from seq2engine.model.layers import KeyValue, Store, append_slots, write_slots
from seq2engine.model.transformer import Transformer
from support.rounding import tensor_error

VOCAB, PAD, START = 13, 0, 1
NORMS, POSITIONS = ("post", "pre"), ("sinusoidal", "learned", "rotary", "relative")
each_norm = pytest.mark.parametrize("norm", NORMS)
each_positions = pytest.mark.parametrize("positions", POSITIONS)
each_store = pytest.mark.parametrize("store", [write_slots, append_slots], ids=["static", "growing"])
seeds = st.integers(0, 2**31)
# The variants that are not a matter of norm and positions, each at least once.
VARIANTS = [
    {"tie_output": False},
    {"output_bias": True},
    {"tie_output": False, "output_bias": True, "activation": "silu"},
    {"activation": "gelu"},
    {"scale_embeddings": False},
    {"share_embeddings": False, "source_vocab": 7},
    {"encoder_layers": 1, "decoder_layers": 3, "norm": "pre", "positions": "rotary"},
    {"heads": 1, "norm_epsilon": 1e-3},
    {"norm_kind": "rms", "d_kv": 5, "biases": False, "scale_attention": False, "scale_output": True},
    {"gated": True, "activation": "gelu_tanh", "positions": "relative", "max_distance": 3},
    {"positions": "relative", "distances_per_layer": True, "norm": "pre", "norm_kind": "rms", "gated": True},
]


def small_config(**values: object) -> ModelConfig:
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "heads": 2, "d_model": 16, "d_ff": 24, "max_source": 12}
    return ModelConfig(**sizes | {"source_vocab": VOCAB, "target_vocab": VOCAB, "max_target": 8} | values)


def new_model(**values: object) -> Transformer:
    """In double, so that a difference is a mistake and not rounding.

    Queries and keys are short, so that attention is spread out: where it picks one slot, a wrong mask may not show.
    """
    model = random_model(small_config(**values), seed=1).double().requires_grad_(False)
    for layer in (*model.encoder, *model.decoder):
        layer.self_attn.qkv.weight *= 0.3
    for layer in model.decoder:
        layer.cross_attn.q.weight *= 0.3
    return model


small_model = cache(new_model)  # for tests that leave it as it is


def random_ids(*shape: int, seed: int, vocab: int = VOCAB) -> Tensor:
    return torch.randint(3, vocab, shape, generator=torch.Generator().manual_seed(seed))


def mask_of(lengths: list[int], width: int) -> Tensor:
    """[B, width], True where a source has a token."""
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def some_sources(model: Transformer) -> tuple[Tensor, Tensor]:
    """Three sources of lengths 5, 2 and 4."""
    mask = mask_of([5, 2, 4], 5)
    return random_ids(3, 5, seed=0, vocab=model.config.source_vocab).masked_fill(~mask, PAD), mask


def some_targets(length: int, batch: int = 3) -> Tensor:
    return torch.cat((torch.full((batch, 1), START), random_ids(batch, length - 1, seed=9)), dim=1)


def empty_cache(model: Transformer, batch: int, slots: int, store: Store) -> list[KeyValue]:
    """A growing cache of no slots, or a static one full of what another decode may have left there."""
    config = model.config
    shape = (batch, config.heads, 0 if store is append_slots else slots, config.head_dim)
    return [(torch.full(shape, 1e3).double(), torch.full(shape, -1e3).double()) for _ in model.decoder]


def stepped(
    model: Transformer, target: Tensor, store: Store, first_slot: list[int] | None = None, first_position: int = 0
) -> Tensor:
    """The logits [B, T, V] of a target that is fed one token at a time."""
    batch, length = target.shape
    source, source_mask = some_sources(model)
    _, cross = model.encode(source, source_mask)
    offset = torch.tensor(first_slot or [0] * batch)
    slots = length + int(offset.max())
    cache = empty_cache(model, batch, slots, store)
    logits = []
    for t in range(length):
        index = torch.arange(t + 1 if store is append_slots else slots)
        self_mask = ((index >= offset[:, None]) & (index <= offset[:, None] + t))[:, None]  # [B, 1, L]
        position = torch.full((batch,), first_position + t)
        places = first_position + index - offset[:, None]  # [B, L]: what stands in every slot, if anything does
        now, cache = model.decode_step(
            target[:, t : t + 1], position, offset + t, self_mask, source_mask, cross, cache, store, places
        )
        logits.append(now)
    return torch.cat(logits, dim=1)


def assert_same_numbers(model: Transformer, found: Tensor, expected: Tensor, precision: str = "fp64") -> None:
    """Logits or states of the model, computed in two ways."""
    torch.testing.assert_close(found, expected, rtol=0, atol=tensor_error(model.config, expected, precision))


def teacher_forced(model: Transformer, target: Tensor) -> Tensor:
    return model(*some_sources(model), target)

"""The Transformer of "Attention is all you need", written to be exported.

Three verbs over the same layers: `encode` once per source, `decode_step` once per token, `forward` for teacher
forcing. The cache comes in and goes out as arguments. Shapes: B sources, K beams, S source length, T target length,
L cache slots, H heads, E head dim, D model, V vocab.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from .config import ModelConfig
from .layers import (
    CrossAttention,
    FeedForward,
    KeyValue,
    SelfAttention,
    Store,
    append_slots,
    rotary_table,
    sinusoids,
    write_slots,
)


class Embedding(nn.Module):
    """Token ids to vectors, scaled and with absolute positions added where the model has them."""

    def __init__(self, config: ModelConfig, vocab: int, length: int):
        super().__init__()
        self.scale = config.d_model**0.5 if config.scale_embeddings else 1.0
        self.tokens = nn.Embedding(vocab, config.d_model)
        self.norm = norm_or_nothing(config, config.embedding_norm)
        self.dropout = nn.Dropout(config.dropout)
        self.positions: Tensor | None
        if config.positions == "learned":
            self.positions = nn.Parameter(torch.empty(length, config.d_model))
        else:
            table = sinusoids(length, config.d_model) if config.positions == "sinusoidal" else None
            self.register_buffer("positions", table, persistent=False)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """ids [B,Q], positions [B or 1, Q or 1] -> [B,Q,D]."""
        x = self.tokens(ids)
        if self.scale != 1.0:
            x = x * self.scale
        return self.dropout(self.norm(x if self.positions is None else x + self.positions[positions]))


def norm_or_nothing(config: ModelConfig, wanted: bool) -> nn.Module:
    return nn.LayerNorm(config.d_model, config.norm_epsilon) if wanted else nn.Identity()


class Residual(nn.Module):
    """Skip connection and layer norm around a part, before it (pre) or after the sum (post)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.pre = config.norm == "pre"
        self.norm = nn.LayerNorm(config.d_model, eps=config.norm_epsilon)
        self.dropout = nn.Dropout(config.dropout)

    def enter(self, x: Tensor) -> Tensor:
        return self.norm(x) if self.pre else x

    def leave(self, x: Tensor, part: Tensor) -> Tensor:
        part = self.dropout(part)
        return x + part if self.pre else self.norm(x + part)


class EncoderLayer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.self_attn = SelfAttention(config)
        self.feed_forward = FeedForward(config)
        self.self_residual = Residual(config)
        self.feed_residual = Residual(config)

    def forward(self, x: Tensor, mask: Tensor, rotary: Tensor | None) -> Tensor:
        attended, _ = self.self_attn(self.self_residual.enter(x), mask, rotary)
        x = self.self_residual.leave(x, attended)
        return self.feed_residual.leave(x, self.feed_forward(self.feed_residual.enter(x)))


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.self_attn = SelfAttention(config)
        self.cross_attn = CrossAttention(config)
        self.feed_forward = FeedForward(config)
        self.self_residual = Residual(config)
        self.cross_residual = Residual(config)
        self.feed_residual = Residual(config)

    def forward(
        self,
        x: Tensor,
        rotary: Tensor | None,
        self_mask: Tensor,
        cache: KeyValue,
        write_index: Tensor,
        store: Store,
        source_mask: Tensor,
        cross: KeyValue,
    ) -> tuple[Tensor, KeyValue]:
        """x [B,Q,D], masks [B,1,Q,L] and [B,1,1,S] -> x [B,Q,D] and the cache with Q new slots."""

        def remember(k: Tensor, v: Tensor) -> KeyValue:
            return store(cache[0], k, write_index), store(cache[1], v, write_index)

        attended, updated = self.self_attn(self.self_residual.enter(x), self_mask, rotary, remember)
        x = self.self_residual.leave(x, attended)
        x = self.cross_residual.leave(x, self.cross_attn(self.cross_residual.enter(x), *cross, source_mask))
        return self.feed_residual.leave(x, self.feed_forward(self.feed_residual.enter(x))), updated


class Transformer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        length = max(config.max_source, config.max_target)
        self.target_embedding = Embedding(config, config.target_vocab, config.max_target)
        self.source_embedding = Embedding(config, config.source_vocab, config.max_source)
        if config.share_embeddings:
            self.source_embedding.tokens = self.target_embedding.tokens
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        final = config.final_norm or config.norm == "pre"  # a pre-norm stack ends un-normalised: it needs one norm more
        self.encoder_norm = norm_or_nothing(config, final)
        self.decoder_norm = norm_or_nothing(config, final)
        self.output = nn.Linear(config.d_model, config.target_vocab, bias=config.output_bias)
        if config.tie_output:
            self.output.weight = self.target_embedding.tokens.weight
        self.rotary: Tensor | None
        table = rotary_table(length, config.head_dim) if config.positions == "rotary" else None
        self.register_buffer("rotary", table, persistent=False)

    def rotations(self, positions: Tensor) -> Tensor | None:
        """positions [B or 1, Q] -> cos and sin [B or 1, Q, 2, E] of a rotary model."""
        return None if self.rotary is None else self.rotary[positions]

    def encode(self, source_ids: Tensor, source_mask: Tensor) -> tuple[Tensor, list[KeyValue]]:
        """ids and mask [B,S] -> encoder states [B,S,D] and every decoder layer's cross K/V [B,H,S,E]."""
        positions = torch.arange(source_ids.shape[1], device=source_ids.device)[None]  # [1, S]
        x = self.source_embedding(source_ids, positions)
        mask = source_mask[:, None, None, :]  # [B, S] -> [B, 1, 1, S]
        rotary = self.rotations(positions)
        for layer in self.encoder:
            x = layer(x, mask, rotary)
        states = self.encoder_norm(x)
        layers = cast(Iterable[DecoderLayer], self.decoder)
        return states, [layer.cross_attn.project_source(states) for layer in layers]

    def decode_step(
        self,
        tokens: Tensor,
        position: Tensor,
        write_index: Tensor,
        self_mask: Tensor,
        source_mask: Tensor,
        cross: Sequence[KeyValue],
        cache: Sequence[KeyValue],
        store: Store = write_slots,
    ) -> tuple[Tensor, list[KeyValue]]:
        """One token for each of K beams of B sources.

        tokens [B,K], position [B] (the K beams of a source stand at the same one), write_index [B], self_mask [B,K,L]
        (which slots are a beam's ancestors or itself), source_mask [B,S] -> logits [B,K,V] and the cache.
        """
        return self._decode(tokens, position[:, None], write_index, self_mask, source_mask, cross, cache, store)

    def forward(self, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor) -> Tensor:
        """Teacher forcing: target_ids [B,T] are the decoder's inputs, the start token first -> logits [B,T,V]."""
        _, cross = self.encode(source_ids, source_mask)
        batch, length = target_ids.shape
        positions = torch.arange(length, device=target_ids.device)
        causal = (positions[:, None] >= positions)[None].expand(batch, -1, -1)  # [B, T, T]
        empty = cross[0][0][:, :, :0]  # [B, H, 0, E]: a growing cache that holds nothing yet
        cache = [(empty, empty)] * len(self.decoder)
        start = torch.zeros(batch, dtype=torch.int64, device=target_ids.device)
        return self._decode(target_ids, positions[None], start, causal, source_mask, cross, cache, append_slots)[0]

    def _decode(
        self,
        ids: Tensor,
        positions: Tensor,
        write_index: Tensor,
        self_mask: Tensor,
        source_mask: Tensor,
        cross: Sequence[KeyValue],
        cache: Sequence[KeyValue],
        store: Store,
    ) -> tuple[Tensor, list[KeyValue]]:
        x = self.target_embedding(ids, positions)
        rotary = self.rotations(positions)
        self_mask = self_mask[:, None]  # [B, Q, L] -> [B, 1, Q, L]
        source_mask = source_mask[:, None, None, :]  # [B, S] -> [B, 1, 1, S]
        updated = []
        for layer, layer_cache, layer_cross in zip(self.decoder, cache, cross, strict=True):
            x, layer_cache = layer(x, rotary, self_mask, layer_cache, write_index, store, source_mask, layer_cross)
            updated.append(layer_cache)
        return self.output(self.decoder_norm(x)), updated

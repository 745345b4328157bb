"""The Transformer of "Attention is all you need", written to be exported.

Three methods over the same layers: `encode` once per source, `decode_step` once per token, `forward` for teacher
forcing. The cache comes in and goes out as arguments. Shapes: B sources, K beams, S source length, T target length,
L cache slots, H heads, E head dim, D model, V vocab.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from .config import FRAMES, ModelConfig
from .layers import (
    CrossAttention,
    DistanceBias,
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


class AudioFeatures(nn.Module):
    """Log-mel features to vectors with positions: two convolutions, of which the second halves the frames."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.first = nn.Conv1d(config.mels, config.d_model, kernel_size=3, padding=1)
        self.second = nn.Conv1d(config.d_model, config.d_model, kernel_size=3, stride=FRAMES, padding=1)
        self.activation = nn.GELU()
        self.dropout = nn.Dropout(config.dropout)
        self.positions = nn.Parameter(torch.empty(config.max_source, config.d_model))

    def forward(self, features: Tensor, positions: Tensor) -> Tensor:
        """features [B,mels,2S], positions [1,S] -> [B,S,D]."""
        x = self.activation(self.second(self.activation(self.first(features))))
        return self.dropout(x.transpose(1, 2) + self.positions[positions])  # [B, D, S] -> [B, S, D]


class ImagePatches(nn.Module):
    """Pixels to vectors with positions: a product for each patch of an image, after learned vectors of no patch."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        size = (config.patch_height, config.patch_width)
        self.patches = nn.Conv2d(config.channels, config.d_model, kernel_size=size, stride=size)
        self.class_tokens = nn.Parameter(torch.empty(config.class_tokens, config.d_model))
        self.dropout = nn.Dropout(config.dropout)
        self.positions = nn.Parameter(torch.empty(config.max_source, config.d_model))

    def forward(self, pixels: Tensor, positions: Tensor) -> Tensor:
        """pixels [B,C,height,width] -> [B,S,D]. All images have one size, and so every position."""
        x = self.patches(pixels).flatten(2).transpose(1, 2)  # [B, D, rows, columns] -> [B, patches, D]
        first = self.class_tokens[None].expand(x.shape[0], -1, -1)
        return self.dropout(torch.cat((first, x), dim=1) + self.positions)


def norm_of(config: ModelConfig) -> nn.Module:
    kind = nn.RMSNorm if config.norm_kind == "rms" else nn.LayerNorm
    return kind(config.d_model, eps=config.norm_epsilon)


def norm_or_nothing(config: ModelConfig, wanted: bool) -> nn.Module:
    return norm_of(config) if wanted else nn.Identity()


def final_norm(config: ModelConfig) -> nn.Module:
    """The norm after the last layer. A pre-norm stack ends un-normalised, so it always has one."""
    return norm_or_nothing(config, config.final_norm or config.norm == "pre")


class Residual(nn.Module):
    """Skip connection and norm around a part, before it (pre) or after the sum (post)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.pre = config.norm == "pre"
        self.norm = norm_of(config)
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

    def forward(self, x: Tensor, mask: Tensor, rotary: Tensor | None, bias: Tensor | None) -> Tensor:
        attended, _ = self.self_attn(self.self_residual.enter(x), mask, rotary, bias=bias)
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
        bias: Tensor | None,
        self_mask: Tensor,
        cache: KeyValue,
        write_index: Tensor,
        store: Store,
        source_mask: Tensor,
        cross: KeyValue,
    ) -> tuple[Tensor, KeyValue]:
        """x [B,Q,D], masks [B,1,Q,L] and [B,1,1,S] -> x [B,Q,D] and the cache with Q new slots."""

        def append(k: Tensor, v: Tensor) -> KeyValue:
            return store(cache[0], k, write_index), store(cache[1], v, write_index)

        attended, updated = self.self_attn(self.self_residual.enter(x), self_mask, rotary, append, bias)
        x = self.self_residual.leave(x, attended)
        x = self.cross_residual.leave(x, self.cross_attn(self.cross_residual.enter(x), *cross, source_mask))
        return self.feed_residual.leave(x, self.feed_forward(self.feed_residual.enter(x))), updated


class Transformer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        length = max(config.max_source, config.max_target)
        self.target_embedding = Embedding(config, config.target_vocab, config.max_target)
        encoder = config.encoder_config
        self.source_embedding: Embedding | AudioFeatures | ImagePatches
        if config.takes_audio:
            self.source_embedding = AudioFeatures(encoder)
        elif config.takes_images:
            self.source_embedding = ImagePatches(encoder)
        else:
            self.source_embedding = Embedding(encoder, config.source_vocab, config.max_source)
        if config.share_embeddings:
            cast(Embedding, self.source_embedding).tokens = self.target_embedding.tokens
        self.encoder = nn.ModuleList(EncoderLayer(encoder) for _ in range(config.encoder_layers))
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        self.encoder_norm = final_norm(encoder)
        self.decoder_norm = final_norm(config)
        widths = encoder.d_model, config.d_model
        self.state_projection = nn.Linear(*widths, bias=config.biases) if config.project_states else nn.Identity()
        self.output = nn.Linear(config.d_model, config.target_vocab, bias=config.output_bias)
        if config.tie_output:
            self.output.weight = self.target_embedding.tokens.weight
        self.rotary: Tensor | None
        table = rotary_table(length, config.head_dim) if config.positions == "rotary" else None
        self.register_buffer("rotary", table, persistent=False)
        relative = config.relative
        self.encoder_distances = DistanceBias(encoder, config.encoder_layers, ahead=True) if relative else None
        self.decoder_distances = DistanceBias(config, config.decoder_layers, ahead=False) if relative else None
        self.output_scale = config.d_model**-0.5 if config.scale_output else 1.0

    def rotations(self, positions: Tensor) -> Tensor | None:
        """positions [B or 1, Q] -> cos and sin [B or 1, Q, 2, E] of a rotary model."""
        return None if self.rotary is None else self.rotary[positions]

    def encode(self, source: Tensor, source_mask: Tensor) -> tuple[Tensor, list[KeyValue]]:
        """ids [B,S], features [B,mels,2S] or pixels [B,C,height,width], and mask [B,S] -> the states that
        cross-attention reads, [B,S,D], and every decoder layer's cross K/V [B,H,S,E]."""
        positions = torch.arange(source_mask.shape[1], device=source_mask.device)[None]  # [1, S]
        x = self.source_embedding(source, positions)
        mask = source_mask[:, None, None, :]  # [B, S] -> [B, 1, 1, S]
        rotary, distances = self.rotations(positions), self.encoder_distances
        biases = [None] * len(self.encoder) if distances is None else distances(positions, positions)
        for layer, bias in zip(self.encoder, biases, strict=True):
            x = layer(x, mask, rotary, bias)
        states = self.state_projection(self.encoder_norm(x))
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
        slot_position: Tensor | None = None,
    ) -> tuple[Tensor, list[KeyValue]]:
        """One token for each of K beams of B sources.

        tokens [B,K], position [B] (the same for the K beams of a source), write_index [B], self_mask [B,K,L]
        (which slots are a beam's ancestors or itself), source_mask [B,S] -> logits [B,K,V] and the cache.

        A model with relative positions also takes the position of the token in every slot, slot_position [B,L], the
        new slots among them: in a tree cache a slot's index is not its position.
        """
        return self._decode(
            tokens, position[:, None], write_index, self_mask, source_mask, cross, cache, store, slot_position
        )

    def prefill(
        self,
        tokens: Tensor,
        positions: Tensor,
        write_index: Tensor,
        self_mask: Tensor,
        source_mask: Tensor,
        cross: Sequence[KeyValue],
        cache: Sequence[KeyValue],
        store: Store = write_slots,
    ) -> tuple[Tensor, list[KeyValue]]:
        """P successive tokens of each source: tokens and positions [B,P], self_mask [B,P,L] -> logits [B,P,V] and the
        cache. Not of a model with relative positions."""
        return self._decode(tokens, positions, write_index, self_mask, source_mask, cross, cache, store, None)

    def forward(self, source: Tensor, source_mask: Tensor, target_ids: Tensor) -> Tensor:
        """Teacher forcing: target_ids [B,T] are the decoder's inputs, the start token first -> logits [B,T,V]."""
        _, cross = self.encode(source, source_mask)
        batch, length = target_ids.shape
        positions = torch.arange(length, device=target_ids.device)
        causal = (positions[:, None] >= positions)[None].expand(batch, -1, -1)  # [B, T, T]
        empty = cross[0][0][:, :, :0]  # [B, H, 0, E]: a growing cache that holds nothing yet
        cache = [(empty, empty)] * len(self.decoder)
        start = torch.zeros(batch, dtype=torch.int64, device=target_ids.device)
        positions = positions[None]
        return self._decode(target_ids, positions, start, causal, source_mask, cross, cache, append_slots, positions)[0]

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
        slot_position: Tensor | None,
    ) -> tuple[Tensor, list[KeyValue]]:
        """ids [B,Q] -> logits [B,Q,V] and the cache."""
        x = self.target_embedding(ids, positions)
        rotary, distances = self.rotations(positions), self.decoder_distances
        biases = [None] * len(self.decoder) if distances is None else distances(positions, slot_position)
        self_mask = self_mask[:, None]  # [B, Q, L] -> [B, 1, Q, L]
        source_mask = source_mask[:, None, None, :]  # [B, S] -> [B, 1, 1, S]
        updated = []
        for layer, bias, own, layer_cross in zip(self.decoder, biases, cache, cross, strict=True):
            x, own = layer(x, rotary, bias, self_mask, own, write_index, store, source_mask, layer_cross)
            updated.append(own)
        states = self.decoder_norm(x)
        if self.output_scale != 1.0:
            states = states * self.output_scale
        return self.output(states), updated

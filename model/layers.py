"""The building blocks of the Transformer. Shapes: B sources, Q queries, L keys, H heads, E head dim, D model."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .config import ModelConfig

ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}


KeyValue = tuple[Tensor, Tensor]  # [B,H,L,E] each
Store = Callable[[Tensor, Tensor, Tensor], Tensor]  # (cache, new slots, write index) -> cache to attend to

# What a masked score becomes: the lowest number fp16 has, in every precision, so that a precision pass changes nothing
# here. Not -inf: a row with nothing to look at then averages over everything, which is finite, where -inf makes NaN.
MASKED = -65504.0


def append_slots(cache: Tensor, new: Tensor, write_index: Tensor) -> Tensor:
    """The growing cache: [B,H,L,E] and [B,H,K,E] -> [B,H,L+K,E]. The write index is the length, so it is not needed."""
    return torch.cat((cache, new), dim=2)


def write_slots(cache: Tensor, new: Tensor, write_index: Tensor) -> Tensor:
    """The static cache: puts new [B,H,K,E] at slots write_index[b]... of cache [B,H,L,E], in place."""
    slots = write_index[:, None] + torch.arange(new.shape[2], device=new.device)  # [B, K]
    return cache.scatter_(2, slots[:, None, :, None].expand_as(new), new)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, Q, D] -> [B, H, Q, E]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[B, H, Q, E] -> [B, Q, D]."""
    return x.transpose(1, 2).flatten(-2)


class Attention(nn.Module):
    """Scaled dot-product attention in several heads: the part that self- and cross-attention have in common."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads = config.heads
        self.scale = config.head_dim**-0.5
        self.out = nn.Linear(config.d_model, config.d_model)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """q [B,H,Q,E], k and v [B,H,L,E], mask [B,1,Q or 1,L] (True = attend) -> [B,Q,D]."""
        return self.out(merge_heads(self.weights(q, k, mask) @ v))

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        """Attention weights of every query over the keys: [B,H,Q,L], rows that sum to 1.

        q is scaled, not the scores, so that the product stays in range in fp16.
        """
        scores = (q * self.scale) @ k.transpose(-1, -2)  # [B, H, Q, L]
        return torch.where(mask, scores, MASKED).softmax(dim=-1)


class SelfAttention(Attention):
    """Attention over the sequence itself; q, k and v come from one product."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model)

    def forward(
        self,
        x: Tensor,
        mask: Tensor,
        rotary: Tensor | None,
        remember: Callable[[Tensor, Tensor], KeyValue] | None = None,
    ) -> tuple[Tensor, KeyValue]:
        """x [B,Q,D], mask [B,1,Q or 1,L] -> [B,Q,D] and the keys and values attended to.

        `remember` puts the new keys and values [B,H,Q,E] into a cache and returns the whole of it.
        """
        q, k, v = split_heads(self.qkv(x), 3 * self.heads).chunk(3, dim=1)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        if remember is not None:
            k, v = remember(k, v)
        return self.attend(q, k, v, mask), (k, v)


class CrossAttention(Attention):
    """Attention of the target over the source, whose k and v are made once per source."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.q = nn.Linear(config.d_model, config.d_model)
        self.kv = nn.Linear(config.d_model, 2 * config.d_model)

    def project_source(self, states: Tensor) -> KeyValue:
        """Encoder states [B,S,D] -> k and v [B,H,S,E]."""
        k, v = split_heads(self.kv(states), 2 * self.heads).chunk(2, dim=1)
        return k, v

    def forward(self, x: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return self.attend(split_heads(self.q(x), self.heads), k, v, mask)

    def attention_weights(self, x: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        """Cross-attention weights of `forward` for the same x [B,Q,D]: [B,H,Q,S]. For display; no graph has them."""
        return self.weights(split_heads(self.q(x), self.heads), k, mask)


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.up = nn.Linear(config.d_model, config.d_ff)
        self.activation = ACTIVATIONS[config.activation]()
        self.down = nn.Linear(config.d_ff, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


def sinusoids(length: int, width: int) -> Tensor:
    """The paper's table [length, width]: sin in even columns, cos in odd ones, wavelengths from 2*pi to 20000*pi."""
    rates = torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(10000.0) / width))
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1).float()


def rotary_table(length: int, head_dim: int) -> Tensor:
    """[length, 2, E]: cos and sin of each position's angles, every angle serving both halves of a head."""
    rates = torch.exp(torch.arange(0, head_dim, 2, dtype=torch.float64) * (-math.log(10000.0) / head_dim))
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
    angles = torch.cat((angles, angles), dim=-1)
    return torch.stack((angles.cos(), angles.sin()), dim=1).float()


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotates x [B,H,Q,E] by its positions' angles; rotary is [B or 1, Q or 1, 2, E]."""
    cos, sin = rotary[:, None, :, 0], rotary[:, None, :, 1]  # [B, 1, Q, E] each
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin

"""The building blocks of the Transformer. Shapes: B sources, Q queries, L keys, H heads, E head dim, D model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from .config import ModelConfig

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
}

KeyValue = tuple[Tensor, Tensor]  # [B,H,L,E] each
Store = Callable[[Tensor, Tensor, Tensor], Tensor]  # (cache, new slots, write index) -> cache to attend to

# What a masked score becomes: the lowest number fp16 has, in every precision, so that a precision pass changes nothing
# here. Not -inf: a fully masked row then averages over everything, which is finite, whereas -inf gives NaN.
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
    """Dot-product attention in several heads: the part that self- and cross-attention have in common."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads = config.heads
        self.scale = config.head_dim**-0.5 if config.scale_attention else 1.0
        self.out = nn.Linear(config.attention_width, config.d_model, bias=config.biases)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | None = None) -> Tensor:
        """q [B,H,Q,E], k and v [B,H,L,E], mask [B,1,Q or 1,L] (True = attend) -> [B,Q,D].

        `bias` [B or 1,H,Q or 1,L] is added to the scores.
        """
        return self.out(merge_heads(self.weights(q, k, mask, bias) @ v))

    def weights(self, q: Tensor, k: Tensor, mask: Tensor, bias: Tensor | None = None) -> Tensor:
        """Attention weights of every query over the keys: [B,H,Q,L], rows that sum to 1.

        q is scaled, not the scores, so that the product stays in range in fp16. So does a masked score, which is why
        the bias is added before the mask: the lowest number of fp16 has none below it.
        """
        if self.scale != 1.0:
            q = q * self.scale
        scores = q @ k.transpose(-1, -2)  # [B, H, Q, L]
        if bias is not None:
            scores = scores + bias
        return torch.where(mask, scores, MASKED).softmax(dim=-1)


class SelfAttention(Attention):
    """Attention over the sequence itself; q, k and v come from one product."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.qkv = nn.Linear(config.d_model, 3 * config.attention_width, bias=config.biases)

    def forward(
        self,
        x: Tensor,
        mask: Tensor,
        rotary: Tensor | None,
        append: Callable[[Tensor, Tensor], KeyValue] | None = None,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, KeyValue]:
        """x [B,Q,D], mask [B,1,Q or 1,L] -> [B,Q,D] and the keys and values attended to.

        Positions are the angles of `rotary`, the `bias` of distances [B or 1,H,Q or 1,L], or in x already.

        `append` puts the new keys and values [B,H,Q,E] into a cache and returns all of it.
        """
        q, k, v = split_heads(self.qkv(x), 3 * self.heads).chunk(3, dim=1)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        if append is not None:
            k, v = append(k, v)
        return self.attend(q, k, v, mask, bias), (k, v)


class CrossAttention(Attention):
    """Attention of the target over the source, whose k and v are made once per source."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.q = nn.Linear(config.d_model, config.attention_width, bias=config.biases)
        self.kv = nn.Linear(config.state_width, 2 * config.attention_width, bias=config.biases)

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
    """down(activation(up(x))), or gated: down(activation(gate(x)) * up(x)), gate and up being one product."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gated = config.gated
        self.up = nn.Linear(config.d_model, config.d_ff * (2 if config.gated else 1), bias=config.biases)
        self.activation = ACTIVATIONS[config.activation]()
        self.down = nn.Linear(config.d_ff, config.d_model, bias=config.biases)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if not self.gated:
            return self.down(self.activation(x))
        gate, x = x.chunk(2, dim=-1)
        return self.down(self.activation(gate) * x)


class DistanceBias(nn.Module):
    """Relative positions: the bias that each head adds to a score, by how many positions the key is before the query.

    One table for all layers, or one for each. Only the encoder attends ahead, at negative distances.
    """

    def __init__(self, config: ModelConfig, layers: int, ahead: bool):
        super().__init__()
        self.layers, self.own = layers, config.distances_per_layer
        self.least, self.most = -config.max_distance if ahead else 0, config.max_distance
        rows = self.most - self.least + 1
        self.table = nn.Parameter(torch.empty(rows, config.heads * (layers if self.own else 1)))

    def forward(self, queries: Tensor, keys: Tensor) -> Sequence[Tensor]:
        """Positions of queries [B or 1, Q or 1] and of keys [B or 1, L] -> the bias [B,H,Q,L] of every layer."""
        distance = queries[:, :, None] - keys[:, None, :]  # [B, Q, L]
        rows = distance.clamp(self.least, self.most)
        if self.least:
            rows = rows - self.least
        if not self.own or self.layers == 1:
            return [self.table[rows].permute(0, 3, 1, 2)] * self.layers  # [B, Q, L, H] -> [B, H, Q, L]
        tables = self.table.chunk(self.layers, dim=1)
        return [tables[layer][rows].permute(0, 3, 1, 2) for layer in range(self.layers)]


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

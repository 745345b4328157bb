"""Pairs of token ids in batches of about equal cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..tokenizers.symbols import PAD, START

Pair = tuple[list[int], list[int]]  # source ids, target ids; both with their end token


@dataclass(frozen=True)
class Batch:
    """source [B,S] with its mask, the decoder's inputs [B,T] (start token first) and its targets [B,T]."""

    source: Tensor
    source_mask: Tensor
    inputs: Tensor
    targets: Tensor

    @property
    def tokens(self) -> int:
        return int(self.source_mask.sum()) + int((self.targets != PAD).sum())


def batch_order(pairs: Sequence[Pair], batch_tokens: int, seed: int) -> list[np.ndarray]:
    """Indices of every batch of one epoch: like lengths together, at most `batch_tokens` padded tokens each, shuffled.

    Pairs of one length are shuffled among themselves and the batches as a whole, so every epoch has other batches.
    """
    rng = np.random.default_rng(seed)
    lengths = np.array([(len(source), len(target)) for source, target in pairs])
    order = np.lexsort((rng.random(len(pairs)), lengths[:, 1], lengths[:, 0]))
    batches, start, widest = [], 0, np.zeros(2, dtype=np.int64)
    for end, index in enumerate(order):
        wider = np.maximum(widest, lengths[index])
        if end > start and int(wider.sum()) * (end - start + 1) > batch_tokens:
            batches.append(order[start:end])
            start, wider = end, lengths[index]
        widest = wider
    batches.append(order[start:])
    rng.shuffle(batches)
    return batches


def batch_from_pairs(pairs: Sequence[Pair]) -> Batch:
    source = padded_rows([source for source, _ in pairs])
    targets = padded_rows([target for _, target in pairs])
    inputs = torch.cat((torch.full((len(pairs), 1), START), targets[:, :-1]), dim=1)
    return Batch(source, source != PAD, inputs, targets)


def padded_rows(rows: Sequence[Sequence[int]]) -> Tensor:
    result = torch.full((len(rows), max(len(row) for row in rows)), PAD)
    for i, row in enumerate(rows):
        result[i, : len(row)] = torch.tensor(row)
    return result

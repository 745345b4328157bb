"""Torch tensors of sources that are put together: their lengths made the same."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def fitted(tensor: Tensor, width: int) -> Tensor:
    """[B,S], [B,S,D] or [B,H,S,E] with S cut to a width, or filled up with zeros."""
    behind = 1 if tensor.ndim > 2 else 0  # axes behind S
    missing = width - tensor.shape[-1 - behind]
    return functional.pad(tensor, (*[0, 0] * behind, 0, missing))  # a negative padding cuts

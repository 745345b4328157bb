"""Makes tensors of different source lengths the same length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

Tensor = TypeVar("Tensor", bound=Any)  # of numpy or torch


def fitted(tensor: Tensor, axis: int, width: int, zeros: Callable[..., Any] = np.zeros) -> Tensor:
    """Cut to a width along one axis, or filled up with zeros, which `zeros` makes by shape and dtype."""
    if tensor.shape[axis] == width:
        return tensor
    front = (*[slice(None)] * axis, slice(min(width, tensor.shape[axis])))
    result = zeros((*tensor.shape[:axis], width, *tensor.shape[axis + 1 :]), dtype=tensor.dtype)
    result[front] = tensor[front]
    return result

"""Moves of whole slabs of device memory: rows and slots gathered to the front, rows given away. All are only queued.

Indices travel through staging memory, so that no move makes the host wait.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..fitting import fitted
from .device import Device
from .memory import Shape, Slab


def staged(device: Device, index: np.ndarray) -> Tensor:
    """A copy of the caller's indices that the device can take without making the host wait."""
    host = device.staging(index.size * 8)[: index.size * 8].view(torch.int64).view(index.shape)
    host.copy_(torch.as_tensor(index))
    return host


def clear(device: Device, slab: Slab, shape: Shape) -> None:
    device.run(lambda: slab.together(shape).zero_())


def gather_rows(device: Device, slab: Slab, shape: Shape, rows: Tensor) -> Shape:
    """array[rows] of every tensor of the slab, to the front of its place; its shape afterwards."""
    result = (len(rows), *shape[1:])

    def work() -> None:
        old = slab.together(shape)
        slab.together(result).copy_(old.index_select(1, rows.to(old.device, non_blocking=True)))

    device.run(work)
    return result


def gather_slots(device: Device, slab: Slab, shape: Shape, rows: Tensor, slots: Tensor, length: int) -> Shape:
    """[B,H,L,E] -> [B',H,length,E] of every tensor of the slab in one gather, zero behind the chosen slots [B',L']."""
    chosen = slots.shape[1]
    result = (len(rows), shape[1], length, shape[3])

    def work() -> None:
        old, new = slab.together(shape), slab.together(result)
        row, slot = (index.to(old.device, non_blocking=True) for index in (rows, slots))
        head = torch.arange(shape[1], device=old.device)
        picked = old[:, row[:, None, None], head[:, None], slot[:, None, :]]  # the last three broadcast to [B', H, L']
        new[:, :, :, :chosen].copy_(picked)
        new[:, :, :, chosen:].zero_()

    device.run(work)
    return result


def put_rows(
    device: Device, slab: Slab, shape: Shape, rows: Tensor, coming: Slab, coming_shape: Shape, width: int
) -> Shape:
    """array[rows] = coming of every tensor of the slab, both with S made `width` long; its shape afterwards."""
    axis = slab.axes.index("S")
    result = (*shape[:axis], width, *shape[axis + 1 :])

    def work() -> None:
        old, new = slab.together(shape), slab.together(result)
        if shape != result:
            new.copy_(fitted(old, axis + 1, width, old.new_zeros))
        row = rows.to(old.device, non_blocking=True)
        given = coming.together(coming_shape)[:, : len(rows)]
        new.index_copy_(1, row, fitted(given, axis + 1, width, given.new_zeros))

    device.run(work)
    return result

"""Position tables as Hugging Face computes them, number for number, so that they can be stored as weights.

Neither is the paper's table that our own sinusoidal models compute: columns stand in another order, and M2M100's
wavelengths differ. Both keep the float arithmetic of that library, step by step, so that no rounding differs either.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def marian_positions(length: int, width: int) -> Tensor:
    """[length, width] of Marian and Pegasus: all sines, then all cosines; angles in fp64."""
    rates = np.array([np.power(10000, 2 * (column // 2) / width) for column in range(width)])
    angles = np.arange(length)[:, None] / rates
    halves = np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])
    return torch.from_numpy(np.concatenate(halves, axis=1)).float()


def m2m_positions(length: int, width: int, pad_id: int) -> Tensor:
    """[length, width] of M2M100 and NLLB: tensor2tensor's sinusoids; angles in fp32.

    Position 0 reads row pad_id + 1 of their table. There, positions are counted over the tokens that are no padding;
    padding comes after a source, where nothing looks, so the tokens before it stand at 0, 1, 2, ...
    """
    half = width // 2
    rates = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
    angles = torch.arange(pad_id + 1 + length).float()[:, None] * rates
    table = torch.cat((angles.sin(), angles.cos(), torch.zeros(len(angles), width % 2)), dim=1)
    return table[pad_id + 1 :]

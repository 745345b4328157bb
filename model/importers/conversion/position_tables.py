"""Position tables as Hugging Face computes them, number for number, so that they can be stored as weights.

They differ from the paper's table, which our own sinusoidal models compute: columns are in another order, M2M100's
wavelengths differ, and T5 uses distances. All repeat the float arithmetic of that library exactly.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

ROWS = 1024  # computed at once: in fp64, a whole table takes eight times its memory


def marian_positions(length: int, width: int) -> Tensor:
    """[length, width] of Marian and Pegasus: all sines, then all cosines; angles in fp64."""
    rates = np.array([np.power(10000, 2 * (column // 2) / width) for column in range(width)])
    table = torch.empty(length, width)
    for first in range(0, length, ROWS):
        angles = np.arange(first, min(first + ROWS, length))[:, None] / rates
        halves = np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])
        table[first : first + ROWS] = torch.from_numpy(np.concatenate(halves, axis=1))
    return table


def whisper_positions(length: int, width: int) -> Tensor:
    """[length, width] of Whisper's encoder: all sines, then all cosines; angles in fp32."""
    rates = torch.exp(-(math.log(10000) / (width // 2 - 1)) * torch.arange(width // 2))
    angles = torch.arange(length)[:, None] * rates[None]
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def m2m_positions(length: int, width: int, pad_id: int) -> Tensor:
    """[length, width] of M2M100 and NLLB: tensor2tensor's sinusoids; angles in fp32.

    Position 0 reads row pad_id + 1 of their table. There, positions are counted over the tokens that are not padding;
    padding comes after a source and is masked, so the tokens before it have positions 0, 1, 2, ...
    """
    half = width // 2
    rates = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
    angles = torch.arange(pad_id + 1 + length).float()[:, None] * rates
    table = torch.cat((angles.sin(), angles.cos(), torch.zeros(len(angles), width % 2)), dim=1)
    return table[pad_id + 1 :]


def distance_buckets(buckets: int, most: int, ahead: bool) -> Tensor:
    """T5's bucket of every distance from 0 to `most`, or from -most with `ahead`: how far a key is before the query.

    Half of the buckets are for keys ahead of the query, where there are any. Near distances have buckets of their own,
    farther ones share them: the logarithm decides, in fp32.
    """
    distance = torch.arange(-most if ahead else 0, most + 1)
    count = buckets // 2 if ahead else buckets
    beyond = (distance < 0).long() * count  # a key ahead of the query
    distance = distance.abs()
    exact = count // 2
    far = exact + (torch.log(distance.float() / exact) / math.log(most / exact) * (count - exact)).to(torch.long)
    return beyond + torch.where(distance < exact, distance, far.clamp(max=count - 1))

"""Parallel text: read, numbered, and cut into batches of about equal cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import RequestError
from .tokenizers.symbols import PAD, START

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


def read_pairs(path: Path) -> list[tuple[str, str]]:
    """A TSV of source and target, or two aligned text files PATH.source and PATH.target, as pairs of text."""
    if path.is_file():
        rows = [line.split("\t") for line in read_lines(path)]
        if wrong := [i for i, row in enumerate(rows, start=1) if len(row) != 2]:
            columns = len(rows[wrong[0] - 1])
            raise RequestError(f"{path} line {wrong[0]} has {columns} columns, expected source<TAB>target")
        return [(source, target) for source, target in rows]
    sides = [path.with_name(f"{path.name}.{side}") for side in ("source", "target")]
    if not all(side.is_file() for side in sides):
        names = " and ".join(side.name for side in sides)
        raise RequestError(f"no data at {path}; expected a TSV of source and target, or two files {names}")
    sources, targets = (read_lines(side) for side in sides)
    if len(sources) != len(targets):
        counts = f"{len(sources)} and {len(targets)}"
        raise RequestError(f"{sides[0]} and {sides[1].name} have {counts} lines; they must be aligned line by line")
    return list(zip(sources, targets, strict=True))


def read_lines(path: Path) -> list[str]:
    try:
        return path.read_bytes().decode().splitlines()
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise RequestError(f"{path} line {line} is not UTF-8; convert the file first") from error


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

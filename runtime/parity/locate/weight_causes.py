"""Causes in stored numbers: embedding rows read at the wrong place, weights and norms that are not the model's."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from ..weights.causes import Case
from ..weights.causes import weight_fault as stored_weight_fault
from .evidence import Evidence, Guess, as_real, file_weights

EPSILONS = (0.0, *(10.0**-power for power in range(12, 1, -1)))


def table_guesses(e: Evidence, table: Tensor, ids: Tensor) -> Iterator[Guess]:
    """Determines from the values which rows were read."""
    rows = table.double().flatten(1)  # [N, D]
    for weight in file_weights(e, rank=table.dim()):
        if weight.shape == tuple(table.shape):
            theirs = torch.from_numpy(weight.astype(np.float64))
            yield Guess(*weight_fault(e, table.numpy(), weight), theirs[ids])
    read = (
        torch.cdist(e.found.flatten(0, ids.dim() - 1).flatten(1), rows).argmin(dim=1).view(e.found.shape[: ids.dim()])
    )
    fed, what = ids.expand_as(read), "token" if isinstance(e.leaf, nn.Embedding) else "position"
    if torch.equal(fed, read):
        return
    wrong = fed != read
    first = tuple(wrong.nonzero()[0].tolist())
    there = f"{what} {int(read[first])} is read where {what} {int(fed[first])} was fed"
    share = f"; {int(wrong.sum())} of {wrong.numel()} differ"
    offset = (read - fed).unique()
    if what == "token" and len(read.unique()) == 1 and len(fed.unique()) == 1:
        share = ""
    elif len(offset) == 1:
        there, share = f"{what} {int(offset):+d} is read everywhere", ""
    elif what == "position" and torch.equal(read, fed[:1].expand_as(fed)):
        there, share = "every row is given the position of row 0", ""
    if what == "token":
        started = "tokens" in e.fed and bool(torch.all(fed[wrong] == e.trio.oracle.config.start_id))
        yield Guess("start token" if started else "token ids", there + share, table[read])
    else:
        yield Guess("position", there + share, table[read])


def linear_guesses(e: Evidence, leaf: nn.Linear) -> Iterator[Guess]:
    x, weight = e.call.args[0], leaf.weight.double().T  # the oracle shares a table that is stored in fp32
    bias = torch.zeros(()) if leaf.bias is None else leaf.bias
    theirs = [w for w in file_weights(e, rank=2) if w.shape == tuple(weight.shape)]
    if len(theirs) == 1:
        yield Guess(*weight_fault(e, weight.numpy(), theirs[0]), x @ as_real(theirs[0]) + bias)
    if leaf.bias is not None:
        for added in file_weights(e, rank=1, reader="Add"):  # scales of quantised weights are multiplied
            if added.shape == tuple(bias.shape):
                yield Guess(*weight_fault(e, bias.numpy(), added, "bias"), x @ weight + as_real(added))
        yield Guess("weight", "the bias is not added", x @ weight)
    if weight.shape[0] == weight.shape[1]:
        yield Guess("weight", "the weight is transposed", x @ weight.T + bias)


def norm_guesses(e: Evidence, leaf: nn.LayerNorm) -> Iterator[Guess]:
    x = e.call.args[0]

    def norm(scale: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        return nn.functional.layer_norm(x, leaf.normalized_shape, scale, bias, epsilon)

    node = e.trio.file.tensors[e.tensor]
    if node.op_type == "LayerNormalization":
        for which, own in enumerate((leaf.weight, leaf.bias), start=1):
            name = node.input[which] if len(node.input) > which else ""
            if name in e.trio.file.weights:
                theirs = e.trio.file.weight(name)
                pair: list[Tensor] = [leaf.weight, leaf.bias]
                pair[which - 1] = as_real(theirs)
                label = ("scale", "bias")[which - 1]
                yield Guess(*weight_fault(e, own.numpy(), theirs, label), norm(pair[0], pair[1], leaf.eps))
    for epsilon in EPSILONS:
        if not math.isclose(epsilon, leaf.eps):
            yield Guess("norm", f"epsilon {epsilon:g}, expected {leaf.eps:g}", norm(leaf.weight, leaf.bias, epsilon))
    yield Guess("norm", "the norm is left out", x)
    yield Guess("norm", "its scale is left out", norm(torch.ones_like(leaf.weight), leaf.bias, leaf.eps))
    yield Guess("norm", "its bias is left out", norm(leaf.weight, torch.zeros_like(leaf.bias), leaf.eps))
    mean_square = x.square().mean(-1, keepdim=True)
    yield Guess("norm", "the mean is not subtracted", x / (mean_square + leaf.eps).sqrt() * leaf.weight + leaf.bias)
    centred = x - x.mean(-1, keepdim=True)
    squares = centred.half().square().double()  # infinite beyond 65504
    variance = squares.mean(-1, keepdim=True)
    scaled = centred / (variance + leaf.eps).sqrt() * leaf.weight + leaf.bias
    if not squares.isfinite().all():
        yield Guess(
            "overflow", "its squares overflow fp16: the largest input is " + f"{float(x.abs().max()):.3g}", scaled
        )


def rms_norm_guesses(e: Evidence, leaf: nn.RMSNorm) -> Iterator[Guess]:
    x, epsilon = e.call.args[0], leaf.eps or 0.0

    def norm(scale: Tensor, added: float) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + added).sqrt() * scale

    node = e.trio.file.tensors[e.tensor]
    if node.op_type == "RMSNormalization" and node.input[1] in e.trio.file.weights:
        theirs = e.trio.file.weight(node.input[1])
        yield Guess(*weight_fault(e, leaf.weight.numpy(), theirs, "scale"), norm(as_real(theirs), epsilon))
    for other in EPSILONS:
        if not math.isclose(other, epsilon):
            yield Guess("norm", f"epsilon {other:g}, expected {epsilon:g}", norm(leaf.weight, other))
    yield Guess("norm", "the norm is left out", x)
    yield Guess("norm", "its scale is left out", norm(torch.ones_like(leaf.weight), epsilon))
    centred = nn.functional.layer_norm(x, x.shape[-1:], leaf.weight, None, epsilon)
    yield Guess("norm", "the mean is subtracted, as in a layer norm", centred)


def weight_fault(e: Evidence, ours: np.ndarray, theirs: np.ndarray, what: str = "weight") -> tuple[str, str]:
    """The cause and how a stored weight differs from the model's."""
    module = e.trio.oracle.module(e.tensor)
    heads = e.trio.oracle.config.heads_of(module)
    return stored_weight_fault(Case(ours.astype(theirs.dtype), theirs, what, module, heads))

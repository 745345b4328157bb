"""A model at another precision over the same weights.

PyTorch stands in parity as oracle, reference and baseline of one set of weights. They share one copy of the large
tables, in fp32; each rounds (or widens) a block of a table at the moment it is used. A block stays in the processor's
cache, so this costs little more than a product itself, and memory does not grow with the number of precisions.
"""

from __future__ import annotations

import copy
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..model.transformer import Transformer

BLOCK = 1 << 18  # elements of a table that are converted at once: 2 MB in fp64


class RoundedLinear(nn.Linear):
    """A product with a weight that is stored in fp32 and taken at `dtype`.

    In fp16 and bf16 the sum is made in fp32 and rounded once at the end, as tensor cores and PyTorch's own CPU kernels
    do; those kernels take several times as long.
    """

    dtype: torch.dtype

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(self.dtype, torch.float32)
        given = x.to(self.dtype).to(wide)
        bias = None if self.bias is None else self.bias.to(wide)
        if self.weight.dtype == self.dtype:
            return functional.linear(given, self.weight, bias)
        rows = max(1, BLOCK // self.in_features)
        if self.out_features <= rows:
            return functional.linear(given, self.weight.to(self.dtype).to(wide), bias).to(self.dtype)
        made = given.new_empty(*given.shape[:-1], self.out_features)  # [B, Q, out]
        for first in range(0, self.out_features, rows):
            block = slice(first, first + rows)
            part = None if bias is None else bias[block]
            made[..., block] = functional.linear(given, self.weight[block].to(self.dtype).to(wide), part)
        return made.to(self.dtype)


class RoundedEmbedding(nn.Embedding):
    """Rows of a table that is stored in fp32, at `dtype`."""

    dtype: torch.dtype

    def forward(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.weight).to(self.dtype)


def model_at(model: Transformer, dtype: torch.dtype, in_fp32: Collection[str] = ()) -> Transformer:
    """A model that computes at `dtype` over the tables of another, which is in fp32 and stays as it is.

    Products, norms and embeddings named in `in_fp32` compute in fp32; every norm and product casts what it gets.
    """
    tables = {id(module.weight): module.weight for module in model.modules() if has_table(module)}
    made = copy.deepcopy(model, dict(tables))  # what the memo holds is shared, not copied
    for path, module in list(made.named_modules()):
        here = torch.float32 if path in in_fp32 else dtype
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in tables:
                parameter.data = parameter.data.to(here)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(here))
        if has_table(module):
            parent, _, name = path.rpartition(".")
            setattr(made.get_submodule(parent), name, rounded(module, here))
        elif in_fp32 and isinstance(module, nn.LayerNorm):
            module.register_forward_pre_hook(cast_to_own)
    return made


def has_table(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Embedding)


def rounded(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A product or an embedding with the same weight, taken at `dtype`."""
    made: RoundedLinear | RoundedEmbedding
    if isinstance(module, nn.Linear):
        made = RoundedLinear(module.in_features, module.out_features, module.bias is not None, device="meta")
        made.bias = module.bias
    else:
        assert isinstance(module, nn.Embedding)
        made = RoundedEmbedding(module.num_embeddings, module.embedding_dim, device="meta")
    made.weight, made.dtype = module.weight, dtype
    return made


def cast_to_own(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    dtype = next(module.parameters()).dtype
    return tuple(tensor.to(dtype) for tensor in given)

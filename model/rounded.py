"""A model at another precision over the same weights.

In parity, PyTorch is oracle, reference and baseline with the same weights. They share one copy of the large tables in
fp32; each converts a block of a table when it is used. A block fits the processor's cache, so this costs little
more than the product itself, and memory does not grow with the number of precisions.
"""

from __future__ import annotations

import copy
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.nn import functional

from seq2engine.model.transformer import Transformer

BLOCK = 1 << 18  # elements of a table that are converted at once: 2 MB in fp64


class Rounded:
    """A module over the weight of another one, stored in fp32: taken at `rounded_to`, computed at `dtype`."""

    dtype: torch.dtype
    rounded_to: torch.dtype

    def reset_parameters(self) -> None:
        """Does nothing: the weight exists already. PyTorch's own would import its compiler, which takes seconds."""


class RoundedLinear(Rounded, nn.Linear):
    """A product with a weight that is stored in fp32, taken at `rounded_to` and multiplied at `dtype`.

    In fp16 and bf16 the sum is made in fp32 and rounded once at the end, as tensor cores and PyTorch's own CPU kernels
    do; those kernels take several times as long. A bias of a wider type is added after that, in that type.
    """

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(self.dtype, torch.float32)
        own = self.bias is not None and self.bias.dtype == self.dtype  # else it is added after the product is rounded
        product = self.product(x.to(self.dtype).to(wide), self.bias.to(wide) if own else None).to(self.dtype)
        return product if own or self.bias is None else product.to(self.bias.dtype) + self.bias

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        rows = max(1, BLOCK // self.in_features)
        if self.out_features <= rows or self.weight.dtype == self.rounded_to == x.dtype:
            return functional.linear(x, self.weight.to(self.rounded_to).to(x.dtype), bias)
        made = x.new_empty(*x.shape[:-1], self.out_features)  # [B, Q, out]
        for first in range(0, self.out_features, rows):
            block = slice(first, first + rows)
            weight = self.weight[block].to(self.rounded_to).to(x.dtype)
            made[..., block] = functional.linear(x, weight, None if bias is None else bias[block])
        return made


class RoundedEmbedding(Rounded, nn.Embedding):
    """Rows of a table that is stored in fp32 and taken at `rounded_to`, as `dtype`."""

    def forward(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.weight).to(self.rounded_to).to(self.dtype)


class RoundedConv(Rounded, nn.Conv1d):
    """A convolution at `dtype`, summed in fp32 at least and rounded once, as the products are."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv1d(*rounded_operands(self, x), self.stride, self.padding).to(self.dtype)


class RoundedPatches(Rounded, nn.Conv2d):
    """The same for the patches of an image."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(*rounded_operands(self, x), self.stride, self.padding).to(self.dtype)


def rounded_operands(conv: RoundedConv | RoundedPatches, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(conv.dtype, torch.float32)
    assert conv.bias is not None
    return x.to(conv.dtype).to(wide), conv.weight.to(conv.rounded_to).to(wide), conv.bias.to(wide)


def model_at(model: Transformer, dtype: torch.dtype, fallbacks: Collection[str] = ()) -> Transformer:
    """A model that computes at `dtype` over the tables of another, which is in fp32 and stays as it is.

    `fallbacks` are nodes of the graphs (`decoder.0.cross_attn.q/MatMul`) that compute in fp32. A table that any other
    node reads is rounded all the same, as it is stored only once; every norm and product casts what it gets.
    """
    modules = dict(model.named_modules(remove_duplicate=False))  # a shared table has several readers
    biases = {path for path, module in modules.items() if isinstance(module, nn.Linear) and only_bias(path, fallbacks)}
    wide = {node.partition("/")[0] for node in fallbacks} - biases
    readers: dict[int, set[str]] = {}
    for path, module in modules.items():
        if has_table(module):
            readers.setdefault(id(module.weight), set()).add(path)
    tables = {id(module.weight): module.weight for module in modules.values() if has_table(module)}
    made = copy.deepcopy(model, dict(tables))  # what the memo holds is shared, not copied
    for path, module in list(made.named_modules(remove_duplicate=False)):
        here = torch.float32 if path in wide else dtype
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in tables:
                parameter.data = parameter.data.to(torch.float32 if name == "bias" and path in biases else here)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(here))
        if has_table(module):
            taken = torch.float32 if readers[id(module.weight)] <= wide else dtype
            parent, _, name = path.rpartition(".")
            setattr(made.get_submodule(parent), name, rounded(module, here, taken))
        elif fallbacks and isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.register_forward_pre_hook(cast_to_own)
    return made


def has_table(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Embedding)


def only_bias(path: str, fallbacks: Collection[str]) -> bool:
    """Whether of a product only the bias is added in fp32."""
    return f"{path}/Add" in fallbacks and f"{path}/MatMul" not in fallbacks


def rounded(module: nn.Module, dtype: torch.dtype, rounded_to: torch.dtype | None = None) -> nn.Module:
    """A product or an embedding with the same weight, at `dtype`."""
    made: RoundedLinear | RoundedConv | RoundedPatches | RoundedEmbedding
    if isinstance(module, nn.Linear):
        made = RoundedLinear(module.in_features, module.out_features, module.bias is not None, device="meta")
        made.bias = module.bias
    elif isinstance(module, nn.Conv1d):
        made = RoundedConv(module.in_channels, module.out_channels, 1, device="meta")
        made.kernel_size, made.stride, made.padding = module.kernel_size, module.stride, module.padding
        made.bias = module.bias
    elif isinstance(module, nn.Conv2d):
        made = RoundedPatches(module.in_channels, module.out_channels, 1, device="meta")
        made.kernel_size, made.stride, made.padding = module.kernel_size, module.stride, module.padding
        made.bias = module.bias
    else:
        assert isinstance(module, nn.Embedding)
        made = RoundedEmbedding(module.num_embeddings, module.embedding_dim, device="meta")
    made.weight, made.dtype, made.rounded_to = module.weight, dtype, rounded_to or dtype
    return made


def cast_to_own(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    dtype = next(module.parameters()).dtype
    return tuple(tensor.to(dtype) for tensor in given)

from __future__ import annotations
import torch
from torch import Tensor, fx, nn
from ..model.layers import append_slots, write_slots
from ..model.transformer import Transformer

class EncoderGraph(nn.Module):
    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model

    def forward(self, source_ids: Tensor, source_mask: Tensor) -> tuple[Tensor, ...]:
        states, cross = self.model.encode(source_ids, source_mask)
        return (*(tensor for pair in cross for tensor in pair), states)

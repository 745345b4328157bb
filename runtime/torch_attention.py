"""PyTorch with its cross-attention weights: after a step the state has `cross_attention.i` [B,H,K,S] of every layer.

ONNX Runtime's is `OrtAttention` (ort_session.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from seq2engine.export.ort_forms.attention_outputs import attention_name

from .search.step_output import Answer
from .session import State
from .torch_session import TorchSession


class TorchAttention(TorchSession):
    """The reference model with an ear at every cross-attention while it takes a step."""

    looks = True

    @torch.inference_mode()
    def step(
        self, state: State, tokens: np.ndarray, position: np.ndarray, write_index: np.ndarray, self_mask: np.ndarray
    ) -> Answer:
        with self.listening() as heard:
            answer = super().step(state, tokens, position, write_index, self_mask)
        state.update(heard)
        return answer

    def attention(self, state: State) -> np.ndarray:
        return mean_of_heads(self.tensor(state, attention_name(self.config.decoder_layers - 1)))

    @contextmanager
    def listening(self) -> Iterator[dict[str, torch.Tensor]]:
        """What the cross-attentions look at while the block runs, by name."""
        heard: dict[str, torch.Tensor] = {}

        def hook_of(name: str) -> Any:
            def hook(module: Any, given: tuple[torch.Tensor, ...], result: torch.Tensor) -> None:
                x, k, _, mask = given
                heard[name] = module.looks(x, k, mask)

            return hook

        with ExitStack() as hooks:
            for i in range(self.config.decoder_layers):
                attention = self.model.get_submodule(f"decoder.{i}.cross_attn")
                hooks.enter_context(attention.register_forward_hook(hook_of(attention_name(i))))
            yield heard


def mean_of_heads(weights: np.ndarray) -> np.ndarray:
    """[B,H,K,S] -> [B,K,S] in fp64."""
    return weights.astype(np.float64).mean(axis=1)

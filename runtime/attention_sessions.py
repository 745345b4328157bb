"""Sessions that keep where they looked: after a step the state has `cross_attention.i` [B,H,K,S] of every layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import onnx
import torch

from ..export.attention_graph import attention_graph, attention_name
from ..export.bundle import Bundle
from .answers import Answer
from .ort_session import OrtSession, check_precision, inference_session
from .session import State
from .torch_session import TorchSession


class OrtAttention(OrtSession):
    """The bundle's own graphs, of the decoder step a form with more outputs. It is made for looking, not for speed."""

    looks, turns_keys = True, False

    @classmethod
    def from_bundle(
        cls,
        bundle: Bundle,
        precision: str,
        threads: int | None = None,
        deterministic: bool = False,
        provider: str = "cpu",
    ) -> OrtAttention:
        check_precision(precision)
        specs = bundle.specs(precision)
        paths = {name: bundle.graph_path(precision, name) for name in specs}
        step = paths.pop("decoder_step")
        session = cls(paths, specs, bundle.config, precision, bundle.cache_form, threads, deterministic, provider)
        changed = attention_graph(onnx.load(step, load_external_data=False), bundle.config.decoder_layers)
        session.sessions["decoder_step"] = inference_session(step, threads, changed.SerializeToString(), provider)
        return session

    def step(
        self, state: State, tokens: np.ndarray, position: np.ndarray, write_index: np.ndarray, self_mask: np.ndarray
    ) -> Answer:
        given = {"tokens": tokens, "position": position, "write_index": write_index, "self_mask": self_mask, **state}
        feeds = {tensor.name: given[tensor.name] for tensor in self.specs["decoder_step"].inputs}
        session = self.sessions["decoder_step"]
        names = [output.name for output in session.get_outputs()]
        found = dict(zip(names, session.run(names, feeds), strict=True))
        answer = Answer(found.pop("logits"))
        state.update({name.removeprefix("new_"): array for name, array in found.items()})
        return answer

    def attention(self, state: State) -> np.ndarray:
        return mean_of_heads(self.tensor(state, attention_name(self.config.decoder_layers - 1)))


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

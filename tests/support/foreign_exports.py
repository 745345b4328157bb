"""ONNX graphs that torch.onnx makes of a transformers model, with the names that Optimum has."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache


class ForeignEncoder(torch.nn.Module):
    def __init__(self, model: Any):
        super().__init__()
        self.encoder = model.get_encoder()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.encoder(input_ids=input_ids, attention_mask=attention_mask, return_dict=True)[0]


class ForeignDecoder(torch.nn.Module):
    """All steps at once, or one step over keys and values: `past` are self k, v and cross k, v of every layer."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model
        self.decoder = model.get_decoder()

    def forward(
        self,
        input_ids: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_attention_mask: torch.Tensor,
        *past: torch.Tensor,
    ) -> torch.Tensor:
        cache = None
        if past:
            own, cross = DynamicCache(), DynamicCache()
            for layer in range(len(past) // 4):
                keys = past[4 * layer : 4 * layer + 4]
                own.update(keys[0], keys[1], layer)
                cross.update(keys[2], keys[3], layer)
            cache = EncoderDecoderCache(own, cross)
        states = self.decoder(
            input_ids=input_ids,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            past_key_values=cache,
            use_cache=bool(past),
            return_dict=True,
        )[0]
        return self.model.lm_head(states) + self.model.final_logits_bias


def written(module: torch.nn.Module, args: tuple[torch.Tensor, ...], names: list[str], output: str, path: Path) -> Path:
    axes: dict[str, dict[int, str]] = {}
    for name, arg in zip(names, args, strict=True):
        axes[name] = {0: "batch", 2: f"{name}_length"} if arg.dim() == 4 else {0: "batch", 1: f"{name}_length"}
    axes[output] = {0: "batch", 1: "length"}
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(), args, str(path), input_names=names, output_names=[output], dynamic_axes=axes, dynamo=False,
            opset_version=17, do_constant_folding=True,
        )  # fmt: skip
    return path


def foreign_graphs(model: Any, folder: Path) -> dict[str, Path]:
    """encoder_model, decoder_model and decoder_with_past_model of a model whose attention is `eager`."""
    config = model.config
    ids, mask = torch.arange(4, 12).reshape(2, 4), torch.ones(2, 4, dtype=torch.int64)
    tokens, states = torch.arange(6, 12).reshape(2, 3), torch.randn(2, 4, config.d_model)
    width = config.d_model // config.decoder_attention_heads
    sizes = [(2, config.decoder_attention_heads, length, width) for length in (3, 3, 4, 4)]
    caches = [torch.randn(size) for _ in range(config.decoder_layers) for size in sizes]
    named = [
        f"past_key_values.{layer}.{side}.{part}"
        for layer in range(config.decoder_layers)
        for side in ("decoder", "encoder")
        for part in ("key", "value")
    ]
    step = ["input_ids", "encoder_hidden_states", "encoder_attention_mask"]
    decoder = ForeignDecoder(model)
    encoder = ForeignEncoder(model)
    return {
        "encoder": written(
            encoder, (ids, mask), ["input_ids", "attention_mask"], "last_hidden_state", folder / "encoder_model.onnx"
        ),
        "decoder": written(decoder, (tokens, states, mask), step, "logits", folder / "decoder_model.onnx"),
        "with past": written(
            decoder,
            (tokens[:, :1], states, mask, *caches),
            [*step, *named],
            "logits",
            folder / "decoder_with_past_model.onnx",
        ),
    }

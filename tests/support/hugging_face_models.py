"""Small random models of the real library whose outputs vary and end at various lengths, and their decodes."""

from __future__ import annotations

from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BlenderbotConfig,
    BlenderbotForConditionalGeneration,
    GenerationConfig,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    MT5Config,
    MT5ForConditionalGeneration,
    PegasusConfig,
    PegasusForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)

VOCAB, PAD, BOS, END, START, LENGTH = 60, 1, 0, 2, 3, 24
CLASSES: dict[str, tuple[Any, Any]] = {
    "marian": (MarianConfig, MarianMTModel),
    "bart": (BartConfig, BartForConditionalGeneration),
    "mbart": (MBartConfig, MBartForConditionalGeneration),
    "m2m_100": (M2M100Config, M2M100ForConditionalGeneration),
    "pegasus": (PegasusConfig, PegasusForConditionalGeneration),
    "blenderbot": (BlenderbotConfig, BlenderbotForConditionalGeneration),
}
SMALL = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": LENGTH,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": END,
    "decoder_start_token_id": START,
    "forced_eos_token_id": None,
}
T5_CLASSES: dict[str, tuple[Any, Any]] = {
    "t5": (T5Config, T5ForConditionalGeneration),
    "mt5": (MT5Config, MT5ForConditionalGeneration),
    "umt5": (UMT5Config, UMT5ForConditionalGeneration),
}
SMALL_T5 = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 6,  # times heads is not d_model
    "d_ff": 48,
    "num_layers": 3,  # the library cannot generate with more layers in the decoder
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}


def small_model(family: str, seed: int = 0, biased: bool = False, **changes: Any) -> Any:
    """A model of the library, with output biases or without; `changes` are fields of its config."""
    if family in T5_CLASSES:
        return small_t5(family, seed, **changes)
    config_class, model_class = CLASSES[family]
    return with_random_weights(model_class(config_class(**{**SMALL, **changes})).eval(), seed, biased)


def with_random_weights(model: Any, seed: int, biased: bool = False) -> Any:
    """Every weight random, none zero or one, so that none can be swapped for another or lost without a test noticing.

    As in our own `random_model`, branches are strong against the skip connection, the source's say is weak, and the
    end token's row is long: otherwise a random model says one token for ever.
    """
    generator = torch.Generator().manual_seed(seed)

    def fill(tensor: torch.Tensor, mean: float, deviation: float) -> None:
        tensor.normal_(mean, deviation, generator=generator)

    end = model.config.eos_token_id
    deviation = model.config.d_model**-0.5 if model.config.scale_embedding else 0.5
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                fill(module.weight, 0.0, 3 * (0.5 if "encoder_attn.out" in name else 1) * module.in_features**-0.5)
                if module.bias is not None:
                    fill(module.bias, 0.0, 0.02)
            elif isinstance(module, nn.LayerNorm):
                fill(module.weight, 1.0, 0.1)
                fill(module.bias, 0.0, 0.02)
            elif isinstance(module, nn.Embedding) and "Sinusoidal" not in type(module).__name__:
                fill(module.weight, 0.0, (4 if "positions" in name else 1) * deviation)
        for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
            layer.fc2.weight -= layer.fc2.weight.mean(dim=1, keepdim=True)
        model.lm_head.weight[end] *= 3
        if biased:
            fill(model.final_logits_bias, 0.0, 0.3)
    return model


def small_t5(family: str, seed: int = 0, tied: bool = True, **changes: Any) -> Any:
    """A T5 of the library whose outputs wander. In fp32, as all of them.

    What attention adds for a distance is large, so that a wrong one shows. Embeddings that are the head as well are
    weak beside the layers. An untied head is one of its own, which the library's own constructor would tie.
    """
    config_class, model_class = T5_CLASSES[family]
    model = model_class(config_class(**{**SMALL_T5, **changes})).eval()
    generator = torch.Generator().manual_seed(seed)
    if not tied:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layer_norm" in name:
                parameter.normal_(1.0, 0.1, generator=generator)
            elif "relative_attention_bias" in name:
                parameter.normal_(0.0, 2.0, generator=generator)
            elif "shared" in name or "lm_head" in name:
                parameter.normal_(0.0, 0.3 if tied else 1.0, generator=generator)
            else:
                gain = (0.5 if "EncDecAttention.o" in name else 1.0) * (2.0 if tied else 1.0)
                parameter.normal_(0.0, gain * parameter.shape[1] ** -0.5, generator=generator)
        scaled = family == "umt5" or getattr(model.config, "scale_decoder_outputs", False)
        wanted = 3.0 if scaled else 3.0 * model.config.d_model**-0.5  # logits of about this size
        model.decoder.final_layer_norm.weight *= wanted / (0.3 if tied else 1.0)
        model.lm_head.weight[model.config.eos_token_id] *= 1.5
    return model


def in_double(model: Any) -> Any:
    """The library's model in fp64, in place. T5's norm sums in fp32 whatever it is given, so that is changed."""

    def normalised(module: Any, x: torch.Tensor) -> torch.Tensor:
        return module.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)

    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = MethodType(normalised, module)
    return model.double()


def sources(vocab: int = VOCAB, longest: int = 10) -> list[list[int]]:
    """Ten sources of 1 to `longest` tokens, in no order; none of their tokens is a special one."""
    random = np.random.default_rng(0)
    lengths = random.permutation(np.arange(1, longest + 1))
    return [random.integers(8, vocab - 1, length).tolist() for length in lengths]


def batch_of(rows: list[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask [B,S] as the library's own tokenizers make them."""
    longest = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return ids, mask


def saved(model: Any, folder: Path, **generation: Any) -> Path:
    """The model's folder, with a generation_config.json of just these fields and the special tokens."""
    config = model.config
    model.generation_config = GenerationConfig(
        decoder_start_token_id=config.decoder_start_token_id,
        bos_token_id=getattr(config, "bos_token_id", None),
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        **generation,
    )
    model.save_pretrained(folder)
    return folder


def library_outputs(model: Any, rows: list[list[int]], **options: Any) -> list[list[int]]:
    """What `generate` outputs for a padded batch, with the model's own generation config, without start and padding."""
    ids, mask = batch_of(rows, model.config.pad_token_id)
    with torch.inference_mode():
        answer = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, **options)
    return [up_to_end(row[1:], model.config.eos_token_id) for row in answer.tolist()]


def up_to_end(row: list[int], end: int) -> list[int]:
    return row[: row.index(end) + 1] if end in row else row


def wandering_marian(
    vocab: int, pad: int, end: int, scale: float, raise_end: float, dtype: torch.dtype = torch.float32, **changes: Any
) -> Any:
    """A Marian whose next token is as sure as `scale` makes it, and whose end is as likely as `raise_end`.

    Its layers are weak beside its embeddings. Otherwise all random models of this size say one token for ever.
    """
    torch.manual_seed(1)
    config = MarianConfig(
        vocab_size=vocab,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=32,
        init_std=0.5 / 32**0.5,
        pad_token_id=pad,
        eos_token_id=end,
        decoder_start_token_id=pad,
        tie_word_embeddings=False,
        **changes,
    )
    model = MarianMTModel(config).to(dtype).eval()
    with torch.no_grad():
        for part in (model.model.encoder, model.model.decoder):
            part.embed_tokens.weight.normal_(std=1.0)
        model.lm_head.weight.normal_(std=scale / config.d_model**0.5)
        model.final_logits_bias[0, end] += raise_end
    return model

"""Small random TrOCR models of the real library, and pixels and pictures to feed them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    DeiTConfig,
    GenerationConfig,
    TrOCRConfig,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
)

from seq2engine.model.config import ModelConfig
from seq2engine.model.tokenizers.byte_level import tokenizer_json

HEIGHT, WIDTH, PATCH = 32, 48, 8
PATCHES = (HEIGHT // PATCH) * (WIDTH // PATCH)
LENGTH = 32
START = END = 2
PAD = 1
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,!?'-Ġ"
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
VOCAB = len(SPECIAL) + len(LETTERS)
ENCODERS = {"vit": ViTConfig, "deit": DeiTConfig}
PROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "do_resize": True,
    "size": {"height": HEIGHT, "width": WIDTH},
    "resample": 2,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def small_trocr(
    seed: int = 0, kind: str = "vit", encoder: dict[str, Any] | None = None, tied: bool = True, **decoder: Any
) -> Any:
    """A random model whose outputs wander, depend on the image and end at various lengths."""
    encoder_config = ENCODERS[kind](
        **{
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "intermediate_size": 40,
            "image_size": [HEIGHT, WIDTH],
            "patch_size": PATCH,
            **(encoder or {}),
        }
    )
    decoder_config = TrOCRConfig(
        **{
            "vocab_size": VOCAB,
            "d_model": 32,
            "decoder_layers": 2,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 64,
            "max_position_embeddings": LENGTH,
            "cross_attention_hidden_size": encoder_config.hidden_size,
            "pad_token_id": PAD,
            "eos_token_id": END,
            "decoder_start_token_id": START,
            "tie_word_embeddings": tied,
            **decoder,
        }
    )
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder_config, decoder_config)
    model = VisionEncoderDecoderModel(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                strength = 0.5 if "embed" in name or "token" in name else 3 * weight[0].numel() ** -0.5
                weight.normal_(0.0, strength, generator=generator)
            else:
                scale = "norm" in name and name.endswith("weight")
                weight.normal_(float(scale), 0.1 if scale else 0.02, generator=generator)
        decoded = model.decoder.model.decoder
        if decoder_config.use_learned_position_embeddings:
            decoded.embed_positions.weight *= 4
        for layer in decoded.layers:
            layer.fc2.weight -= layer.fc2.weight.mean(dim=1, keepdim=True)
        model.decoder.output_projection.weight[END] *= 2
    return model


def saved_trocr(model: Any, folder: Path, processor: dict[str, Any] | None = None, **generation: Any) -> Path:
    """The folder with the model, its tokenizer and its processor's settings, as a user of the library has it."""
    tokens = {"decoder_start_token_id": START, "bos_token_id": 0, "eos_token_id": END, "pad_token_id": PAD}
    model.generation_config = GenerationConfig(**{**tokens, "max_length": LENGTH, **generation})
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, **(processor or {})}))
    (folder / "tokenizer.json").write_text(letters_json(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "RobertaTokenizer", "eos_token": "</s>"}')
    return folder


def letters_json() -> str:
    """A tokenizer whose tokens are letters."""
    names = {name: i for i, name in enumerate((*SPECIAL, *LETTERS))}
    return tokenizer_json(names, [], [(i, name, True) for i, name in enumerate(SPECIAL)])


def image_config(**changes: Any) -> ModelConfig:
    """A small model of ours that takes images."""
    return ModelConfig(
        **{
            "encoder_layers": 1,
            "decoder_layers": 2,
            "heads": 4,
            "d_model": 32,
            "d_ff": 64,
            "source_vocab": 0,
            "target_vocab": 60,
            "positions": "learned",
            "activation": "gelu",
            "share_embeddings": False,
            "scale_embeddings": False,
            "embedding_norm": True,
            "encoder_width": 24,
            "encoder_heads": 3,
            "encoder_d_ff": 40,
            "encoder_norm": "pre",
            "encoder_norm_epsilon": 1e-12,
            "front_end": "image",
            "image_height": HEIGHT,
            "image_width": WIDTH,
            "patch_height": PATCH,
            "patch_width": PATCH,
            "max_source": 1 + PATCHES,
            "max_target": 2 * LENGTH,
            **changes,
        }
    )


def pixels(count: int, channels: int = 3, seed: int = 0) -> list[np.ndarray]:
    """Normalised pixels [channels, height, width]: strokes of one shade on paper of another, and noise."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        ink = np.kron(rng.normal(size=(HEIGHT // 4, WIDTH // 4)), np.ones((4, 4))) > 0.3
        shades = rng.uniform(-1, 1, (channels, 2, 1, 1))
        image = np.where(ink, shades[:, 0], shades[:, 1]) + 0.2 * rng.normal(size=(channels, HEIGHT, WIDTH))
        found.append(np.clip(image, -1, 1).astype(np.float32))
    return found


def library_outputs(model: Any, sources: list[np.ndarray], **options: Any) -> list[list[int]]:
    """What the library's `generate` emits after the start token, with the end token, without padding."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = model.generate(torch.from_numpy(np.stack(sources)), **options)
    found = []
    for row in made.tolist():
        tokens = row[1:]
        found.append(tokens[: tokens.index(END) + 1] if END in tokens else tokens)
    return found


def pictures(count: int, seed: int = 0) -> list[np.ndarray]:
    """Pictures of several sizes as bytes [height, width, 3]: strokes on paper, and noise."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        height, width = 24 + 5 * number, 90 + 17 * number
        ink = np.kron(rng.normal(size=(height // 6 + 1, width // 6 + 1)), np.ones((6, 6)))[:height, :width] > 0.3
        shades = rng.integers(0, 256, (2, 3))
        image = np.where(ink[:, :, None], shades[0], shades[1]) + rng.integers(-25, 26, (height, width, 3))
        found.append(image.clip(0, 255).astype(np.uint8))
    return found

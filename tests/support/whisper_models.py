"""Small random Whisper models of the real library, and features to feed them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

from seq2engine.model.config import ModelConfig

POSITIONS = 24  # of the encoder: 48 frames
LENGTH = 40
END, START, NO_TIMESTAMPS, VOCAB = 3, 4, 90, 100  # timestamps are the tokens behind NO_TIMESTAMPS
GENERATION = {
    "suppress_tokens": [5, 6, 7, 20, 21, *range(NO_TIMESTAMPS, VOCAB)],
    "begin_suppress_tokens": [22, END],
    "no_timestamps_token_id": NO_TIMESTAMPS,
    "max_length": LENGTH,
    "return_timestamps": False,
    "alignment_heads": [[0, 1], [1, 0]],
    "is_multilingual": False,
}
LANGUAGES = {"<|en|>": 5, "<|de|>": 6}
MULTILINGUAL = {"is_multilingual": True, "lang_to_id": LANGUAGES, "task_to_id": {"translate": 7, "transcribe": 8}}


def small_whisper(seed: int = 0, mels: int = 80, **changes: Any) -> Any:
    """A random model whose outputs wander, depend on the audio and end at various lengths."""
    config = WhisperConfig(
        **{
            "vocab_size": VOCAB,
            "num_mel_bins": mels,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "max_source_positions": POSITIONS,
            "max_target_positions": LENGTH,
            "pad_token_id": END,
            "bos_token_id": END,
            "eos_token_id": END,
            "decoder_start_token_id": START,
            "begin_suppress_tokens": None,
            **changes,
        }
    )
    model = WhisperForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name == "model.encoder.embed_positions.weight":
                continue  # sinusoids
            if weight.ndim > 1:
                strength = 0.5 if "embed" in name else 3 * weight[0].numel() ** -0.5
                weight.normal_(0.0, strength, generator=generator)
            else:
                scale = name.endswith("norm.weight")
                weight.normal_(float(scale), 0.1 if scale else 0.02, generator=generator)
        model.model.decoder.embed_positions.weight *= 4
        for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
            layer.fc2.weight -= layer.fc2.weight.mean(dim=1, keepdim=True)
        model.model.decoder.embed_tokens.weight[END] *= 2
    return model


def audio_config(**changes: Any) -> ModelConfig:
    """A small model of ours that takes audio."""
    return ModelConfig(
        **{
            "encoder_layers": 1,
            "decoder_layers": 2,
            "heads": 4,
            "d_model": 32,
            "d_ff": 64,
            "source_vocab": 0,
            "target_vocab": 60,
            "norm": "pre",
            "positions": "learned",
            "activation": "gelu",
            "share_embeddings": False,
            "scale_embeddings": False,
            "front_end": "mel",
            "mels": 20,
            "max_source": POSITIONS,
            "max_target": 2 * LENGTH,
            "pad_id": 2,
            **changes,
        }
    )


def saved_whisper(model: Any, folder: Path, **generation: Any) -> Path:
    """The folder with the model, as a user of the library has it."""
    tokens = {"decoder_start_token_id": START, "bos_token_id": END, "eos_token_id": END, "pad_token_id": END}
    model.generation_config = GenerationConfig(**{**tokens, **GENERATION, **generation})
    model.save_pretrained(folder)
    return folder


def library_outputs(model: Any, sources: list[np.ndarray], prompt: list[int], **options: Any) -> list[list[int]]:
    """What the library's `generate` emits after the prompt, with the end token, without padding."""
    given = torch.from_numpy(np.stack(sources))
    mask = torch.ones((len(sources), given.shape[2]), dtype=torch.long)
    fed = torch.tensor([[START, *prompt]] * len(sources))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = model.generate(
            given, attention_mask=mask, decoder_input_ids=fed, return_timestamps=False, max_new_tokens=None, **options
        )
    found = []
    for row in made.tolist():
        row = row[fed.shape[1] :] if row[: fed.shape[1]] == fed[0].tolist() else row
        row = row[: row.index(END)] if END in row else row
        whole = len(row) < LENGTH - fed.shape[1]  # the library cuts off the end token of the longest row
        found.append([*row, END] if whole else row)
    return found


def features(count: int, mels: int = 80, frames: int = 2 * POSITIONS, seed: int = 0) -> list[np.ndarray]:
    """Arrays that look like log-mel features: smooth in time, between -1 and 2."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        rough = rng.normal(size=(mels, frames + 8))
        smooth = np.stack([np.convolve(row, np.ones(9) / 3, mode="valid") for row in rough])
        found.append(np.clip(smooth * rng.uniform(0.5, 1.5), -1.0, 2.0).astype(np.float32))
    return found

"""A small random Whisper model with a tokenizer, as the real library has it and as a bundle of ours, and sounds for it.

Its window is 0.48 s. Tokens of text are letters; as in all Whisper models they come before the end token.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from seq2engine.export.artifact.bundle import Bundle
from seq2engine.exporting import export_checkpoint
from seq2engine.model.tokenizers.byte_level import tokenizer_json
from seq2engine.runtime.speech.features import HOP, RATE, log_mel
from support.whisper_models import LENGTH, POSITIONS, saved_whisper, small_whisper

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,!?'-:;()[]\"/@+=Ġ"
END = len(LETTERS)
START, ENGLISH, GERMAN, TRANSLATE, TRANSCRIBE, PREVIOUS, SILENT, NONE = range(END + 1, END + 9)
VOCAB = NONE + 1 + POSITIONS + 1  # the rest are timestamps
WINDOW = 2 * POSITIONS * HOP  # samples
TOKENS = {"pad_token_id": END, "bos_token_id": END, "eos_token_id": END, "decoder_start_token_id": START}
SETTINGS: dict[str, Any] = {
    **TOKENS,
    "suppress_tokens": [5, 6, *range(START, NONE)],
    "begin_suppress_tokens": [LETTERS.index("Ġ"), END],
    "no_timestamps_token_id": NONE,
    "prev_sot_token_id": PREVIOUS,
    "max_initial_timestamp_index": 5,
    "max_length": LENGTH,
    "alignment_heads": [[0, 1], [1, 0], [1, 3]],
}
MULTILINGUAL = {
    "is_multilingual": True,
    "lang_to_id": {"<|en|>": ENGLISH, "<|de|>": GERMAN},
    "task_to_id": {"translate": TRANSLATE, "transcribe": TRANSCRIBE},
}


@dataclass(frozen=True)
class SpeechModel:
    theirs: Any
    bundle: Bundle


@cache
def speech_model(
    folder: Path, seed: int = 1, multilingual: bool = False, timed: bool = True, ending: float = 2.0
) -> SpeechModel:
    """One that is not `timed` never emits a timestamp, as real models do without timestamps.

    The larger `ending`, the more the end token depends on the audio."""
    model = small_whisper(seed, vocab_size=VOCAB, **TOKENS)
    with torch.no_grad():
        table = model.model.decoder.embed_tokens.weight
        table[END] *= ending
        table[NONE + 1 :] *= 1.5  # so that timestamps are likely now and then
    own = folder / "library"
    never = [*SETTINGS["suppress_tokens"], *([] if timed else range(NONE, VOCAB))]
    languages = MULTILINGUAL if multilingual else {}
    saved_whisper(model, own, **{**SETTINGS, **languages, "suppress_tokens": never})
    names = {START: "<|startoftranscript|>", END: "<|endoftext|>"}
    added = [(i, names.get(i, f"<|{i}|>"), True) for i in range(END, VOCAB)]
    text = tokenizer_json({letter: i for i, letter in enumerate(LETTERS)}, [], added)
    (own / "tokenizer.json").write_text(text, encoding="utf-8")
    (own / "tokenizer_config.json").write_text('{"tokenizer_class": "WhisperTokenizer", "eos_token": "<|endoftext|>"}')
    bundle = export_checkpoint(own, folder / "bundle", precisions=("fp32",))
    return SpeechModel(type(model).from_pretrained(own).eval(), bundle)


def sound(samples: int, seed: int = 0) -> np.ndarray:
    """Tones that come and go, over noise."""
    rng = np.random.default_rng(seed)
    times = np.arange(samples) / RATE
    wave = 0.02 * rng.standard_normal(samples)
    for _ in range(6):
        pitch, rate, phase = rng.uniform(100, 3000), rng.uniform(1, 9), rng.uniform(0, 6)
        wave += 0.1 * np.sin(2 * np.pi * pitch * times) * np.sin(2 * np.pi * rate * times + phase).clip(0)
    return wave.astype(np.float32)


def library_segments(model: Any, wave: np.ndarray, **options: Any) -> list[tuple[float, float, list[int]]]:
    """Start, end and tokens of the segments that the library's `generate` finds, without what closes a window."""
    padded = np.pad(wave, (0, max(0, WINDOW - len(wave))))
    features = torch.from_numpy(log_mel(padded, model.config.num_mel_bins))[None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = model.generate(features, return_segments=True, temperature=0.0, **options)["segments"][0]
    return [(float(one["start"]), float(one["end"]), text_of(one["tokens"].tolist())) for one in found]


def text_of(tokens: list[int] | tuple[int, ...]) -> list[int]:
    return [token for token in tokens if token < END]

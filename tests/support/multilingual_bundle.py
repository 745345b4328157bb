"""A bundle of a tiny random model of several languages, as NLLB and mBART are: its outputs begin with a language."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.model.tokenizers.sentencepieces import PieceTable, SentencePieceTokenizer
from support.tokenizer_cases import pieces, processor

MODEL = pieces("bpe")
PIECES = {processor(MODEL).id_to_piece(i): i for i in range(3, 120)}
LANGUAGES = {"eng": 120, "fra": 121, "zho": 122}
TABLE = PieceTable(MODEL, PIECES, unknown=0, end=2)
TOKENIZER = SentencePieceTokenizer(TABLE, TABLE, LANGUAGES, "first")
CONFIG = dataclasses.replace(
    PRESETS["tiny"],
    d_model=32,
    d_ff=48,
    source_vocab=123,
    target_vocab=123,
    max_source=24,
    max_target=12,
    start_id=1,
    end_id=2,
    pad_id=0,
)


def multilingual_bundle(folder: Path) -> Bundle:
    checkpoint = folder / "checkpoint"
    (checkpoint / "tokenizer").mkdir(parents=True)
    TOKENIZER.write(checkpoint / "tokenizer")
    return onnx_from_model(random_model(CONFIG, 5), folder / "bundle", ("fp32",), companions=checkpoint)

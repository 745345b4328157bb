"""A bundle that takes text: a tiny random model over letters, its tokenizer and its way of decoding."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.model.tokenizers.symbols import SymbolTokenizer, table_from_texts

LETTERS = "abcdefghij é\u2028😀"  # a line separator and an emoji are letters like any other
TOKENIZER = SymbolTokenizer(table_from_texts([LETTERS], "characters"), table_from_texts([LETTERS], "characters"))
VOCAB = len(TOKENIZER.target.symbols)
CONFIG = dataclasses.replace(
    PRESETS["tiny"], d_model=32, d_ff=48, source_vocab=VOCAB, target_vocab=VOCAB, max_source=16, max_target=12
)


def text_bundle(folder: Path, **generation: object) -> Bundle:
    checkpoint = folder / "checkpoint"
    (checkpoint / "tokenizer").mkdir(parents=True)
    TOKENIZER.write(checkpoint / "tokenizer")
    if generation:
        (checkpoint / "generation.json").write_text(json.dumps(generation))
    return onnx_from_model(random_model(CONFIG, 3), folder / "bundle", ("fp32",), companions=checkpoint)

"""What the tests of tokenizers share: tiny trained models, texts that go wrong easily, and a way to disk and back."""

from __future__ import annotations

import io
import random
from functools import cache
from pathlib import Path

import sentencepiece

from seq2engine.model.tokenizers.base import FOLDER, Tokenizer
from seq2engine.model.tokenizers.reading import read_tokenizer

TEXTS = [
    "",
    "hello world",
    "  two  spaces ",
    "na\u00efve caf\u00e9 \u00fcber",
    "\u4e2d\u6587 \u5b57 \u0420\u0443\u0441",
    "smile \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 end",
    "a\tb\u00a0c \ufb01ne",
    "\u2581 <unknown> & @@ ##",
    "hello " * 1666 + "abcd",  # 10,000 characters
    "x" * 10_000,
]


def lines(seed: int, letters: str = "abcdefghijklmnopqrstuvwxyz") -> list[str]:
    chosen = random.Random(seed)
    words = ["".join(chosen.choices(letters, k=chosen.randint(1, 7))) for _ in range(150)]
    return [" ".join(chosen.choices(words, k=8)) + "." for _ in range(300)]


@cache
def pieces(kind: str, seed: int = 0, **options: int) -> bytes:
    """A SentencePiece model of about a hundred pieces."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines(seed)),
        model_writer=written,
        model_type=kind,
        minloglevel=2,
        num_threads=1,
        **{"vocab_size": 120, **options},
    )
    return written.getvalue()


def processor(model: bytes) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def stored(tokenizer: Tokenizer, root: Path) -> Path:
    """A folder that holds a tokenizer as a checkpoint does."""
    (root / FOLDER).mkdir(parents=True)
    tokenizer.write(root / FOLDER)
    return root


def check_round_trip(tokenizer: Tokenizer, root: Path) -> None:
    again = read_tokenizer(stored(tokenizer, root))
    assert again == tokenizer
    for text in TEXTS:
        assert again.encode_source(text) == tokenizer.encode_source(text)
        ids = tokenizer.encode_target(text)
        assert again.encode_target(text) == ids
        assert again.decode_target(ids) == tokenizer.decode_target(ids)

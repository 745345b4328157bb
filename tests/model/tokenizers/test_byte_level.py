"""Byte-level vocabularies from .tiktoken files and from vocab.json with merges.txt: the same ids, and text back."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seq2engine.errors import CheckpointError
from seq2engine.model.tokenizers.byte_level import letters_of_bytes, merges_from_file, vocabulary_from_tiktoken
from seq2engine.model.tokenizers.hugging_face import HuggingFaceTokenizer
from seq2engine.model.tokenizers.importing import tokenizer_from_hugging_face, tokenizer_from_tiktoken
from seq2engine.model.whisper_tokens import Layout

MERGED = [b"th", b"he", b"the", b" the", " é".encode(), b"in", b"ing", b" t"]  # in the order of their ranks
LAYOUT = Layout(256 + len(MERGED), 99)


def written(folder: Path) -> Path:
    tokens = [bytes([i]) for i in range(256)] + MERGED
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    path = folder / "gpt2.tiktoken"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    path = written(tmp_path_factory.mktemp("tiktoken"))
    found = tokenizer_from_tiktoken(path.parent, LAYOUT)
    assert isinstance(found, HuggingFaceTokenizer)
    return found


def by_ranks(piece: bytes) -> list[int]:
    """Byte pair encoding as its definition reads: the pair of the lowest rank first."""
    ranks = {bytes([i]): i for i in range(256)} | {token: 256 + i for i, token in enumerate(MERGED)}
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while True:
        pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not pairs:
            return [ranks[part] for part in parts]
        _, place = min(pairs)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


@given(st.text(alphabet="thein gé", max_size=12).filter(lambda text: " " not in text[1:] and text != " "))
def test_ids_are_those_of_the_definition(tokenizer: HuggingFaceTokenizer, text: str) -> None:
    assert tokenizer.encode_target(text)[:-1] == by_ranks(text.encode())


@given(st.text(max_size=20))
def test_text_comes_back(tokenizer: HuggingFaceTokenizer, text: str) -> None:
    assert tokenizer.decode_target(tokenizer.encode_target(text)) == text.encode("utf-8", "ignore").decode()


def test_special_tokens_have_no_text_and_timestamps_have(tokenizer: HuggingFaceTokenizer) -> None:
    names = LAYOUT.special_tokens()
    assert tokenizer.target_tokens([LAYOUT.end, LAYOUT.start]) == ["<|endoftext|>", "<|startoftranscript|>"]
    first = LAYOUT.end + names.index("<|0.00|>")
    assert tokenizer.decode_target([LAYOUT.start, first, 72, 105]) == "<|0.00|>Hi"


def test_vocab_and_merges_are_the_same_tokenizer(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    vocabulary, merges = vocabulary_from_tiktoken(written(tmp_path))
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "whisper"}))
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in merges) + "\n")
    added = {name: i for i, name in enumerate(LAYOUT.special_tokens(), LAYOUT.end)}
    (folder / "added_tokens.json").write_text(json.dumps(added))
    found = tokenizer_from_hugging_face(folder)
    assert found is not None
    for text in ("the thing", " é in the", "<|en|>"):
        assert found.encode_target(text) == tokenizer.encode_target(text)
    (folder / "merges.txt").write_text("a b c\n")
    with pytest.raises(CheckpointError, match="has the line 'a b c', expected two tokens"):
        tokenizer_from_hugging_face(folder)


def test_all_bytes_have_letters_of_their_own() -> None:
    letters = letters_of_bytes()
    assert len(set(letters)) == 256
    assert letters[ord("A")] == "A"
    assert letters[ord(" ")] == "Ġ"


def test_merges_of_a_file_keep_their_order(tmp_path: Path) -> None:
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    assert merges_from_file(tmp_path / "merges.txt") == [("t", "h"), ("th", "e")]


def test_a_token_of_a_megabyte_is_refused_at_once(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_text(path.read_text() + f"{base64.b64encode(b'a' * 2**20).decode()} {LAYOUT.end}\n")
    with pytest.raises(CheckpointError, match="a token of 1048576 bytes, expected at most 1024"):
        tokenizer_from_tiktoken(tmp_path, LAYOUT)

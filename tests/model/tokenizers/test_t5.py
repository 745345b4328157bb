"""T5's tokenizers: SentencePiece with sentinels, and ByT5's bytes, against the library where it has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.tokenizer_cases import TEXTS, pieces, processor
from transformers import ByT5Tokenizer

from seq2engine.errors import CheckpointError, RequestError
from seq2engine.model.tokenizers.base import FOLDER
from seq2engine.model.tokenizers.byt5 import ByteTokenizer
from seq2engine.model.tokenizers.importing import tokenizer_from_hugging_face
from seq2engine.model.tokenizers.reading import read_tokenizer

TEXT = "The <extra_id_0> walks in <extra_id_1> park. 日本 é"


def again(tokenizer, root: Path):
    """The same, to disk and back."""
    (root / FOLDER).mkdir(parents=True)
    tokenizer.write(root / FOLDER)
    return read_tokenizer(root)


def folder_of(folder: Path, model: bytes, model_type: str) -> Path:
    folder.mkdir()
    (folder / "spiece.model").write_bytes(model)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def test_byt5_is_the_library_s(tmp_path: Path) -> None:
    ByT5Tokenizer().save_pretrained(tmp_path / "byt5")
    (tmp_path / "byt5" / "config.json").write_text(json.dumps({"model_type": "t5"}))
    theirs, ours = ByT5Tokenizer(), tokenizer_from_hugging_face(tmp_path / "byt5")
    assert ours == again(ours, tmp_path / "ours") == ByteTokenizer(125)
    for text in (*TEXTS, TEXT, "", "<extra_id_124><extra_id_7>"):
        ids = theirs(text).input_ids
        assert ours.encode_source(text) == ours.encode_target(text) == ids
        if "<" not in text:
            assert ours.decode_target(ids) == theirs.decode(ids, skip_special_tokens=True) == text
    assert ours.decode_target(ours.encode_target(TEXT)) == TEXT
    assert ours.decode_target([0, 3 + 0xE6, 3 + 65, 1]) == "A"  # half a letter is none
    assert ours.target_tokens([1, 68, 200, 259]) == ["</s>", "A", "<0xC5>", "<extra_id_0>"]
    assert ours.unknown_source(TEXT) == ours.unknown_target(TEXT) == []
    assert len(ours.encode_source("<extra_id_125>")) == len("<extra_id_125>") + 1  # no such token: text
    with pytest.raises(RequestError, match="no languages"):
        ours.encode_source("a", "fra_Latn")


def test_sentinels_count_down_behind_the_pieces(tmp_path: Path) -> None:
    model = pieces("unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    ours = tokenizer_from_hugging_face(folder_of(tmp_path / "t5", model, "t5"))
    read = processor(model)
    size = read.get_piece_size()
    assert again(ours, tmp_path / "ours").encode_source(TEXTS[0]) == [*read.encode(TEXTS[0]), 1]
    ids = ours.encode_source("a <extra_id_0> b <extra_id_99>")
    assert [token for token in ids if token >= size] == [size + 99, size]
    assert ids[-1] == 1
    assert "<extra_id_0>" in ours.decode_target(ids)
    assert ours.target_tokens([size + 99]) == ["<extra_id_0>"]


def test_mt5_has_no_sentinels_behind_its_pieces(tmp_path: Path) -> None:
    model = pieces("unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    folder = folder_of(tmp_path / "mt5", model, "mt5")
    ours = tokenizer_from_hugging_face(folder)
    assert ours.source.sentinels == frozenset()
    assert ours.encode_source(TEXTS[0]) == [*processor(model).encode(TEXTS[0]), 1]


def test_a_damaged_description_is_refused(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "about.json").write_text(json.dumps({"kind": "bytes", "sentinels": -1}))
    with pytest.raises(CheckpointError, match="sentinels -1, expected a whole number"):
        read_tokenizer(tmp_path)

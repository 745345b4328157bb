"""Which files make which tokenizer, the note on a folder without a usable one, and what reading one costs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.tokenizer_cases import lines, pieces, processor, stored

from seq2engine.errors import CheckpointError, MissingFileError
from seq2engine.model.importers.imported import tokenizer_or_note
from seq2engine.model.tokenizers.fairseq import FairseqTokenizer, Words
from seq2engine.model.tokenizers.importing import tokenizer_from_hugging_face
from seq2engine.model.tokenizers.subwords import MergeCodes
from seq2engine.model.tokenizers.symbols import SymbolTokenizer, table_from_texts


def test_no_tokenizer_files_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bart"}')
    assert tokenizer_from_hugging_face(tmp_path) is None


@pytest.mark.parametrize(
    ("config", "name", "shown"),
    [
        ('{"model_type": "bart", "tokenizer_class": "BigBirdTokenizer"}', "spiece.model", "BigBirdTokenizer"),
        ('{"model_type": "bart"}', "vocab.json", "of no known class"),
        ('{"model_type": "xyz"}', "sentencepiece.bpe.model", "of no known class"),
    ],
)
def test_files_that_need_another_library(tmp_path: Path, config: str, name: str, shown: str) -> None:
    (tmp_path / "config.json").write_text(config)
    (tmp_path / name).write_bytes(pieces("bpe"))
    with pytest.raises(CheckpointError) as caught:
        tokenizer_from_hugging_face(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} has a tokenizer without tokenizer.json ({shown}); make one with transformers: "
        f"AutoTokenizer.from_pretrained('{tmp_path}').save_pretrained('{tmp_path}')"
    )


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({"vocab.json": b'{"</s>": 0, "<unk>": 1}'}, "target.spm"),
        ({"vocab.json": b"{", "target.spm": None}, "vocab.json: not JSON: it is truncated"),
        ({"vocab.json": b"[]", "target.spm": None}, "vocab.json: it is [], expected an object"),
        ({"vocab.json": b'{"</s>": 0}', "target.spm": None}, "'<unk>'"),
        ({"target.spm": None}, "No such file or directory"),
        (
            {"vocab.json": b'{"</s>": 0, "<unk>": 1}', "target.spm": b"cut"},
            "target.spm is not a complete SentencePiece",
        ),
        ({"tokenizer_config.json": b"nothing"}, "tokenizer_config.json cannot be used: not JSON: "),
        ({"config.json": b'{"tokenizer_class": 3}'}, "'int' object has no attribute"),
    ],
)
def test_damaged_folders(tmp_path: Path, files: dict[str, bytes | None], error: str) -> None:
    for name, data in {"source.spm": None, **files}.items():
        (tmp_path / name).write_bytes(pieces("bpe") if data is None else data)
    with pytest.raises(CheckpointError) as caught:
        tokenizer_from_hugging_face(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"the tokenizer in {tmp_path} cannot be used (")
    assert error in message
    assert message.endswith("; download it again")
    assert "\n" not in message


def marian_without_target(folder: Path, more: tuple[str, ...] = (), fewer: int = 0) -> bytes:
    """A folder that declares a Marian tokenizer, with a vocabulary of source.spm's pieces; the bytes of source.spm."""
    model = pieces("unigram")
    read = processor(model)
    text = [read.id_to_piece(i) for i in range(3 + fewer, read.get_piece_size())]
    listed = ["</s>", "<unk>", *text, ">>fra<<", *more, "<pad>"]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "marian"}')
    (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(listed)}))
    (folder / "source.spm").write_bytes(model)
    return model


def test_marian_with_one_sentencepiece_model_for_both_sides(tmp_path: Path) -> None:
    model = marian_without_target(tmp_path)
    alone = tokenizer_from_hugging_face(tmp_path)
    assert alone is not None
    (tmp_path / "target.spm").write_bytes(model)
    both = tokenizer_from_hugging_face(tmp_path)
    assert both is not None
    for text in lines(3)[:20]:
        assert alone.encode_source(text) == both.encode_source(text)
        assert alone.encode_target(text) == both.encode_target(text)
        assert alone.decode_target(alone.encode_target(text)) == both.decode_target(both.encode_target(text))


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"more": ("▁bonjour", "▁le")}, "has 2 pieces that source.spm does not have, and lacks 0 of its own"),
        ({"fewer": 1}, "has 0 pieces that source.spm does not have, and lacks 1 of its own"),
    ],
)
def test_marian_without_target_spm_is_refused(tmp_path: Path, changes: Any, shown: str) -> None:
    """Other pieces are those of a second model: that is the file which is missing. It never becomes a note."""
    marian_without_target(tmp_path, **changes)
    with pytest.raises(MissingFileError) as caught:
        tokenizer_or_note(lambda: tokenizer_from_hugging_face(tmp_path))
    assert str(caught.value) == (
        f"{tmp_path / 'target.spm'} is missing: the target's vocabulary {shown}; copy it from where the model comes "
        "from, or, for a model of token ids, remove source.spm and vocab.json"
    )


def test_reading_imports_nothing_that_is_not_needed(tmp_path: Path) -> None:
    table = table_from_texts(["ab"], "characters")
    stored(SymbolTokenizer(table, table), tmp_path)
    code = (
        "import sys; from pathlib import Path\n"
        "from seq2engine.model.tokenizers.reading import read_tokenizer; import seq2engine.model.tokenizers.importing\n"
        f"assert read_tokenizer(Path({str(tmp_path)!r})).encode_source('b') == [5, 2]\n"
        "heavy = [m for m in ('torch', 'sentencepiece', 'tokenizers', 'transformers', 'numpy') if m in sys.modules]\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["symbols", "sentencepiece", "huggingface", "fairseq"])
def test_ten_thousand_lines_are_soon_encoded(tmp_path: Path, kind: str) -> None:
    """Processor time, so that a busy machine does not matter; in quiet it is a tenth of this."""
    texts = [line for seed in range(34) for line in lines(seed)][:10_000]
    if kind == "symbols":
        table = table_from_texts(texts[:100], "characters")
        made = SymbolTokenizer(table, table)
    elif kind == "fairseq":
        codes = MergeCodes("#version: 0.2\n" + "".join(f"{a} {b}\n" for a in "abcdefghij" for b in "klmnopqrst"))
        made = FairseqTokenizer(Words(tuple("abc")), Words(tuple("abc")), codes)
    else:
        (tmp_path / "sentencepiece.bpe.model").write_bytes(pieces("bpe"))
        if kind == "huggingface":
            from transformers import MBart50Tokenizer

            MBart50Tokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "MBart50Tokenizer"}')
        made = tokenizer_from_hugging_face(tmp_path)
    started = time.process_time()
    encoded = [made.encode_source(text) for text in texts]
    took = time.process_time() - started
    print(f"{kind}: {took:.2f} s")
    assert len(encoded) == 10_000
    assert took < 5

"""Whatever a path holds, importing it works or is refused with a sentence of ours; nothing else ever comes out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from seq2engine.errors import CheckpointError
from seq2engine.model.importers.by_name import opened_checkpoint
from seq2engine.model.importers.detect import import_checkpoint
from seq2engine.model.tokenizers.importing import tokenizer_from_hugging_face

BART = json.dumps({"model_type": "bart", "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 9})
PLACES = {  # where junk may lie -> what lies beside it
    "x.pt": {},
    "config.json": {},
    "seq2engine.json": {},
    "model.safetensors": {"config.json": BART},
    "pytorch_model.bin": {"config.json": BART},
    "model.safetensors.index.json": {"config.json": BART},
    "generation_config.json": {"config.json": BART},
}
TEXTS = ["", "root:x:0:0:root:/root:/bin/bash\n", "null", "[]", "{}", '{"weight_map": [1]}', '{"model_type": ["bart"]}']
TOKENIZERS = ("tokenizer.json", "source.spm", "vocab.json", "spiece.model", "sentencepiece.bpe.model")


def refused(source: Path, target: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        import_checkpoint(source, target)
    assert not target.exists()
    return str(caught.value)


def folder_with(root: Path, name: str, content: bytes) -> Path:
    for beside, text in PLACES[name].items():
        (root / beside).write_text(text)
    (root / name).write_bytes(content)
    return root


@pytest.mark.parametrize("name", PLACES)
def test_texts(name, tmp_path):
    for number, text in enumerate(TEXTS):
        source = tmp_path / str(number)
        source.mkdir()
        refused(folder_with(source, name, text.encode()), tmp_path / "target")


@pytest.mark.parametrize("name", PLACES)
@settings(deadline=None, max_examples=60)
@given(
    content=st.binary(max_size=200), begin=st.sampled_from([b"", b"\x80\x02", b"PK\x03\x04", b"{", b"\x08" + bytes(7)])
)
@example(content=b"[" * 3000, begin=b"")
def test_any_bytes(name, content, begin, tmp_path_factory):
    root = tmp_path_factory.mktemp("junk")
    refused(folder_with(root, name, begin + content), root / "target")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A file of each kind, nothing wrong with it."""
    root = tmp_path_factory.mktemp("whole")
    weights = {"model.shared.weight": torch.ones(9, 8)}
    torch.save({"model": weights, "args": None}, root / "x.pt")
    torch.save(weights, root / "pytorch_model.bin")
    save_file(weights, root / "model.safetensors")
    return root


@pytest.mark.parametrize("name", ["x.pt", "pytorch_model.bin", "model.safetensors"])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_files_that_are_cut_off_or_have_a_wrong_byte(name, whole, data, tmp_path_factory):
    content = bytearray((whole / name).read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        del content[place:]
    else:
        content[place] ^= data.draw(st.integers(1, 255))
    root = tmp_path_factory.mktemp("cut")
    refused(folder_with(root, name, bytes(content)), root / "target")


@settings(deadline=None, max_examples=40)
@given(content=st.binary(max_size=100), name=st.sampled_from(TOKENIZERS), model=st.sampled_from(["marian", "pegasus"]))
def test_any_bytes_as_a_tokenizer(content, name, model, tmp_path_factory):
    root = tmp_path_factory.mktemp("junk")
    (root / "config.json").write_text(json.dumps({"model_type": model}))
    (root / name).write_bytes(content)
    with pytest.raises(CheckpointError):
        tokenizer_from_hugging_face(root)


def test_a_text_file_is_no_checkpoint(tmp_path, cli):
    path = tmp_path / "passwd"
    path.write_text("root:x:0:0:root:/root:/bin/bash\n")
    code, out, err = cli("export", path, tmp_path / "bundle", "--quiet")
    wanted = "(it begins with b'root:x:0:0:root:'); expected a file that torch.save wrote"
    assert (code, out, err) == (1, "", f"error: {path} cannot be read {wanted}\n")


@pytest.mark.parametrize("name", ["t5-small", "Helsinki-NLP/opus-mt-de-en", "facebook/nllb-200-distilled-600M"])
def test_a_name_of_the_hub_gets_a_hint(name, tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in (("export", name, "bundle"), ("import", name, "checkpoint")):
        code, _, err = cli(*words, "--quiet")
        assert code == 1
        assert err.count("\n") == 1
        assert err.endswith(f"; if it is a model of the Hugging Face hub, the checkpoint is hf:{name}\n")
    if "/" in name:
        (tmp_path / name).parent.mkdir()
        assert "hub" not in cli("export", name, "bundle", "--quiet")[2]  # a folder of that name: a slip


def test_a_path_is_no_name_of_the_hub(tmp_path):
    for name in (str(tmp_path / "a" / "b"), "a/b/c", "nowhere"):
        with pytest.raises(CheckpointError, match="no checkpoint at") as caught, opened_checkpoint(name):
            pass
        assert "hub" not in str(caught.value)

"""One command for everybody's checkpoints: whose it is is read from the files; and straight to a bundle."""

from __future__ import annotations

import argparse
import json
import sys

import pytest
import torch
from support.hugging_face_models import VOCAB, small_model
from support.tokenizer_cases import pieces, processor
from transformers import GenerationConfig

from seq2engine.model.checkpoint import load_checkpoint, random_model, save_checkpoint
from seq2engine.model.importers.detect import source_of


def one_line(err):
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


@pytest.fixture(scope="module")
def marian(tmp_path_factory):
    """A Marian folder as the hub has it: weights, SentencePiece models, vocabulary, decoding defaults."""
    folder = tmp_path_factory.mktemp("hub") / "opus-mt-xx-yy"
    model = small_model("marian")
    model.generation_config = GenerationConfig(
        num_beams=2, max_length=12, forced_eos_token_id=2, bad_words_ids=[[1]], decoder_start_token_id=3, eos_token_id=2
    )
    model.save_pretrained(folder)
    spoken = pieces("unigram")
    names = [processor(spoken).id_to_piece(i) for i in range(VOCAB + 10)]
    text = [name for name in names if name not in ("<unk>", "<s>", "</s>", "<pad>")][: VOCAB - 4]
    vocabulary = ["<s>", "<pad>", "</s>", "<unk>", *text]
    for side in ("source", "target"):
        (folder / f"{side}.spm").write_bytes(spoken)
    (folder / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(vocabulary)}))
    return folder


def test_import_then_export_is_export_at_once(marian, tmp_path, cli):
    code, out, _ = cli("import", marian, tmp_path / "ours", "--json", "--quiet")
    assert code == 0
    result = json.loads(out)
    assert (result["source"], result["kind"], result["takes_text"]) == ("Hugging Face", "Marian", True)
    assert result["generation"] == {"beam": 2, "max_length": 11, "forced_eos": 2, "banned": [[1]]}
    assert result["parameters"] == sum(p.numel() for p in load_checkpoint(tmp_path / "ours").parameters())

    assert cli("export", tmp_path / "ours", tmp_path / "two", "--quiet")[0] == 0
    assert cli("export", marian, tmp_path / "one", "--quiet")[0] == 0
    first, second = (json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("one", "two"))
    assert first == second
    assert set(first["companions"]) >= {"generation.json", "tokenizer/about.json"}

    code, text, _ = cli("run", tmp_path / "one", "abc de", "", "f" * 400, "--truncate")
    assert code == 0
    assert len(text.split("\n")) == 4
    code, ids, _ = cli("run", tmp_path / "one", "abc de", "--json")
    (hypothesis,) = json.loads(ids)["hypotheses"]
    assert code == 0
    assert len(hypothesis["tokens"]) <= 11
    assert hypothesis["text"] == text.split("\n")[0]


def test_an_import_prints_what_was_made(marian, tmp_path, cli):
    code, out, _ = cli("import", marian, tmp_path / "ours", "--quiet")
    assert code == 0
    assert out.startswith("Marian, ")
    assert "takes text\n" in out
    assert "decoding defaults: beam 2" in out
    assert f"next: seq2engine export {tmp_path / 'ours'} BUNDLE" in out


def test_a_model_whose_tokenizer_cannot_be_used_takes_ids(marian, tmp_path, cli):
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in marian.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    (broken / "source.spm").write_bytes(b"not a model")
    code, out, _ = cli("import", broken, tmp_path / "ours", "--json", "--quiet")
    assert code == 0
    result = json.loads(out)
    assert not result["takes_text"]
    assert [note for note in result["notes"] if note.startswith("takes no text, because ")]
    assert not (tmp_path / "ours" / "tokenizer").exists()


def test_a_marian_that_lost_target_spm_is_refused(marian, tmp_path, cli):
    lost = tmp_path / "lost"
    lost.mkdir()
    for path in marian.iterdir():
        if path.name != "target.spm":
            (lost / path.name).write_bytes(path.read_bytes())
    for command in ("import", "export"):
        code, out, err = cli(command, lost, tmp_path / "ours", "--quiet")
        assert (code, out) == (1, "")
        assert err.startswith(f"error: {lost / 'target.spm'} is missing: ")
        assert err.count("\n") == 1
        assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ({"model": {}, "args": argparse.Namespace()}, "fairseq"),
        ({"model": {}, "cfg": {"model": {}}, "args": None}, "fairseq"),
        ({"model": {}, "generator": {}, "vocab": {}, "opt": argparse.Namespace()}, "OpenNMT-py"),
    ],
)
def test_pickles_are_distinguished_by_their_content(tmp_path, content, name):
    path = tmp_path / "checkpoint_best.pt"
    torch.save(content, path)
    assert source_of(path).name == source_of(tmp_path).name == name


def test_a_described_state_dict(tmp_path):
    (tmp_path / "seq2engine.json").write_text("{}")
    assert source_of(tmp_path).name == "torch.nn.Transformer"


def nothing(folder):
    return folder / "absent"


def an_empty_folder(folder):
    return folder


def ours_already(folder):
    return save_checkpoint(random_model("tiny"), folder / "ours")


def an_unknown_type(folder):
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    return folder


def a_damaged_config(folder):
    (folder / "config.json").write_text('{"model_type": "bart", ')
    return folder


def other_keys(folder):
    torch.save({"weights": {}}, folder / "x.pt")
    return folder / "x.pt"


def no_dict(folder):
    torch.save([1, 2], folder / "x.pt")
    return folder / "x.pt"


def cut_short(folder):
    torch.save({"model": {}, "args": None}, folder / "x.pt")
    (folder / "x.pt").write_bytes((folder / "x.pt").read_bytes()[:200])
    return folder / "x.pt"


def no_weights(folder):
    (folder / "config.json").write_text('{"model_type": "bart"}')
    return folder


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (nothing, "nothing at "),
        (an_empty_folder, "holds no checkpoint that is understood; expected a Hugging Face folder"),
        (ours_already, "is a seq2engine checkpoint already; export it with: seq2engine export"),
        (an_unknown_type, "model_type is 'gpt2', expected one of marian, bart, mbart, m2m_100, pegasus, blenderbot"),
        (a_damaged_config, "config.json cannot be used (not JSON"),
        (other_keys, "holds weights, which is not understood"),
        (no_dict, "holds list, which is not understood"),
        (cut_short, "cannot be read"),
        (no_weights, "has no weights; expected one of model.safetensors"),
    ],
)
def test_what_cannot_be_imported(tmp_path, cli, make, expected):
    source = tmp_path / "source"
    source.mkdir()
    code, _, err = cli("import", make(source), tmp_path / "target", "--quiet")
    assert code == 1
    assert expected in one_line(err)
    assert not (tmp_path / "target").exists()


def test_a_target_that_is_there_is_refused_before_anything_is_read(marian, tmp_path, cli):
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "config.json").write_text("")
    code, _, err = cli("import", tmp_path / "absent", tmp_path / "ours", "--quiet")
    assert code == 1
    assert "exists; name another folder, or add --force" in one_line(err)


def test_export_takes_the_shipped_model_and_no_other(tmp_path, cli):
    assert cli("export", "shipped:g2p", tmp_path / "g2p", "--quiet")[0] == 0
    code, _, err = cli("export", "shipped:none", tmp_path / "none", "--quiet")
    assert code == 1
    assert "no shipped checkpoint 'none', expected one of g2p" in one_line(err)


@pytest.mark.parametrize("command", ["import", "export"])
def test_a_tokenizer_whose_library_is_missing_is_refused(marian, tmp_path, cli, monkeypatch, command):
    """A model without the tokenizer it came with would never take text again, whatever is installed later."""
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    code, _, err = cli(command, marian, tmp_path / "out", "--quiet")
    assert code == 1
    assert "this model's tokenizer needs sentencepiece, which is not installed; " in one_line(err)
    assert "install it with: pip install 'sentencepiece'" in err
    assert not (tmp_path / "out").exists()


def test_a_folder_without_a_tokenizer_takes_ids_with_a_note(marian, tmp_path, cli):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (bare / name).write_bytes((marian / name).read_bytes())
    code, _, err = cli("export", bare, tmp_path / "bundle")
    assert code == 0
    assert "note: takes token ids only: there is no usable tokenizer next to the weights\n" in err
    assert "note: " not in cli("export", marian, tmp_path / "text")[2].replace("note: Marian's sinusoidal", "")

"""From two columns of text to a checkpoint that outputs them, by the command."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from seq2engine.cli.main import main
from seq2engine.model.checkpoint import load_checkpoint
from seq2engine.model.pairs import read_pairs
from seq2engine.model.tokenizers.reading import read_tokenizer
from seq2engine.model.tokenizers.symbols import END
from seq2engine.model.training.data import batch_from_pairs
from seq2engine.model.training.loop import greedy_ids, validate
from seq2engine.model.training.text import numbered_pairs

SMALL = "--source-split characters --d-model 32 --d-ff 64 --heads 2 --encoder-layers 1 --decoder-layers 1 --warmup 40"
SMALL += " --batch-tokens 300 --source-length 16 --max-length 16 --quiet"


@pytest.fixture
def data(tmp_path):
    """Spelling: ab -> A B."""
    rng = random.Random(0)
    for name, count in (("train", 120), ("dev", 20)):
        words = ["".join(rng.choice("abc") for _ in range(rng.randint(1, 4))) for _ in range(count)]
        (tmp_path / f"{name}.tsv").write_text("".join(f"{word}\t{' '.join(word.upper())}\n" for word in words))
    return tmp_path


def train(folder, *more, out="out"):
    files = [str(folder / "train.tsv"), str(folder / out), "--dev", str(folder / "dev.tsv")]
    return main(["train", *files, *SMALL.split(), *more])


def test_a_checkpoint_with_tokenizer_and_report(data, capsys):
    assert train(data, "--epochs", "3", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["epochs"] == 3
    assert result["left_out"] == 0
    model = load_checkpoint(data / "out")
    assert result["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    tokenizer = read_tokenizer(data / "out")
    assert tokenizer.encode_source("cab") == [6, 4, 5, 2]
    assert tokenizer.decode_target([6, 4, 5, 2]) == "C A B"
    page = (data / "out" / "reports" / "training.html").read_text()
    assert "<polyline" in page
    assert "http" not in page.replace("http-equiv", "")
    history = json.loads((data / "out" / "reports" / "training.json").read_text())["history"]
    assert len([entry for entry in history if "exact_match" in entry]) == 3


def test_reported_quality_is_that_of_the_delivered_weights(data, capsys):
    """Not on those of the last epoch, of which the checkpoint holds only a part."""
    assert train(data, "--epochs", "6", "--average", "4", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    model, tokenizer = load_checkpoint(data / "out").eval(), read_tokenizer(data / "out")
    texts = read_pairs(data / "dev.tsv")
    _, exact = validate(model, numbered_pairs(texts, tokenizer))
    assert result["exact_match"] == exact
    report = json.loads((data / "out" / "reports" / "training.json").read_text())
    last = [entry for entry in report["history"] if "dev_loss" in entry][-1]
    assert result["last_epoch_dev_loss"] == last["dev_loss"] != result["dev_loss"]
    assert (result["last_epoch_exact_match"], result["averaged"]) == (last["exact_match"], 4)
    assert report["delivered"]["exact_match"] == exact
    for sample in report["delivered"]["samples"]:
        assert [sample["source"], sample["reference"]] in [list(text) for text in texts]
        (ids,) = decodes_of(model, [tokenizer.encode_source(sample["source"])])
        assert sample["output"] == tokenizer.decode_target(ids)
    assert report["about"]["command"].startswith("seq2engine train ")
    assert "1+1 layers" in report["about"]["model"]


def decodes_of(model, sources):
    batch = batch_from_pairs([(source, [END]) for source in sources])
    with torch.inference_mode():
        return greedy_ids(model, batch.source, batch.source_mask, 16)


def test_batches_that_the_longest_pair_does_not_fit_are_refused(data, capsys):
    longest = max(
        len(source) + len(target.split()) + 2 for source, target in read_pairs(data / "train.tsv")
    )  # two end tokens
    for tokens in (1, longest - 1):
        assert train(data, "--batch-tokens", str(tokens)) == 1
        assert capsys.readouterr().err == (
            f"error: --batch-tokens {tokens}, but the longest pair has {longest} tokens; give {longest} or more, or "
            "leave long pairs out with --source-length and --max-length\n"
        )
    assert not (data / "out.training").exists()
    assert train(data, "--batch-tokens", str(longest), "--epochs", "1") == 0


def test_aligned_files_are_the_same_data(data):
    rows = [line.split("\t") for line in (data / "train.tsv").read_text().splitlines()]
    for i, side in enumerate(("source", "target")):
        (data / f"both.{side}").write_text("".join(f"{row[i]}\n" for row in rows))
    train(data, "--epochs", "1")
    main(["train", str(data / "both"), str(data / "two"), "--dev", str(data / "dev.tsv"), *SMALL.split(), "--epochs=1"])
    assert (data / "out" / "model.safetensors").read_bytes() == (data / "two" / "model.safetensors").read_bytes()


def test_going_on_is_the_same_as_never_stopping(data):
    train(data, "--epochs", "1")
    train(data, "--epochs", "3", "--force")
    train(data, "--epochs", "3", out="whole")
    assert (data / "out" / "model.safetensors").read_bytes() == (data / "whole" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_killed_command_goes_on(data):
    files = [str(data / "train.tsv"), str(data / "out"), "--dev", str(data / "dev.tsv")]
    command = [sys.executable, "-m", "seq2engine", "train", *files, *SMALL.split(), "--epochs", "40", "--threads", "1"]
    cursor = data / "out.training" / "cursor.json"
    process = subprocess.Popen(command)
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and process.poll() is None:
        if cursor.exists() and json.loads(cursor.read_text())["step"] >= 5:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    stopped_at = json.loads(cursor.read_text())["step"]
    assert stopped_at >= 5
    assert not (data / "out").exists()
    assert train(data, "--epochs", "40", "--threads", "1") == 0
    train(data, "--epochs", "40", "--threads", "1", out="whole")
    assert (data / "out" / "model.safetensors").read_bytes() == (data / "whole" / "model.safetensors").read_bytes()


def test_long_pairs_are_left_out_and_counted(data, capsys):
    with (data / "train.tsv").open("a") as file:
        file.write("a" * 40 + "\tA\n")
    train(data, "--epochs", "1")
    assert "1 pairs too long and left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "the train data (FOLDER/train.tsv) is empty; expected pairs of lines"),
        ("a\n", "FOLDER/train.tsv line 1 has 1 columns, expected source<TAB>target"),
        ("a\tA\nb\tB\tc\n", "FOLDER/train.tsv line 2 has 3 columns, expected source<TAB>target"),
        (b"a\tA\n\xff\tB\n", "FOLDER/train.tsv line 2 is not UTF-8; convert the file first"),
        ("a" * 17 + "\tA\n", "no pair of the train data fits 16 source and 16 target tokens; raise --source-length"),
    ],
)
def test_data_that_will_not_do(data, capsys, text, expected):
    (data / "train.tsv").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert train(data) == 1
    error = capsys.readouterr().err
    assert error.replace(str(data), "FOLDER").startswith(f"error: {expected}")
    assert error.count("\n") == 1
    assert not (data / "out").exists()


def test_a_missing_file_and_bad_options(data, capsys):
    (data / "dev.tsv").unlink()
    assert train(data) == 1
    assert "no data at" in capsys.readouterr().err
    (data / "dev.tsv").write_text("a\tA\n")
    assert train(data, "--epochs", "0", "--clip", "-1") == 2
    assert capsys.readouterr().err == (
        "error: training options: epochs 0, expected more than 0; clip -1.0, expected more than 0\n"
    )
    assert train(data, "--heads", "3") == 2
    assert "d_model 32 is not divisible by heads 3" in capsys.readouterr().err
    (data / "out").mkdir()
    (data / "out" / "mine.txt").write_text("")
    assert train(data) == 1
    assert "not ours to replace" in capsys.readouterr().err
    assert not (data / "out.training").exists()

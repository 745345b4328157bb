"""`seq2engine attention` as a user types it: what it prints, what it leaves behind, and how it refuses."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil

import pytest
from support.mutations import bundle_of_other_weights

from seq2engine.cli.main import main
from seq2engine.common.reports import latest_report
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model, save_checkpoint
from seq2engine.model.presets import PRESETS
from seq2engine.model.tokenizers.symbols import SymbolTokenizer, table_from_texts

SMALL = dataclasses.replace(
    PRESETS["tiny"], d_model=32, d_ff=48, source_vocab=40, target_vocab=40, max_source=20, max_target=24
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return onnx_from_model(random_model(SMALL, 1), tmp_path_factory.mktemp("cli") / "bundle", ("fp32", "fp16")).root


@pytest.fixture(scope="module")
def text_bundle(tmp_path_factory):
    root = tmp_path_factory.mktemp("cli-text")
    table = table_from_texts(["grün <b> &"], "characters")
    model = random_model(dataclasses.replace(SMALL, source_vocab=len(table.symbols), target_vocab=len(table.symbols)))
    checkpoint = save_checkpoint(model, root / "checkpoint")
    (checkpoint / "tokenizer").mkdir()
    SymbolTokenizer(table, table).write(checkpoint / "tokenizer")
    return onnx_from_model(model, root / "bundle", ("fp32",), companions=checkpoint).root


@pytest.fixture
def cli(capsys):
    def run(*argv):
        code = main(["attention", *(str(arg) for arg in argv), "--threads", "1"])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def assert_refused(result, *parts, exits=1):
    """An exit code and one line of error."""
    code, out, err = result
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (code, out) == (exits, "")
    assert len(lines) == 1, err
    assert err.rstrip().endswith(lines[0])
    for part in parts:
        assert part in lines[0]


def test_ids_in_a_page_out(cli, bundle):
    code, out, err = cli(bundle, "5 6 7", "--max-length", "5")
    report = latest_report(bundle, "attention", ".html")
    assert code == 0
    assert out.startswith("attention passed: ")
    assert "\n5 6 7 -> " in out
    assert out.endswith(f"report: {report}\n")
    assert "attention: weights: done" in err
    page = report.read_text(encoding="utf-8")
    assert "<!doctype html>" in page
    about = dict(re.findall(r"<dt>(\w+)</dt><dd>([^<]*)</dd>", page))
    assert about["model"].startswith("bundle, 2+2 layers, d_model 32")
    assert about["command"].startswith("seq2engine attention ")
    assert {"checkpoint", "date", "versions", "machine"} <= set(about)
    assert json.loads(report.with_suffix(".json").read_text())["source"] == ["5", "6", "7"]


def test_json_and_a_file_of_ones_own(cli, bundle, tmp_path):
    out = tmp_path / "new" / "view.html"
    argv = (bundle, "5 6 7", "--out", out, "--json", "--quiet", "--beam", "3", "--precision", "fp16")
    code, text, err = cli(*argv, "--max-length", "4")
    values = json.loads(text)
    assert (code, err) == (0, "")
    assert (values["beam"], values["precision"], values["source"]) == (3, "fp16", ["5", "6", "7"])
    assert len(values["target"]) <= 4
    assert sorted(path.name for path in out.parent.iterdir()) == ["view.html", "view.json"]
    assert json.loads(out.with_suffix(".json").read_text()) == values


def test_text_in_a_page_out(cli, text_bundle):
    code, out, err = cli(text_bundle, "<b> grünx", "--quiet", "--max-length", "6")
    assert (code, err) == (0, "the text has 1 character the model has no token for: 'x'\n")
    assert "\n<b> grünx -> " in out
    page = latest_report(text_bundle, "attention", ".html").read_text(encoding="utf-8")
    assert "<h1>&lt;b&gt; grünx → " in page
    assert 'attends to "ü": 0.' in page
    assert 'attends to "&lt;unk&gt;": 0.' in page
    code, out, _ = cli(text_bundle, "5 6 7", "--ids", "--json", "--quiet")
    assert json.loads(out)["source_ids"] == [5, 6, 7]


def test_other_weights_than_the_reference_exit_with_1(cli, tmp_path):
    bundle = bundle_of_other_weights(SMALL, tmp_path)
    code, out, _ = cli(bundle, "5 6 7 8", "--quiet")
    assert code == 1
    assert out.startswith("attention FAILED: layer 1: error ")
    assert "badge bad" in latest_report(bundle, "attention", ".html").read_text()


def test_refusals(cli, bundle, text_bundle, tmp_path):
    assert_refused(cli(tmp_path / "nowhere", "5"), "no bundle at", "seq2engine export")
    assert_refused(cli(text_bundle, "", "--quiet"), "the text is empty")
    assert_refused(cli(text_bundle, "g" * 20, "--quiet"), "21 tokens, at most 20")
    assert_refused(cli(text_bundle, "grün", "--ids"), "'grün' is not a token id")
    assert_refused(cli(bundle, "", "--quiet"), "the text is empty")
    assert_refused(cli(bundle, "5 x", "--quiet"), "'x' is not a token id, expected a line such as: 17 4 250")
    assert_refused(cli(bundle, "99", "--quiet"), "token 99")
    assert_refused(cli(bundle, "5", "--beam", "0", "--quiet"), "beam 0", exits=2)
    assert_refused(cli(bundle, "5", "--max-length", "25", "--quiet"), "max length 25, at most 24")
    assert_refused(cli(bundle, "5", "--precision", "fp8", "--quiet"), "holds no fp8 graphs")
    assert_refused(cli(text_bundle, "grünж", "--strict", "--quiet"), "1 character the model has no token for: 'ж'")
    (tmp_path / "file").touch()
    assert_refused(
        cli(bundle, "5", "--max-length", "2", "--out", tmp_path / "file" / "a.html", "--quiet"), "cannot write"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_damaged_graph_is_refused(cli, bundle, tmp_path):
    own = shutil.copytree(bundle, tmp_path / "own")
    data = own / "onnx" / "fp32" / "decoder_step.onnx.data"
    data.write_bytes(data.read_bytes()[:-8])
    assert_refused(cli(own, "5", "--quiet"), "its hash differs", "--force")

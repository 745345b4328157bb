"""Quality beside parity and speed: `--references` on a bundle that takes text."""

from __future__ import annotations

import json

import pytest
from support.text_bundle import text_bundle

from seq2engine.common.reports import latest_report
from seq2engine.runtime.translator import load

WORDS = ["abc", "hij", "a", "fed cab", "ee", "gigi", "é", "ja", "bad", "had", "dig", "fig", "jab", "big", "aha", "hid"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return text_bundle(tmp_path_factory.mktemp("references"))


@pytest.fixture(scope="module")
def references(bundle, tmp_path_factory):
    """What PyTorch decodes greedily is right, but for every fourth word, of which one token is added."""
    path = tmp_path_factory.mktemp("files") / "test.tsv"
    with load(bundle, "torch") as model:
        outputs = model.translate(WORDS)
    rows = [
        f"{word}\t{text}{' x' if i % 4 == 0 else ''}\n"
        for i, (word, text) in enumerate(zip(WORDS, outputs, strict=True))
    ]
    path.write_text("".join(rows), encoding="utf-8")
    return path


def test_parity_counts_both_sides(bundle, references, cli):
    code, out, _ = cli("parity", bundle.root, "--references", references, "--beam", 2, "--json", "--quiet")
    assert code == 0
    quality = json.loads(out)["quality"]
    assert list(quality) == ["PyTorch fp32", "onnxruntime fp32"]
    for found in quality.values():
        assert [part["search"] for part in found] == ["greedy", "beam 2"]
        assert found[0]["sources"] == len(WORDS)
        assert found[0]["marked"]["lines"] == 0.25
        assert found[0]["marked"]["tokens"] > 0
    page = latest_report(bundle.root, "parity", ".html").read_text()
    assert "<h2>7. Quality</h2>" in page
    assert "25.00%" in page


def test_bench_counts_every_arm(bundle, references, cli):
    code, out, _ = cli(
        "bench",
        bundle.root,
        "--references",
        references,
        "--count",
        8,
        "--case",
        "1x1x4x4",
        "--rounds",
        1,
        "--json",
        "--quick",
    )
    assert code == 0
    quality = json.loads(out)["quality"]
    assert list(quality) == ["torch fp32", "onnxruntime fp32"]
    assert all(found[0]["sources"] == 8 and len(found) == 1 for found in quality.values())
    assert quality["torch fp32"] == quality["onnxruntime fp32"]


def test_a_bundle_without_text_has_nothing_to_count(tmp_path, references, cli):
    cli("export", "random:tiny", tmp_path / "tiny", "--quiet")
    code, _, err = cli("parity", tmp_path / "tiny", "--references", references, "--quiet")
    assert (code, err.count("\n")) == (1, 1)
    assert "has no tokenizer" in err


def test_references_that_are_not_there(bundle, tmp_path, cli):
    code, _, err = cli("parity", bundle.root, "--references", tmp_path / "none.tsv", "--quiet")
    assert (code, err.count("\n")) == (1, 1)
    assert "none.tsv" in err

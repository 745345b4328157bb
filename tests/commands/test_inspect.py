"""`seq2engine inspect`: every missing or changed file of a bundle is reported; its page has what it prints."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from support.text_bundle import text_bundle

from seq2engine.cli.main import main
from seq2engine.common.reports import latest_report
from seq2engine.export.artifact.bundle import open_bundle
from seq2engine.export.artifact.files import listed_files

BUILD = ("--gpu", "sm89", "--precision", "fp32", "--batch", "1", "--source-length", "8", "--max-length", "8")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A bundle with a tokenizer, decoding defaults and, where TensorRT-RTX is installed, an engine."""
    root = text_bundle(tmp_path_factory.mktemp("inspect"), beam=2).root
    pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install 'seq2engine[rtx]'")
    assert main(["build", str(root), *BUILD, "--no-engine-cache", "--quiet"]) == 0
    return root


@pytest.fixture
def own(good, tmp_path):
    return shutil.copytree(good, tmp_path / "bundle")


def files_of(root):
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def test_everything_of_a_bundle_is_listed(good):
    listed = [file.path for file in listed_files(open_bundle(good))]
    passports = [name for name in files_of(good) if name.endswith("passport.json")]
    assert len(passports) == 1
    assert sorted([*listed, *passports, "manifest.json", "config.json"]) == files_of(good)


def test_a_whole_bundle_passes(cli, good):
    count = len(listed_files(open_bundle(good)))
    assert cli("inspect", good, "--check") == (
        0,
        f"{good}: all {count} files are what the manifest and the passports list\n",
        "",
    )
    code, out, _ = cli("inspect", good, "--check", "--json")
    assert code == 0
    assert json.loads(out) == {"bundle": str(good), "verdict": True, "files": count, "problems": []}
    assert "damaged" not in cli("inspect", good)[1]


@pytest.mark.parametrize("damage", ["missing", "changed", "empty"])
def test_every_file_that_is_not_what_was_written_is_named(cli, own, damage):
    for name in files_of(own):
        if name == "manifest.json":  # that is refused when the bundle is opened
            continue
        path = own / name
        content = path.read_bytes()
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes(b"" if damage == "empty" else content[:-1] + bytes([content[-1] ^ 1]))
        code, out, err = cli("inspect", own, "--check")
        assert (code, err) == (1, ""), name
        assert re.search(rf"^{re.escape(name)}  +(is |has |cannot be used)", out, re.MULTILINE), (name, out)
        assert "seq2engine build" in out if name.startswith("engines/") else "seq2engine export" in out
        path.write_bytes(content)
    assert cli("inspect", own, "--check")[0] == 0


def test_all_that_is_wrong_is_listed_at_once(cli, own):
    (own / "onnx/fp32/encoder.onnx").unlink()
    (own / "model.safetensors").unlink()
    (own / "tokenizer/about.json").write_text("{}")
    code, out, _ = cli("inspect", own, "--check", "--json")
    assert code == 1
    assert {problem["path"] for problem in json.loads(out)["problems"]} == {
        "onnx/fp32/encoder.onnx",
        "model.safetensors",
        "tokenizer/about.json",
    }


@pytest.mark.parametrize("name", ["onnx/fp32/decoder_step.onnx", "onnx/fp32/encoder.onnx.data", "model.safetensors"])
def test_missing_files_are_found_without_hashing(cli, own, name):
    (own / name).unlink()
    code, out, _ = cli("inspect", own)
    assert code == 0
    assert f"damaged: {name} is missing; export the checkpoint again with: seq2engine export" in out
    rows = [line for line in out.splitlines() if " missing " in line and not line.startswith("damaged")]
    assert len(rows) == name.startswith("onnx/")
    assert json.loads(cli("inspect", own, "--json")[1])["damage"] == [f"{name} is missing"]


def test_the_page_tells_what_is_printed(cli, own):
    (own / "onnx/fp32/encoder.onnx").unlink()
    code, out, _ = cli("inspect", own, "--html")
    report = latest_report(own, "inspect", ".html")
    assert code == 0
    assert out.endswith(f"report: {report}\n")
    page = report.read_text(encoding="utf-8")
    about = dict(re.findall(r"<dt>([\w ]+)</dt><dd>([^<]*)</dd>", page))
    assert about["model"].startswith("bundle, 2+2 layers")
    assert {"date", "versions", "checkpoint", "command", "exported with"} <= set(about)
    assert "1 of its files are missing or changed" in page
    engine = next(path.name for path in (own / "engines").iterdir())
    for words in (
        "<h2>Graphs</h2>",
        "<h2>Files</h2>",
        f"Engines {engine}",
        "launches",
        "budget",
        "step output",
        "next_greedy",
        "model.safetensors",
    ):
        assert words in page
    values = json.loads(report.with_suffix(".json").read_text())
    assert values["damage"] == ["onnx/fp32/encoder.onnx is missing"]
    assert report.name in (own / "reports" / "index.html").read_text()


def test_a_page_of_a_check_in_a_place_of_ones_own(cli, own, tmp_path):
    out = tmp_path / "new" / "mine.html"
    assert cli("inspect", own, "--check", "--out", out)[0] == 0
    assert "Every file has the hash" in out.read_text()
    assert json.loads(out.with_suffix(".json").read_text())["check"]["verdict"] is True
    assert not (own / "reports").exists()
    (tmp_path / "file").touch()
    code, text, err = cli("inspect", own, "--out", tmp_path / "file" / "a.html")
    assert (code, text) == (1, "")
    assert err.startswith("error: cannot write in ")

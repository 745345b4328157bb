"""A bundle goes to a hub on loopback and comes back: one commit, a card that claims what the reports prove, no more."""

from __future__ import annotations

import json
import re

import pytest
from huggingface_hub import constants
from support.hub_server import TOKEN, hub_of_this_process
from support.text_bundle import text_bundle

import seq2engine
from seq2engine.common.reports import report_files
from seq2engine.errors import UsageError
from seq2engine.export.artifact.bundle import open_bundle
from seq2engine.packaging.model_card import evidence_of, model_card
from seq2engine.packaging.push import PushOptions, push_bundle

# The client's own upload without xet calls its HTTP library in an old way.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")


@pytest.fixture
def hub(tmp_path):
    with hub_of_this_process(tmp_path / "caches", TOKEN) as opened:
        yield opened


@pytest.fixture
def bundle(tmp_path):
    return text_bundle(tmp_path / "made", beam=2)


def refused(cli, *words):
    code, out, err = cli(*words, "--quiet")
    assert (code, out) == (1, "")
    assert re.fullmatch(r"error: [^\n]+\n", err)
    return err


def parity_report(bundle, verdict=True, checkpoint=None, **more):
    """A report as `parity` writes it, as far as the card reads it."""
    about = [["checkpoint", (checkpoint or bundle.manifest.checkpoint_sha256)[:12]]]
    values = {"backend": "onnxruntime", "precision": "fp32", "verdict": verdict, "reason": "8 of 8 | equal", **more}
    files = report_files(bundle.root, "parity", "onnxruntime fp32")
    files.write("<html></html>", json.dumps({**values, "about": about}))
    return files


def test_a_bundle_goes_up_and_comes_back(hub, bundle, cli, tmp_path):
    code, out, _ = cli("push", bundle.root, "hf:me/letters", "--private", "--json", "--quiet")
    assert code == 0
    result = json.loads(out)
    repository = hub.repositories["me/letters"]
    assert repository.private
    assert result["commit"] == repository.refs["main"]
    assert len(repository.commits) == 2  # the one that made it, and ours
    files = repository.commits[result["commit"]]
    assert set(files) == {*result["files"], "README.md", ".gitattributes"}
    assert files["README.md"].decode() == result["card"]

    words = ("abc", "cab é", "", "j", "--beam", "3", "--nbest", "2")
    expected = cli("run", bundle.root, *words)
    hub.requests.clear()
    assert cli("run", "hf:me/letters", *words, "--quiet") == expected
    assert cli("run", f"hf:me/letters@{result['commit']}", *words, "--quiet") == expected
    assert "README.md" not in hub.downloads()
    with seq2engine.load("hf:me/letters") as model, seq2engine.load(bundle) as local:
        assert model.translate(["abc", "de"]) == local.translate(["abc", "de"])
    assert json.loads(cli("inspect", "hf:me/letters", "--json", "--quiet")[1])["damage"] == []


def test_a_bundle_of_the_hub_offline(hub, bundle, cli, monkeypatch):
    seq2engine.push_bundle(bundle, "hf:me/letters")
    expected = cli("run", "hf:me/letters", "abc", "--quiet")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    before = len(hub.requests)
    assert cli("run", "hf:me/letters", "abc", "--quiet") == expected
    assert len(hub.requests) == before
    assert "hf:me/other is not in the cache, and HF_HUB_OFFLINE is set" in refused(cli, "run", "hf:me/other", "abc")


def test_a_second_push_removes_what_is_gone(hub, bundle, cli, tmp_path):
    seq2engine.export_checkpoint(tmp_path / "made" / "bundle", tmp_path / "two", ["fp32", "fp16"])
    seq2engine.push_bundle(tmp_path / "two", "hf:me/letters")
    repository = hub.repositories["me/letters"]
    assert any(name.startswith("onnx/fp16/") for name in repository.commits[repository.refs["main"]])
    seq2engine.push_bundle(bundle, "hf:me/letters")
    assert not any(name.startswith("onnx/fp16/") for name in repository.commits[repository.refs["main"]])


def test_a_branch_of_its_own(hub, bundle, cli):
    seq2engine.push_bundle(bundle, "hf:me/letters")
    before = hub.repositories["me/letters"].refs["main"]
    parity_report(bundle)
    assert cli("push", bundle.root, "hf:me/letters", "--revision", "w8a8", "--quiet")[0] == 0
    refs = hub.repositories["me/letters"].refs
    assert refs["main"] == before != refs["w8a8"]
    assert cli("run", "hf:me/letters@w8a8", "abc", "--quiet") == cli("run", bundle.root, "abc")


def test_a_dry_run_writes_the_card_only(hub, bundle, cli):
    code, out, _ = cli("push", bundle.root, "hf:me/letters", "--dry-run", "--quiet")
    assert code == 0
    assert out.startswith(f"{bundle.root / 'README.md'}: the card; ")
    assert (bundle.root / "README.md").read_text().startswith("---\nlibrary_name: seq2engine\n")
    assert hub.requests == []


@pytest.mark.parametrize("name", ["letters", "hf:letters", "hf:me/letters@main", "hf:a/b/c"])
def test_a_name_that_cannot_be_written_to(hub, bundle, cli, name):
    assert "is not hf:" in refused(cli, "push", bundle.root, name)


@pytest.mark.parametrize("branch", ["a b", "", "a\udcffb", "-x"])
def test_a_branch_that_cannot_be_one(hub, bundle, cli, branch):
    with pytest.raises(UsageError, match=r"--revision '.*', expected the name of a branch"):
        push_bundle(bundle, "hf:me/letters", PushOptions(revision=branch))
    assert hub.requests == []


def test_without_a_token(hub, bundle, cli, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    assert "HF_TOKEN" in refused(cli, "push", bundle.root, "hf:me/letters")
    assert hub.repositories == {}


def test_a_hub_that_takes_no_more(hub, bundle, cli, monkeypatch):
    """The upload fails, and no commit is made."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.full = True
    assert "refused hf:me/letters with status 507" in refused(cli, "push", bundle.root, "hf:me/letters")
    assert len(hub.repositories["me/letters"].commits) == 1


def test_a_damaged_bundle_is_not_uploaded(hub, bundle, cli):
    (bundle.root / "onnx" / "fp32" / "encoder.onnx").write_bytes(b"no")
    assert "is not the file that was written" in refused(cli, "push", bundle.root, "hf:me/letters")
    assert hub.requests == []


def test_export_does_not_write_to_the_hub(cli, capsys):
    with pytest.raises(SystemExit) as ended:
        cli("export", "random:tiny", "hf:me/letters")
    assert ended.value.code == 2
    assert "expected a folder to write; then: seq2engine push FOLDER hf:me/letters" in capsys.readouterr().err


def test_the_card_has_the_verdicts_of_the_reports(bundle):
    card = model_card(bundle, "me/letters", evidence_of(bundle))
    assert "No parity report of these weights is in the bundle: nothing is claimed." in card
    assert "No benchmark of these weights is in the bundle." in card
    assert "Licence of the source model: unknown." in card
    assert "license:" not in card
    assert "| encoder and decoder_step | fp32 | " in card
    assert "seq2engine run hf:me/letters" in card

    parity_report(bundle, verdict=False, reason="an old one")
    parity_report(bundle)
    parity_report(bundle, checkpoint="of other weights", precision="fp16")
    parity_report(bundle, against="onnxruntime fp32", precision="w8a8")
    (bundle.root / "reports" / "parity-broken.json").write_text("{")
    evidence = evidence_of(bundle)
    card = model_card(bundle, "me/letters", evidence)
    assert "| onnxruntime fp32 | passed | 8 of 8 \\| equal |" in card
    assert "fp16" not in card
    assert "w8a8" not in card
    assert len(evidence.files) == 2


def test_the_card_has_the_benchmark(bundle, cli):
    argv = ("bench", bundle.root, "--backend", "onnxruntime", "--case", "1x1x4x3", "--rounds", "1", "--threads", "1")
    assert cli(*argv, "--quick", "--quiet")[0] == 0
    card = model_card(bundle, "me/letters", evidence_of(bundle))
    assert re.search(r"\| batch 1, beam 1, source 4, output 3 \| onnxruntime fp32 \| [\d.]+ \| [\d,]+ \|", card)


def test_the_card_names_the_source(bundle, tmp_path):
    values = json.loads((bundle.root / "manifest.json").read_text())
    origin = {"name": "hf:org/opus", "revision": "v1", "commit": "c" * 40, "license": "mit"}
    (bundle.root / "manifest.json").write_text(json.dumps({**values, "origin": origin}))
    card = model_card(open_bundle(bundle.root), "me/letters", evidence_of(bundle))
    assert "license: mit\nbase_model: org/opus\n" in card
    assert f"Made of `hf:org/opus`, revision v1, commit `{'c' * 40}`." in card
    assert "Licence of the source model: mit." in card

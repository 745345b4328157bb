"""Models by name: the real client of the hub against a hub on loopback, whole, broken, private and offline."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file
from support.hub_server import TOKEN, hub_of_this_process, hub_server
from support.hugging_face_models import saved, small_model, small_t5

import seq2engine
from seq2engine.common import hub as hub_module
from seq2engine.common.hub import hub_name
from seq2engine.common.progress import ProgressPrinter, silent
from seq2engine.errors import RequestError
from seq2engine.model.checkpoint import read_origin
from seq2engine.model.hub_files import checkpoint_files, licence_of

CARD = "---\nlanguage: de\nlicense: cc-by-4.0\n---\n# A model\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Marian as the hub has it, with weights for other libraries beside it."""
    root = saved(small_model("marian"), tmp_path_factory.mktemp("models") / "opus", num_beams=2)
    (root / "README.md").write_text(CARD)
    (root / "tf_model.h5").write_bytes(b"x" * 5000)
    (root / "pytorch_model.bin").write_bytes(b"never read" * 1000)
    (root / "onnx").mkdir()
    (root / "onnx" / "model.onnx").write_bytes(b"y" * 5000)
    return root


@pytest.fixture
def hub(tmp_path):
    with hub_of_this_process(tmp_path / "caches") as opened:
        yield opened


@pytest.fixture
def offline(monkeypatch):
    """HF_HUB_OFFLINE, which the client reads when it is imported."""

    def go():
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    return go


def refused(cli, *words):
    """The one line that a command prints, which leaves nothing behind."""
    code, out, err = cli(*words, "--quiet")
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


def manifest(bundle):
    return json.loads((bundle / "manifest.json").read_text())


def test_export_by_name_is_export_of_the_folder(hub, folder, tmp_path, cli):
    repository = hub.add("Helsinki-NLP/opus", folder)
    assert cli("export", folder, tmp_path / "one", "--precision", "fp32", "--quiet")[0] == 0
    code, _, err = cli("export", "hf:Helsinki-NLP/opus", tmp_path / "two", "--precision", "fp32")
    assert code == 0
    assert "download: hf:Helsinki-NLP/opus: done" in err  # our own progress, as this is no terminal
    assert "%|" not in err
    one, two = manifest(tmp_path / "one"), manifest(tmp_path / "two")
    commit = repository.refs["main"]
    origin = {"name": "hf:Helsinki-NLP/opus", "revision": "main", "commit": commit, "license": "cc-by-4.0"}
    assert two.pop("origin") == origin
    assert one.pop("origin") == {}
    assert one == two
    # what is read and nothing else, the weights last
    assert sorted(hub.downloads()) == ["README.md", "config.json", "generation_config.json", "model.safetensors"]
    assert hub.downloads()[-1] == "model.safetensors"


def test_import_by_name_keeps_where_it_comes_from(hub, folder, tmp_path, cli):
    hub.add("org/opus", folder)
    assert cli("import", "hf:org/opus@main", tmp_path / "ours", "--quiet")[0] == 0
    assert seq2engine.import_checkpoint("hf:org/opus", tmp_path / "again").parameters > 0
    assert cli("export", tmp_path / "ours", tmp_path / "bundle", "--precision", "fp32", "--quiet")[0] == 0
    assert manifest(tmp_path / "bundle")["origin"]["name"] == "hf:org/opus"
    (tmp_path / "ours" / "origin.json").write_text("[]")
    assert "origin.json cannot be read" in refused(cli, "export", tmp_path / "ours", tmp_path / "other")


def test_a_checkpoint_of_ours_on_the_hub(hub, folder, tmp_path, cli):
    seq2engine.import_checkpoint(folder, tmp_path / "ours")
    hub.add("me/ours", tmp_path / "ours")
    bundle = seq2engine.export_checkpoint("hf:me/ours", tmp_path / "bundle", ["fp32"])
    assert bundle.manifest.origin["name"] == "hf:me/ours"
    assert bundle.generation()["beam"] == 2
    assert "is a seq2engine checkpoint already" in refused(cli, "import", "hf:me/ours", tmp_path / "twice")


def test_a_revision_is_pinned(hub, folder, tmp_path):
    """A tag and a commit stay what they are while main moves on."""
    repository = hub.add("org/opus", folder)
    first = repository.refs["v1"] = repository.refs["main"]
    files = dict(repository.commits[first])
    settings = json.loads(files["generation_config.json"])
    files["generation_config.json"] = json.dumps({**settings, "num_beams": 5}).encode()
    second = repository.commit(files)
    for name, commit, beam in (("", second, 5), ("@v1", first, 2), (f"@{first}", first, 2), ("@main", second, 5)):
        made = seq2engine.import_checkpoint(f"hf:org/opus{name}", tmp_path / f"ours{name}")
        assert read_origin(made.checkpoint)["commit"] == commit
        assert made.generation["beam"] == beam


def test_offline_takes_the_cached_copy(hub, folder, tmp_path, cli, offline):
    hub.add("org/opus", folder)
    assert cli("export", "hf:org/opus", tmp_path / "one", "--precision", "fp32", "--quiet")[0] == 0
    before = len(hub.requests)
    offline()
    code, _, err = cli("export", "hf:org/opus", tmp_path / "two", "--precision", "fp32")
    assert code == 0
    assert "note: the cached copy of hf:org/opus is used (commit " in err
    assert "because HF_HUB_OFFLINE is set" in err
    assert manifest(tmp_path / "one") == manifest(tmp_path / "two")
    assert len(hub.requests) == before
    err = refused(cli, "export", "hf:org/other", tmp_path / "three")
    assert "hf:org/other is not in the cache, and HF_HUB_OFFLINE is set; unset it to download" in err
    assert not (tmp_path / "three").exists()


def test_offline_with_half_a_copy(hub, folder, tmp_path, cli, offline):
    """A download that was broken off before the weights; and one of which a shard is gone."""
    repository = hub.add("org/opus", folder)
    repository.lost.add("model.safetensors")
    refused(cli, "export", "hf:org/opus", tmp_path / "one")
    offline()
    assert "hf:org/opus has no weights that are read" in refused(cli, "export", "hf:org/opus", tmp_path / "one")


def test_without_a_network(hub, folder, tmp_path, cli, monkeypatch):
    hub.add("org/opus", folder)
    assert cli("import", "hf:org/opus", tmp_path / "one", "--quiet")[0] == 0
    with hub_server() as gone:
        pass  # nobody listens there any more
    monkeypatch.setattr(constants, "ENDPOINT", gone.url)
    err = refused(cli, "export", "hf:org/other", tmp_path / "two")
    assert f"hf:org/other is not in the cache, and {gone.url} cannot be reached (" in err
    assert "; check the network, or HF_ENDPOINT" in err
    code, _, err = cli("import", "hf:org/opus", tmp_path / "two")  # the cached copy is as good
    assert code == 0
    assert "note: the cached copy of hf:org/opus is used" in err


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"private": True}, "or it is private; check the name, or set HF_TOKEN"),
        ({"gated": True}, "hf:org/opus is gated; accept its terms at http://127.0.0.1"),
        ({"lost": {"model.safetensors"}}, "hf:org/opus lists model.safetensors, which http://127.0.0.1"),
        ({"changed": {"model.safetensors"}}, "model.safetensors of hf:org/opus does not have its hash"),
        ({"changed": {"config.json"}}, "config.json of hf:org/opus does not have its hash"),
        ({"cut": {"model.safetensors"}}, "hf:org/opus was not transferred: "),
    ],
    ids=["private", "gated", "lost", "other bytes", "other small bytes", "cut off"],
)
def test_what_can_go_wrong_is_one_line(hub, folder, tmp_path, cli, state, words, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the client's attempts
    repository = hub.add("org/opus", folder, **state)
    assert words in refused(cli, "import", "hf:org/opus", tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
    for fault in (repository.lost, repository.changed, repository.cut):
        fault.clear()
    repository.private = repository.gated = False
    assert cli("import", "hf:org/opus", tmp_path / "bundle", "--quiet")[0] == 0  # nothing broken was kept


def test_a_token_of_the_environment_opens_private_models(hub, folder, tmp_path, cli, monkeypatch):
    hub.add("org/opus", folder, private=True, gated=True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert cli("import", "hf:org/opus", tmp_path / "bundle", "--quiet")[0] == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hf:", "is not hf:NAME"),
        ("hf:a/b/c", "is not hf:NAME"),
        ("hf:a/b@", "is not hf:NAME"),
        ("hf:../b", "is not hf:NAME"),
        ("hf:a b", "is not hf:NAME"),
        ("hf:org/none", "no model org/none at http"),
        ("hf:org/opus@v9", "org/opus has no revision v9; name a branch"),
        ("hf:org/empty", "hf:org/empty has no config.json"),
        ("hf:org/bare", "hf:org/bare has no weights that are read; expected one of model.safetensors"),
        ("hf:org/bundle", "hf:org/bundle is a bundle, expected a checkpoint"),
    ],
)
def test_names_that_are_none(hub, folder, tmp_path, cli, name, words):
    hub.add("org/opus", folder)
    for other, files in (
        ("empty", ("a.txt",)),
        ("bare", ("config.json",)),
        ("bundle", ("config.json", "manifest.json")),
    ):
        (tmp_path / other).mkdir()
        for file in files:
            (tmp_path / other / file).write_text("{}")
        hub.add(f"org/{other}", tmp_path / other)
    assert words in refused(cli, "export", name, tmp_path / "out")


def test_a_server_that_is_no_hub(hub, tmp_path, cli, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", f"{hub.url}/api/validate-yaml?")
    assert "does not answer as a hub does" in refused(cli, "export", "hf:org/opus", tmp_path / "out")


def test_shards_of_both_kinds(hub, folder, tmp_path, cli):
    """Weights in several files with an index, as safetensors and as pickles."""
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    half = len(names) // 2
    from safetensors.torch import save_file

    assert cli("export", folder, tmp_path / "whole", "--precision", "fp32", "--quiet")[0] == 0
    for kind, suffix, save in (("model", "safetensors", save_file), ("pytorch_model", "bin", torch.save)):
        split = tmp_path / kind
        split.mkdir()
        shutil.copyfile(folder / "config.json", split / "config.json")
        shutil.copyfile(folder / "generation_config.json", split / "generation_config.json")
        places = {name: f"{kind}-0000{1 + (i >= half)}-of-00002.{suffix}" for i, name in enumerate(names)}
        for file in sorted(set(places.values())):
            save({name: weights[name] for name in names if places[name] == file}, split / file)
        (split / f"{kind}.{suffix}.index.json").write_text(json.dumps({"weight_map": places}))
        repository = hub.add(f"org/{kind}", split)
        assert cli("export", f"hf:org/{kind}", tmp_path / f"out-{kind}", "--precision", "fp32", "--quiet")[0] == 0
        made = [manifest(tmp_path / name)["checkpoint_sha256"] for name in ("whole", f"out-{kind}")]
        assert made[0] == made[1]
        assert set(places.values()) <= set(hub.downloads())
        wrong = {**repository.commits[repository.refs["main"]]}
        wrong[f"{kind}.{suffix}.index.json"] = b'{"weight_map": {"a": "../b"}}'
        repository.commit(wrong)
        assert "names '../b', expected a file beside it" in refused(cli, "export", f"hf:org/{kind}", tmp_path / "no")


def test_t5_by_name(hub, tmp_path):
    root = saved(small_t5("t5"), tmp_path / "t5")
    hub.add("t5-tiny", root)  # a name without an owner, as the first models have
    bundle = seq2engine.export_checkpoint("hf:t5-tiny", tmp_path / "bundle", ["fp32"])
    assert (
        bundle.manifest.checkpoint_sha256
        == seq2engine.export_checkpoint(root, tmp_path / "two", ["fp32"]).manifest.checkpoint_sha256
    )


def test_files_are_chosen():
    names = ["a.txt", "config.json", "pytorch_model.bin", "model.safetensors", "vocab.json", "tokenizer/about.json"]
    assert checkpoint_files(names, "x") == ["config.json", "vocab.json", "tokenizer/about.json", "model.safetensors"]
    names.remove("model.safetensors")
    assert checkpoint_files(names, "x")[-1] == "pytorch_model.bin"


def test_names_are_parsed():
    assert (hub_name("hf:t5-small").repo, hub_name("hf:a/b@refs/pr/1").revision) == ("t5-small", "refs/pr/1")
    assert str(hub_name("hf:a/b@v1")) == "hf:a/b@v1"
    with pytest.raises(RequestError):
        hub_name("hf:a--b/c@")


@pytest.mark.parametrize(
    ("card", "licence"),
    [(CARD, "cc-by-4.0"), ("# no head\nlicense: mit\n", ""), ("---\nlicense: 'mit'\n---\n", "mit"), ("", "")],
)
def test_the_licence_of_a_card(card, licence, tmp_path):
    (tmp_path / "README.md").write_text(card)
    assert licence_of(tmp_path / "README.md") == licence


def test_a_mirror_with_plain_hashes(tmp_path):
    """Some mirrors name small files by a plain SHA-1, or by what is no hash at all."""
    import hashlib

    content = b"{}"
    for etag in (hashlib.sha1(content).hexdigest(), "not-a-hash"):
        blob = tmp_path / etag
        blob.write_bytes(content)
        (tmp_path / f"link-{etag}").symlink_to(blob)
        hub_module.check_hash(hub_name("hf:a/b"), tmp_path / f"link-{etag}")


def test_a_terminal_has_the_clients_own_bars(monkeypatch):
    """And none of ours between them; where progress is off, or no terminal, the client shows nothing."""
    from huggingface_hub.utils import are_progress_bars_disabled

    ours = ProgressPrinter(io.StringIO())
    with hub_module.hub_progress(ours) as shown:
        assert shown is ours
        assert are_progress_bars_disabled()
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with hub_module.hub_progress(ours) as shown:
        assert shown is silent
        assert not are_progress_bars_disabled()
    with hub_module.hub_progress(silent):
        assert are_progress_bars_disabled()
    assert not are_progress_bars_disabled()


@pytest.mark.slow
def test_the_environment_is_the_clients_own(folder, tmp_path):
    """HF_ENDPOINT, HF_TOKEN, HF_HUB_CACHE and HF_HUB_OFFLINE of a process of its own."""
    with hub_server() as hub:
        hub.add("org/opus", folder, private=True)
        own = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_CACHE": str(tmp_path / "cache")}
        argv = [sys.executable, "-m", "seq2engine", "import", "hf:org/opus"]
        for number, more in enumerate(({}, {"HF_HUB_OFFLINE": "1", "HF_TOKEN": ""})):
            out = tmp_path / f"ours{number}"
            env = {**os.environ, **own, **more}
            done = subprocess.run([*argv, str(out)], env=env, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            assert read_origin(out)["commit"] == hub.repositories["org/opus"].refs["main"]

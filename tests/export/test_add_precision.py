"""What an export into a bundle that is there leaves alone: engines, reports, other people's files; and --add."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from seq2engine.common.atomic_folders import sha256_of
from seq2engine.errors import BundleError
from seq2engine.export import to_onnx
from seq2engine.export.artifact.bundle import MANIFEST, open_bundle
from seq2engine.export.to_onnx import add_precisions, onnx_from_model
from seq2engine.model.checkpoint import random_model, save_checkpoint
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.ort.calibration import calibration_of


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return onnx_from_model(random_model("tiny", seed=1), tmp_path_factory.mktemp("add") / "bundle", ("fp32",)).root


@pytest.fixture
def bundle(made, tmp_path):
    """With an engine, a report and files that we did not write."""
    root = shutil.copytree(made, tmp_path / "bundle")
    (root / "engines" / "mine").mkdir(parents=True)
    (root / "engines" / "mine" / "encoder.engine").write_bytes(b"engine")
    (root / "reports").mkdir()
    (root / "reports" / "parity.html").write_text("passed")
    (root / "notes.txt").write_text("years of work")
    (root / "notes.txt").chmod(0o600)
    (root / "onnx" / "fp32" / "mine.txt").write_text("mine")
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "empty").mkdir()
    (root / "latest").symlink_to("reports/parity.html")
    return root


THEIRS = ("engines/mine/encoder.engine", "reports/parity.html", "notes.txt", "onnx/fp32/mine.txt", "run.sh", "latest")


def state_of(root):
    return {
        path.relative_to(root).as_posix(): (path.lstat().st_mode, sha256_of(path))
        for path in root.rglob("*")
        if path.is_file()
    }


def test_force_replaces_what_an_export_wrote_and_nothing_else(bundle):
    before = state_of(bundle)
    new = onnx_from_model(random_model("tiny", seed=2), bundle, ("fp16",), force=True)
    after = state_of(bundle)
    assert {name: after[name] for name in THEIRS} == {name: before[name] for name in THEIRS}
    assert (bundle / "latest").is_symlink()
    assert (bundle / "empty").is_dir()
    assert new.precisions == ("fp16",)
    assert not (bundle / "onnx" / "fp32" / "encoder.onnx").exists()
    assert after["model.safetensors"] != before["model.safetensors"]
    assert [path.name for path in bundle.parent.iterdir()] == ["bundle"]


def test_force_on_a_bundle_whose_manifest_is_damaged(bundle):
    (bundle / MANIFEST).write_text("{")
    onnx_from_model(random_model("tiny", seed=2), bundle, ("fp16",), force=True)
    assert not (bundle / "onnx" / "fp32").exists()  # no manifest tells whose that is
    assert (bundle / "notes.txt").read_text() == "years of work"
    assert (bundle / "engines" / "mine" / "encoder.engine").is_file()


@pytest.mark.parametrize("where", ["calibrate", "keep"])
def test_a_force_that_fails_leaves_the_old_state(bundle, monkeypatch, where):
    before = state_of(bundle)

    def fail(*_):
        raise BundleError("no")

    if where == "keep":
        monkeypatch.setattr(to_onnx, "keep_files", fail)
    with pytest.raises(BundleError):
        onnx_from_model(
            random_model("tiny", seed=2),
            bundle,
            ("fp16",),
            force=True,
            calibrate=fail if where == "calibrate" else None,
        )
    assert state_of(bundle) == before
    assert [path.name for path in bundle.parent.iterdir()] == ["bundle"]


@pytest.mark.slow
@pytest.mark.parametrize("at", ["keep_files", "write_graph"])
def test_a_force_that_is_killed_leaves_the_old_state(bundle, at):
    before = state_of(bundle)
    script = (
        "import os\n"
        "from seq2engine.export import to_onnx\n"
        "from seq2engine.model.checkpoint import random_model\n"
        f"to_onnx.{at} = lambda *_: os._exit(9)\n"
        f"to_onnx.onnx_from_model(random_model('tiny', seed=2), {str(bundle)!r}, ('fp16',), force=True)\n"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 9
    assert state_of(bundle) == before
    assert onnx_from_model(random_model("tiny", seed=2), bundle, ("fp16",), force=True)
    assert [path.name for path in bundle.parent.iterdir()] == ["bundle"]


def test_a_precision_is_added_and_nothing_else_touched(bundle):
    before = state_of(bundle)
    added = add_precisions(bundle, ("int8", "fp16", "fp32", "int8"))
    assert added.precisions == ("fp32", "int8", "fp16")
    after = state_of(bundle)
    assert {name: after[name] for name in before if name != MANIFEST} == {
        name: value for name, value in before.items() if name != MANIFEST
    }
    assert {name.split("/")[1] for name in set(after) - set(before)} == {"int8", "fp16"}
    assert add_precisions(added, ("int8",)) == added
    for precision in added.precisions:
        with open_session(added, precision=precision, threads=1) as session:
            assert session.precision == precision


@pytest.mark.slow
def test_what_is_added_is_what_an_export_would_have_written(made, bundle, tmp_path):
    model = random_model("tiny", seed=1)
    calibrate = calibration_of(None, "random sources", model.config, "static")
    whole = onnx_from_model(model, tmp_path / "whole", ("fp32", "fp16"), calibrate=calibrate)
    added = add_precisions(bundle, ("fp16",), calibrate=calibrate)
    assert added.manifest == whole.manifest
    again = onnx_from_model(model, shutil.copytree(made, tmp_path / "again"), ("fp32", "fp16"), calibrate=calibrate)
    assert again.manifest == whole.manifest


@pytest.mark.slow
def test_an_addition_that_is_killed_leaves_a_bundle_to_which_it_can_be_added(bundle):
    before = open_bundle(bundle).manifest
    script = (
        "import os\n"
        "from seq2engine.export import to_onnx\n"
        "to_onnx.write_text = lambda *_: os._exit(9)\n"
        f"to_onnx.add_precisions({str(bundle)!r}, ('fp16',))\n"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 9
    assert open_bundle(bundle).manifest == before
    assert add_precisions(bundle, ("fp16",)).precisions == ("fp32", "fp16")
    with open_session(bundle, precision="fp16", threads=1) as session:
        assert session.precision == "fp16"


def test_other_weights_are_not_added(bundle):
    with pytest.raises(BundleError, match="exists; name another folder, or add --force to replace it"):
        onnx_from_model(random_model("tiny", seed=2), bundle, ("fp32", "fp16"))
    with pytest.raises(BundleError, match="exists; name another folder, or add --force to replace it"):
        onnx_from_model(random_model("tiny", seed=1), bundle, ("fp32", "fp16"), "growing")


def test_precisions_that_are_there_are_not_written_again(bundle):
    with pytest.raises(BundleError, match="holds fp32 of this model already; add --force to write it anew"):
        onnx_from_model(random_model("tiny", seed=1), bundle, ("fp32",))


def test_precisions_are_added_from_the_command_line(cli, bundle, tmp_path):
    code, _, err = cli("run", bundle, "5 6", "--precision", "fp16")
    assert code == 1
    assert err.endswith(f"add them with: seq2engine export --add fp16 {bundle}\n")
    for words in (("--add", "fp16", bundle), (bundle, "--add", "w8a8,int8")):
        code, text, err = cli("export", *words, "--quiet")
        assert (code, err) == (0, "")
    assert "w8a8" in text
    assert open_bundle(bundle).precisions == ("fp32", "fp16", "w8a8", "int8")
    assert open_bundle(bundle).manifest.calibration["corpus"] == "random sources"
    assert cli("run", bundle, "5 6", "--precision", "fp16", "--max-length", "4", "--quiet")[0] == 0
    checkpoint = save_checkpoint(random_model("tiny", seed=1), tmp_path / "checkpoint")
    assert cli("export", checkpoint, bundle, "--precision", "bf16", "--quiet")[0] == 0
    assert open_bundle(bundle).precisions[-1] == "bf16"
    for name in ("notes.txt", "reports/parity.html"):
        assert (bundle / name).is_file()


@pytest.mark.parametrize("words", [("C",), ("--force",), ("--precision", "fp16")])
def test_wrong_usage_of_add(cli, words):
    code, out, err = cli("export", "--add", "int8", "B", *words)
    assert (code, out) == (2, "")
    assert err == "error: --add takes a bundle and nothing else to export: export --add int8 BUNDLE\n"


def test_an_export_needs_a_place(cli, capsys):
    with pytest.raises(SystemExit) as ended:
        cli("export", "B")
    assert ended.value.code == 2
    assert "the following arguments are required: bundle" in capsys.readouterr().err


def test_add_refuses_what_is_no_bundle_and_no_precision(cli, bundle, tmp_path):
    code, _, err = cli("export", "--add", "int8", tmp_path / "none")
    assert code == 1
    assert "no bundle at" in err
    code, _, err = cli("export", bundle, "--add", "int9")
    assert code == 2
    assert "unknown precision 'int9'" in err
    with (bundle / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    code, _, err = cli("export", bundle, "--add", "int8", "--quiet")
    assert code == 1
    assert "its hash differs" in err

"""A disk that fills up while a command writes: one line that names the place, and nothing half-written stays there.

A limit on the size of files stands in for the disk: the system refuses the same calls, with another error number.
"""

from __future__ import annotations

import errno
import resource
import subprocess
import sys

import pytest
from support.hugging_face_models import saved, small_model

from seq2engine.common.atomic_folders import new_file, new_folder
from seq2engine.errors import BundleError
from seq2engine.export.artifact.bundle import write_text
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model

WRITERS = {  # command -> what it writes to, and the most bytes a file may have
    "export random:tiny W/out": ("W/out", 20_000),
    "import W/foreign W/out": ("W/out", 20_000),
    "train W/pairs.tsv W/out --dev W/pairs.tsv --d-model 32 --epochs 1": ("W/out.training", 100),
    "package W/bundle W/out --precision fp32": ("W/out", 20_000),
    "build W/bundle --precision fp16 --gpu sm89 --no-engine-cache": ("W/bundle/engines", 20_000),
    "attention W/bundle 5 --max-length 3": ("W/bundle/reports", 100),
}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    root = tmp_path_factory.mktemp("full")
    (root / "pairs.tsv").write_text("5 6\t7\n")
    onnx_from_model(random_model("tiny", 1), root / "bundle", ("fp32", "fp16"))
    saved(small_model("marian"), root / "foreign")
    return root


def files_in(root):
    return sorted(path.relative_to(root) for path in root.rglob("*"))


@pytest.mark.slow
@pytest.mark.parametrize("line", WRITERS, ids=lambda line: line.split()[0])
def test_commands_that_write(work, line):
    place, most = WRITERS[line]
    if line.startswith("build"):
        pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install 'seq2engine[rtx]'")
    before = files_in(work)
    argv = [sys.executable, "-m", "seq2engine", *line.replace("W/", f"{work}/").split(), "--quiet"]
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))  # noqa: E731
    done = subprocess.run(argv, capture_output=True, text=True, preexec_fn=limit)
    assert done.returncode == 1, done.stderr
    *others, message = done.stderr.splitlines()
    assert message.startswith("error: ")
    assert place.replace("W/", f"{work}/") in message
    assert "File too large" in message
    assert not [line for line in others if "onnxruntime" not in line]  # which warns that it cannot write its own cache
    assert files_in(work) == before


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "Full"), OSError(errno.EIO, "Broken", "{beside}/a")], ids=str)
def test_an_error_of_writing_names_what_was_to_be_written(tmp_path, error):
    target = tmp_path / "a" / "target"

    def fill(opened):
        with opened as beside:
            raise OSError(error.errno, error.strerror, error.filename and error.filename.format(beside=beside))

    for opened in (new_folder(target, False, "marker"), new_file(target)):
        with pytest.raises(OSError, match=error.strerror) as caught:
            fill(opened)
        assert (caught.value.errno, caught.value.filename) == (error.errno, str(target))
        assert not target.exists()


def test_an_error_of_reading_keeps_its_name(tmp_path):
    def fill():
        with new_folder(tmp_path / "target", False, "marker"):
            (tmp_path / "nowhere").read_text()

    with pytest.raises(FileNotFoundError) as caught:
        fill()
    assert caught.value.filename == str(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleError, match=r"^cannot write .*/file/x: "):
        write_text(tmp_path / "file" / "x", "text")


@pytest.mark.parametrize(
    ("line", "shown"),
    [("parity --count 4 --max-length 4", "parity passed"), ("bench --case 1x1x4x4 --rounds 1 --quick", "end to end")],
)
def test_minutes_of_work_are_shown_though_the_report_cannot_be_written(work, cli, monkeypatch, line, shown):
    def full(path):
        raise OSError(errno.ENOSPC, "Full", str(path))

    command, *flags = line.split()
    monkeypatch.setattr("seq2engine.common.reports.new_file", full)
    code, out, err = cli(command, work / "bundle", "--threads", 1, *flags, "--quiet")
    assert code == 1
    assert shown in out
    assert "Full" in err

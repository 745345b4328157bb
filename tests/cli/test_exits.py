"""The exit codes, and the one line that goes with each."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from seq2engine.cli.exits import exit_code_of
from seq2engine.errors import BundleError, MissingPackageError, UsageError, missing_package

BUNDLELESS = (("--version",), ("--help",), ("run", "--help"), ("build", "--help"))


def raising(error):
    def command():
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (BundleError("no\n  bundle"), 1, "error: no bundle\n"),
        (UsageError("beam 0, expected at least 1"), 2, "error: beam 0, expected at least 1\n"),
        (PermissionError(errno.EACCES, "Permission denied", "a/b"), 1, "error: a/b: Permission denied\n"),
        (OSError(errno.EXDEV, "Invalid link", b"a", None, "b"), 1, "error: a to b: Invalid link\n"),
        (OSError(errno.ENOSPC, "Full", "a"), 1, "error: a: Full; make room there and run it again\n"),
        (MemoryError(), 1, "error: out of memory; ask for less at once, such as a smaller --batch, --beam or --max-"),
        (KeyboardInterrupt(), 130, "interrupted; nothing half-written was left\n"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_user_can_cause_is_one_line(capsys, error, code, line):
    assert exit_code_of(raising(error)) == code
    assert capsys.readouterr().err.startswith(line)


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'seq2engine.runtme'", name="seq2engine.runtme"),
        ImportError("no such thing"),
        OSError("raised by hand"),
        ValueError("list index out of range"),
    ],
    ids=repr,
)
def test_what_is_our_own_fault_stays_a_traceback(error):
    with pytest.raises(type(error), match=str(error)):
        exit_code_of(raising(error))


def test_a_missing_package_is_reported_by_the_command_that_needs_it(cli, monkeypatch):
    command = raising(ModuleNotFoundError("No module named 'onnxruntime'", name="onnxruntime.capi"))
    monkeypatch.setattr("seq2engine.commands.parity.run_parity", lambda args: command())
    assert cli("parity", "nowhere") == (
        1,
        "",
        "error: parity needs onnxruntime, which is not installed; install it with: pip install 'onnxruntime'\n",
    )


def test_a_missing_package_is_an_error_of_ours_and_an_import_error():
    error = missing_package(ModuleNotFoundError(name="tokenizers"), "this tokenizer")
    assert isinstance(error, MissingPackageError)
    assert isinstance(error, ImportError)
    assert error.name == "tokenizers"
    assert str(error).endswith("install it with: pip install 'tokenizers'")
    assert missing_package(error, "something else") is None


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", BUNDLELESS, ids=" ".join)
def test_output_that_cannot_be_written(words, unbuffered):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "seq2engine", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert (done.returncode, done.stderr) == (
        1,
        "error: cannot write the output: No space left on device; make room there and run it again\n",
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_gone(unbuffered):
    read, write = os.pipe()
    os.close(read)
    argv = [sys.executable, "-m", "seq2engine", "run", "--help"]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with os.fdopen(write, "w") as pipe:
        done = subprocess.run(argv, stdout=pipe, stderr=subprocess.PIPE, text=True, env=environment)
    assert (done.returncode, done.stderr) == (141, "")


def test_closed_outputs():
    argv = [sys.executable, "-m", "seq2engine"]
    closed = subprocess.run([*argv, "--version"], preexec_fn=lambda: os.close(1), stderr=subprocess.PIPE, text=True)
    assert (closed.returncode, closed.stderr) == (0, "")
    with open("/dev/full", "w") as full:
        assert subprocess.run([*argv, "inspect"], stderr=full).returncode == 2
        assert subprocess.run([*argv, "inspect", "nowhere"], stderr=full).returncode == 1

"""Ctrl-C ends a command with 130 and one line, whatever it is doing: above all while it imports compiled modules."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import weakref
from functools import partial

import pytest

from seq2engine.cli.exits import exit_code_of
from seq2engine.cli.interrupts import handled_interrupts

TRIES = 5
TRAIN = ("train", "nowhere.tsv", "out", "--dev", "nowhere.tsv")  # imports torch, then finds no data


@pytest.fixture(autouse=True)
def _signals_as_in_a_terminal():
    """A test run in the background of a shell inherits an ignored SIGINT, which the code under test would respect."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def imports(tmp_path_factory):
    """`-X importtime` tells of every import as it ends: lines of a whole run at which to interrupt it."""
    lines = started(tmp_path_factory.mktemp("empty")).communicate()[1].splitlines()
    ended = [number for number, line in enumerate(lines, 1) if line.startswith(b"import time:")]
    (first,) = [number for number in ended if lines[number - 1].endswith(b"| seq2engine.cli.exits")]
    assert lines[-1].startswith(b"error: no data at")
    return random.Random(0).sample([number for number in ended if number > first], TRIES)


def started(folder):
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a background shell tells its children to ignore it
    argv = [sys.executable, "-X", "importtime", "-m", "seq2engine", *TRAIN]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heed, cwd=folder)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(TRIES))
def test_an_interrupt_while_packages_are_imported(imports, number, tmp_path):
    sent, code = ((signal.SIGINT, 130), (signal.SIGTERM, 143))[number == 3]
    with started(tmp_path) as process:
        for _ in range(imports[number]):
            process.stderr.readline()
        process.send_signal(sent)
        _, err = process.communicate()
    assert process.returncode == code, err
    assert [line for line in err.splitlines() if not line.startswith(b"import time:")] == [
        b"interrupted; nothing half-written was left"
    ]


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_waits_for_the_end_of_an_import(tmp_path, monkeypatch):
    module = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\ndone = True\n"
    (tmp_path / "imported_slowly.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    done = []

    def command():
        with handled_interrupts():
            import imported_slowly

            done.append(imported_slowly.done)
            signal.sigtimedwait([], 10)  # until it is raised

    with pytest.raises(KeyboardInterrupt):
        command()
    assert done == [True]


def test_a_second_interrupt_does_not_wait(capsys, tmp_path, monkeypatch):
    """Whatever the import makes of it."""
    module = (
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt:\n    raise SystemError('failed')\n"
    )
    (tmp_path / "imported_badly.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)

    def command():
        import imported_badly  # noqa: F401

        raise AssertionError("it must not come so far")

    assert exit_code_of(command) == 130
    assert capsys.readouterr().err == "interrupted; nothing half-written was left\n"


def test_an_interrupt_that_a_finaliser_loses_is_raised_again(capsys):
    class Held:
        pass

    def command():
        held = Held()
        reference = weakref.ref(held, lambda _: interrupt())
        del held
        signal.sigtimedwait([], 10)
        raise AssertionError(f"{reference} swallowed it")

    assert exit_code_of(command) == 130
    assert capsys.readouterr().err == "interrupted; nothing half-written was left\n"


def test_an_interrupt_that_is_swallowed_shows_in_the_exit_code(capsys):
    def command():
        try:
            interrupt()
        except KeyboardInterrupt:
            return 0

    assert exit_code_of(command) == 130
    assert capsys.readouterr().err == "interrupted; nothing half-written was left\n"


def test_a_command_that_tells_of_its_interrupt_itself(capsys):
    def command(number):
        try:
            os.kill(os.getpid(), number)
        except KeyboardInterrupt:
            return 130

    assert exit_code_of(partial(command, signal.SIGINT)) == 130
    assert exit_code_of(partial(command, signal.SIGTERM)) == 143
    assert capsys.readouterr().err == ""


def test_signals_are_left_as_they_were():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
    assert exit_code_of(lambda: 0) == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)] == before


def test_ignored_signals_stay_ignored(monkeypatch):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as nohup and background shells have it

    def command():
        interrupt()
        return 0

    try:
        assert exit_code_of(command) == 0
    finally:
        signal.signal(signal.SIGINT, before)

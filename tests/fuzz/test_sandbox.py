"""What the fuzzing must detect, planted: each kind of failure is named as what it is, and good cases as good."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # of `make fuzz` itself

TESTS = Path(__file__).parents[1]

# Runs the planted functions in forked processes of a process without threads; prints the outcome of each.
SCRIPT = """
import ctypes, json, os, pickle, signal, socket, subprocess, sys, time
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from support.fuzzing import sandbox
from support.fuzzing.cases import Case
from support.fuzzing.pickle_mutations import Code

sandbox.SECONDS = 2
root, outside = Path(sys.argv[2]), "../outside"

def error(text):
    print(f"error: {text}", file=sys.stderr)
    return 1

def busy():
    while True:
        pass

def taken(size):
    held = bytearray(size)
    held[::4096] = bytes(len(held[::4096]))
    return 0

def raising():
    raise KeyError("x")

def allocation():
    try:
        bytearray(1 << 40)
    except MemoryError:
        return error("out of memory")

def natively():
    libc = ctypes.CDLL(None)
    file = os.fsencode(os.path.abspath(f"{outside}/native"))
    return 0 * libc.close(libc.open(file, os.O_CREAT | os.O_WRONLY, 0o644))

def through_link():
    os.symlink(outside, "link")
    return 0 * Path("link/written").write_text("x")

PLANTED = {
    "fine": lambda: 0,
    "one line": lambda: error("not JSON"),
    "inside": lambda: 0 * Path("made").write_text("x"),
    "two lines": lambda: error("a") + error("b"),
    "an exception": raising,
    "sleeps": lambda: time.sleep(1000),
    "sleeps while the machine does": lambda: time.sleep(3.5) or 0,
    "computes": busy,
    "waits for a pipe": lambda: (os.mkfifo("pipe"), open("pipe").read()),
    "segmentation fault": lambda: ctypes.string_at(0),
    "killed": lambda: os.kill(os.getpid(), signal.SIGABRT),
    "600 MB": lambda: taken(600 << 20),
    "100 MB": lambda: taken(100 << 20),
    "no memory left": allocation,
    "writes": lambda: 0 * Path(outside, "file").write_text("x"),
    "writes over": lambda: 0 * Path(outside, "kept").write_text("gone"),
    "writes natively": natively,
    "writes through a link": through_link,
    "writes far away": lambda: 0 * Path(sys.argv[2], "far").write_text("x"),
    "removes": lambda: os.remove(f"{outside}/kept") or 0,
    "renames": lambda: Path("made").write_text("x") and (os.rename("made", f"{outside}/made") or 0),
    "links outside": lambda: os.symlink("kept", f"{outside}/link") or 0,
    "links inside": lambda: os.symlink("nowhere/at/all", "link") or 0,
    "makes a folder": lambda: os.mkdir(f"{outside}/folder") or 0,
    "runs a command": lambda: os.system("true"),
    "starts a process": lambda: subprocess.run(["true"]).returncode,
    "unpickles code": lambda: pickle.loads(pickle.dumps(Code())) or 0,
    "connects": lambda: socket.socket().connect_ex(("203.0.113.1", 9)) * 0,
}
outcomes = {}
for number, (name, planted) in enumerate(PLANTED.items()):
    folder = root / str(number)
    for part in ("in", "outside", "home"):
        (folder / part).mkdir(parents=True)
    (folder / "outside" / "kept").write_text("kept")
    running = sandbox.start((), folder, Case(number, name, ()), lambda argv, planted=planted: planted())
    if name == "sleeps while the machine does":
        time.sleep(3)
    while (outcome := sandbox.finished(running)) is None:
        time.sleep(0.01)
    outcomes[name] = (outcome.kind, outcome.detail)
print(json.dumps(outcomes))
"""

EXPECTED = {
    "fine": "ok",
    "one line": "refused",
    "inside": "ok",
    "two lines": "several lines",
    "an exception": "traceback",
    "sleeps": "hang",
    "sleeps while the machine does": "ok",  # a watcher that was stopped, as by a debugger or with its virtual machine
    "computes": "hang",
    "waits for a pipe": "hang",
    "segmentation fault": "crash",
    "killed": "crash",
    "600 MB": "memory",
    "100 MB": "ok",
    "no memory left": "memory",
    "writes": "wrote outside",
    "writes over": "wrote outside",
    "writes natively": "wrote outside",
    "writes through a link": "wrote outside",
    "writes far away": "wrote outside",
    "removes": "wrote outside",
    "renames": "wrote outside",
    "links outside": "wrote outside",
    "links inside": "ok",
    "makes a folder": "wrote outside",
    "runs a command": "ran code",
    "starts a process": "ran code",
    "unpickles code": "ran code",
    "connects": "ran code",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    folder = tmp_path_factory.mktemp("planted")
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(TESTS), str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[str, str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_what_is_planted_is_named(outcomes: dict[str, tuple[str, str]], name: str) -> None:
    assert outcomes[name][0] == EXPECTED[name]


@pytest.mark.parametrize(
    ("name", "state", "place"),
    [("sleeps", "sleeping", "in <lambda>"), ("computes", "running", "in busy"), ("waits for a pipe", "sleeping", "in")],
)
def test_a_hang_has_its_state_and_place(
    outcomes: dict[str, tuple[str, str]], name: str, state: str, place: str
) -> None:
    """A process that waits for ever is told from one that a busy machine does not let run."""
    detail = outcomes[name][1]
    assert detail.startswith(f"{state} after ")
    assert place in detail

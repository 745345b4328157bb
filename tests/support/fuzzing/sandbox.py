"""Runs a command line in a forked process with limits, watches what it does, and names its outcome."""

from __future__ import annotations

import faulthandler
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 60  # after which a case hangs
UNSEEN = 2  # seconds between two looks, beyond which this process itself was stopped, and its cases with it
MEMORY = 1 << 29  # bytes that a case may take beyond what the process had; no file of a case has more than a few MB
FAILED = 70  # exit code of an exception that no command caught
WATCHED = ("os.exec", "os.posix_spawn", "os.system", "subprocess.Popen", "pickle.find_class", "socket.connect")
# Which arguments are paths that change: of a symbolic link, the second.
CHANGING = dict.fromkeys(("os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.utime"), slice(1))
CHANGING |= {"os.rename": slice(2), "os.link": slice(2), "os.symlink": slice(1, 2)}
OUTCOMES = ("ok", "refused", "traceback", "several lines", "hang", "crash", "memory", "wrote outside", "ran code")
GOOD = ("ok", "refused")
STATES = {"R": "running", "S": "sleeping", "D": "waiting for a device"}


@dataclass(frozen=True)
class Outcome:
    kind: str  # of OUTCOMES
    detail: str
    code: int
    seconds: float
    megabytes: int
    cpu: float  # seconds


@dataclass
class Running:
    """A forked case: its process, its folders and when it began."""

    pid: int
    folder: Path
    started: float
    before: dict[str, tuple[int, int]]
    case: Any
    seen: float  # when it was last looked at


def start(argv: Sequence[str], folder: Path, case: Any, main: Callable[[Sequence[str]], int]) -> Running:
    """Forks; the child runs the command inside `folder`/in and ends. Beside it, `folder`/outside is watched."""
    before = listing(folder / "outside")
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        child(argv, folder, main)
    now = time.monotonic()
    return Running(pid, folder, now, before, case, now)


def child(argv: Sequence[str], folder: Path, main: Callable[[Sequence[str]], int]) -> None:
    code = FAILED
    try:
        os.setpgid(0, 0)
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(folder / "in")
        for name in ("HOME", "XDG_CACHE_HOME", "TMPDIR"):
            os.environ[name] = str(folder / "home")
        import tempfile

        tempfile.tempdir = None
        sys.dont_write_bytecode = True  # Python's own cache of modules that a command imports late is no write of ours
        limit(resource.RLIMIT_DATA, writable_memory() + 4 * MEMORY)
        limit(resource.RLIMIT_FSIZE, 2 * MEMORY)
        limit(resource.RLIMIT_CORE, 0)
        faulthandler.register(signal.SIGUSR1, os.open(folder / "stack", os.O_CREAT | os.O_WRONLY))
        watch(folder)
        (folder / "resident").write_text(str(resident()))
        code = main(argv)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def limit(what: int, most: int) -> None:
    resource.setrlimit(what, (most, most))


def writable_memory() -> int:
    """Bytes of memory of its own that this process has asked for; the address space is no measure: PyTorch reserves."""
    found = re.search(r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def watch(folder: Path) -> None:
    """Notes processes that are started, classes that are unpickled, connections, and changes of files elsewhere."""
    notes = os.open(folder / "notes", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    allowed = tuple(str(folder / name) + "/" for name in ("in", "home", "resident"))

    def elsewhere(name: Any) -> bool:
        if not isinstance(name, str | bytes | os.PathLike):
            return False
        path = os.path.realpath(os.fsdecode(name))
        return not (path + "/").startswith((*allowed, "/dev/", "/proc/"))

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in WATCHED:
            if event == "subprocess.Popen" and args[0] in (sys.executable, "uname", "git"):
                return  # a worker of ours (a build, a measurement), platform.processor(), the version of a checkout
            if event == "socket.connect" and args[1][0] == "127.0.0.1":
                return  # the hub of this case, which the same process serves
            os.write(notes, f"ran code: {event} {args[:2]!r}\n".encode("utf-8", "replace"))
        elif event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            if elsewhere(args[0]):
                os.write(notes, f"wrote outside: open {args[0]!r}\n".encode("utf-8", "replace"))
        elif event in CHANGING and any(map(elsewhere, args[CHANGING[event]])):
            os.write(notes, f"wrote outside: {event} {args[:2]!r}\n".encode("utf-8", "replace"))

    sys.addaudithook(hook)


def resident() -> int:
    """Kilobytes of this process in memory; a forked one begins with fewer than its parent has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * (os.sysconf("SC_PAGESIZE") >> 10)


def finished(running: Running) -> Outcome | None:
    """The outcome of a case that has ended, or that takes too long and is ended; None while it runs."""
    now = time.monotonic()
    if now - running.seen > UNSEEN:  # time in which nobody ran is not the case's
        running.started += now - running.seen
    running.seen = now
    pid, status, usage = os.wait4(running.pid, os.WNOHANG)
    seconds = now - running.started
    hangs, where = False, ""
    if pid == 0:
        if seconds < SECONDS or (computes(running.pid) and seconds < 10 * SECONDS):
            return None
        hangs, where = True, place_of_hang(running)
        kill(running.pid)
        _, status, usage = os.wait4(running.pid, 0)
    kill(running.pid)  # what it may have started
    base = int((running.folder / "resident").read_text())
    megabytes = max(0, usage.ru_maxrss - base) >> 10
    code = os.waitstatus_to_exitcode(status)
    kind, detail = ("hang", where) if hangs else kind_of(running, code, megabytes)
    return Outcome(kind, detail, code, seconds, megabytes, usage.ru_utime + usage.ru_stime)


def computes(pid: int) -> bool:
    """Whether a process is at work, or would be if it got a core, and has had less than its seconds of one: on a busy
    machine they take longer."""
    state, cpu = state_of(pid)
    return cpu < SECONDS and (cpu > 1 or state == "R")


def state_of(pid: int) -> tuple[str, float]:
    """The letter of a process's state, and the seconds of a core that it has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def place_of_hang(running: Running) -> str:
    """What a process does that is about to be ended, and the innermost line of Python that it is in."""
    state, cpu = state_of(running.pid)
    os.kill(running.pid, signal.SIGUSR1)
    stack, until = running.folder / "stack", time.monotonic() + 2
    while not (lines := re.findall(r'File "(.*)", (line \d+ in .*)', stack.read_text(errors="replace"))):
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    place = f"{Path(lines[0][0]).name} {lines[0][1]}" if lines else "an unknown place"
    return f"{STATES.get(state, state)} after {cpu:.1f} s of a core: {place}"


def kill(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def kind_of(running: Running, code: int, megabytes: int) -> tuple[str, str]:
    folder = running.folder
    errors = (folder / "stderr").read_text(errors="replace") if (folder / "stderr").is_file() else ""
    notes = (folder / "notes").read_text(errors="replace") if (folder / "notes").is_file() else ""
    for kind in ("ran code", "wrote outside"):
        if kind in notes:
            return kind, next(line for line in notes.splitlines() if line.startswith(kind))[:300]
    if listing(folder / "outside") != running.before:
        return "wrote outside", str(sorted(set(listing(folder / "outside")) ^ set(running.before)))[:300]
    if (folder / "in" / "canary").exists() or (folder / "outside" / "canary").exists():
        return "ran code", "canary"
    if code < 0:
        return "crash", signal.Signals(-code).name
    if "Traceback (most recent call last)" in errors:
        return "traceback", place_of(errors)
    if megabytes << 20 > MEMORY or (running.case.of_file and re.search("out of memory|alloc", errors)):
        return "memory", f"{megabytes} MB: {errors[-200:]}"
    if code == 0:
        return "ok", ""
    lines = [line for line in errors.splitlines() if re.match(r"(\S+ )*error: ", line)]
    if len(lines) > 1:
        return "several lines", errors[-300:]
    return ("refused", lines[0][:300]) if lines else ("ok", f"exit code {code}: {errors[-200:]}")


def place_of(errors: str) -> str:
    """The exception and the innermost line of ours in a traceback."""
    ours = re.findall(
        r'File "[^"]*/((?:seq2engine|model|export|runtime|benchmarks)/[^"]+)", line (\d+), in (\S+)', errors
    )
    last = [line for line in errors.splitlines() if line and not line.startswith(" ")]
    name, line, function = ours[-1] if ours else ("", "", "")
    return f"{name}:{line} {function}: {last[-1][:160] if last else ''}"


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(folder)): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in folder.rglob("*")
        if not path.is_dir()
    }

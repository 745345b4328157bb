"""Folders and files that are whole or not there, whatever happens while they are written."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from seq2engine.common import atomic_folders as folders
from seq2engine.common.atomic_folders import new_file, new_folder, sha256_of
from seq2engine.errors import BundleError

MARK = "mark.json"
FAILURES = [ValueError("a bug"), OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), SystemExit(3)]
each_failure = pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)


def fill(folder: Path, text: str) -> None:
    (folder / MARK).write_text(text)
    (folder / "graphs").mkdir()
    (folder / "graphs" / text).write_text(text)


def content(folder: Path) -> dict[str, str]:
    """Every file below a folder and what is in it."""
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def whole(text: str) -> dict[str, str]:
    """The content of a folder that `fill` filled."""
    return {MARK: text, f"graphs/{text}": text}


def make(target: Path, force: bool = False, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Makes a new folder; `meanwhile` is what happens while it is filled."""
    with new_folder(target, force, marker=MARK) as beside:
        fill(beside, "new")
        meanwhile()


def fail_with(failure: BaseException) -> Callable[[], object]:
    def fail() -> None:
        raise failure

    return fail


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A place whose neighbours can be counted."""
    return tmp_path / "target"


@pytest.fixture
def old(target: Path) -> Path:
    """A folder of ours that is there already."""
    target.mkdir()
    fill(target, "old")
    return target


# A new folder


def test_a_folder_appears_when_it_is_whole(target: Path) -> None:
    with new_folder(target, force=False, marker=MARK) as beside:
        fill(beside, "new")
        assert beside.parent == target.parent  # so that a rename is all it takes
        assert not target.exists()
    assert content(target) == whole("new")
    assert list(target.parent.iterdir()) == [target]


def test_everybody_may_read_it(target: Path) -> None:
    with new_folder(target, force=False, marker=MARK) as beside:
        fill(beside, "new")
        (beside / MARK).chmod(0o600)
        (beside / "graphs" / "new").chmod(0o600)
    assert target.stat().st_mode & 0o777 == 0o755
    assert (target / MARK).stat().st_mode & 0o777 == 0o644
    assert (target / "graphs" / "new").stat().st_mode & 0o777 == 0o644


def raised_as(found: BaseException, failure: BaseException, target: Path) -> bool:
    """An error of the system gets the name of what was to be written; all others stay what they are."""
    if not isinstance(failure, OSError):
        return found is failure
    assert isinstance(found, OSError)
    return (found.errno, found.strerror, found.filename) == (failure.errno, failure.strerror, str(target))


@each_failure
def test_nothing_is_left_of_a_failure(target: Path, failure: BaseException) -> None:
    with pytest.raises(type(failure)) as caught:
        make(target, meanwhile=fail_with(failure))
    assert raised_as(caught.value, failure, target)
    assert list(target.parent.iterdir()) == []


def test_parents_are_made(tmp_path: Path) -> None:
    make(tmp_path / "a" / "b" / "target")
    assert content(tmp_path / "a" / "b" / "target") == whole("new")


@each_failure
def test_parents_that_were_made_go_again(tmp_path: Path, failure: BaseException) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(type(failure)):
        make(tmp_path / "there" / "a" / "b" / "target", meanwhile=fail_with(failure))
    assert list(tmp_path.iterdir()) == [tmp_path / "there"]
    assert list((tmp_path / "there").iterdir()) == []


def test_parents_that_others_use_stay(tmp_path: Path) -> None:
    def move_in_and_fail() -> None:
        (tmp_path / "a" / "theirs").write_text("keep")
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        make(tmp_path / "a" / "b" / "target", meanwhile=move_in_and_fail)
    assert content(tmp_path) == {"a/theirs": "keep"}
    assert not (tmp_path / "a" / "b").exists()


def test_a_relative_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make(Path("out/target"))
    assert content(tmp_path / "out" / "target") == whole("new")
    with pytest.raises(ValueError, match="a bug"):
        make(Path("other/target"), meanwhile=fail_with(ValueError("a bug")))
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_a_place_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleError, match=r"^cannot write .*/file/target: "):
        make(tmp_path / "file" / "target")


def test_parents_go_again_when_there_is_no_room_beside_the_target(tmp_path: Path) -> None:
    name = "x" * 250  # a name that fits, but not with what a neighbour adds to it
    with pytest.raises(BundleError, match=r"cannot write .*: File name too long"):
        make(tmp_path / "a" / name)
    assert list(tmp_path.iterdir()) == []


# What is there already


def refused(target: Path, force: bool) -> str:
    """Why a target is refused, with nothing touched."""
    with pytest.raises(BundleError) as caught:
        make(target, force, meanwhile=lambda: pytest.fail("refused only after the work was done"))
    assert list(target.parent.iterdir()) == [target]
    return str(caught.value)


def test_a_folder_of_ours_is_refused(old: Path) -> None:
    assert refused(old, force=False) == f"{old} exists; name another folder, or add --force to replace it"
    assert content(old) == whole("old")


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_is_not_ours_is_never_replaced(target: Path, force: bool) -> None:
    (target / MARK).mkdir(parents=True)  # a folder of that name is not our mark
    (target / "theirs").write_text("keep")
    message = f"{target} exists and has no {MARK}, so it is not ours to replace; name another folder"
    assert refused(target, force) == message
    assert content(target) == {"theirs": "keep"}


@pytest.mark.parametrize("force", [False, True])
def test_a_file_is_never_replaced(target: Path, force: bool) -> None:
    target.write_text("keep")
    assert refused(target, force) == f"{target} is a file; name a folder that does not exist yet"
    assert target.read_text() == "keep"


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("points_at", ["a folder of ours", "nothing"])
def test_a_link_is_never_replaced(
    target: Path, force: bool, points_at: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    fill(elsewhere, "old")
    target.symlink_to(elsewhere if points_at == "a folder of ours" else elsewhere / "none")
    assert refused(target, force) == f"{target} is a link; name a folder that does not exist yet"
    assert target.is_symlink()
    assert content(elsewhere) == whole("old")


def test_an_empty_folder_is_replaced(target: Path) -> None:
    target.mkdir()
    assert "add --force" in refused(target, force=False)
    make(target, force=True)
    assert content(target) == whole("new")


def test_a_folder_of_ours_is_there_until_the_new_one_is(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed, really_remove = [], shutil.rmtree

    def remove(path: Path, ignore_errors: bool = False) -> None:
        assert content(old) == whole("new")  # nothing of the old one goes before the new one is in its place
        removed.append(content(path))
        really_remove(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", remove)
    seen = []
    make(old, force=True, meanwhile=lambda: seen.append(content(old)))
    assert seen == [whole("old")]
    assert removed == [whole("old")]
    assert content(old) == whole("new")
    assert list(old.parent.iterdir()) == [old]


@each_failure
def test_a_failure_leaves_the_old_folder(old: Path, failure: BaseException) -> None:
    with pytest.raises(type(failure)):
        make(old, force=True, meanwhile=fail_with(failure))
    assert content(old) == whole("old")
    assert list(old.parent.iterdir()) == [old]


@pytest.mark.parametrize(("force", "name"), [(False, MARK), (True, "theirs")])
def test_a_folder_that_appears_meanwhile_is_not_lost(target: Path, force: bool, name: str) -> None:
    def another_is_faster() -> None:
        target.mkdir()
        (target / name).write_text("keep")

    with pytest.raises(BundleError, match="exists"):
        make(target, force, meanwhile=another_is_faster)
    assert content(target) == {name: "keep"}
    assert list(target.parent.iterdir()) == [target]


# The swap


class FakeLibc:
    """A C library whose renameat2 notes what it is asked and then fails, or with code 0 claims to have done it."""

    def __init__(self, code: int):
        self.code = code
        self.calls: list[tuple[object, ...]] = []

    def renameat2(self, *arguments: object) -> int:
        self.calls.append(arguments)
        ctypes.set_errno(self.code)
        return -1 if self.code else 0


def test_the_swap_is_one_step_of_the_system(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libc, current_folder, exchange_flag = FakeLibc(0), -100, 2  # AT_FDCWD and RENAME_EXCHANGE of <linux/fs.h>
    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: libc)
    folders.exchange(old.parent / "new", old)
    new, target = bytes(old.parent / "new"), bytes(old)
    assert libc.calls == [(current_folder, new, current_folder, target, exchange_flag)]
    assert content(old) == whole("old")  # nothing else was moved


@pytest.fixture(params=[None, errno.EINVAL, errno.ENOSYS], ids=["no renameat2", "EINVAL", "ENOSYS"])
def no_exchange(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system, or a file system, that cannot swap two folders in one step."""
    libc = object() if request.param is None else FakeLibc(request.param)
    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: libc)


@pytest.mark.usefixtures("no_exchange")
def test_without_an_exchange_the_swap_takes_steps(old: Path) -> None:
    make(old, force=True)
    assert content(old) == whole("new")
    assert list(old.parent.iterdir()) == [old]


@pytest.mark.usefixtures("no_exchange")
def test_without_an_exchange_a_failed_step_is_undone(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really_rename, calls = Path.rename, []

    def rename(path: Path, to: Path) -> Path:
        calls.append(to)
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")
        return really_rename(path, to)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="Input/output"):
        make(old, force=True)
    assert content(old) == whole("old")
    assert list(old.parent.iterdir()) == [old]


def test_a_swap_that_the_system_refuses_leaves_the_old_folder(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: FakeLibc(errno.EACCES))
    with pytest.raises(PermissionError, match=os.strerror(errno.EACCES)):
        make(old, force=True)
    assert content(old) == whole("old")
    assert list(old.parent.iterdir()) == [old]


def test_an_interrupt_during_the_swap_leaves_the_old_folder(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "exchange", lambda new, target: fail_with(KeyboardInterrupt())())
    with pytest.raises(KeyboardInterrupt):
        make(old, force=True)
    assert content(old) == whole("old")
    assert list(old.parent.iterdir()) == [old]


# A new file


@pytest.mark.parametrize("before", [None, "old"])
def test_a_file_appears_when_it_is_whole(tmp_path: Path, before: str | None) -> None:
    target = tmp_path / "reports" / "report.json"
    if before:
        target.parent.mkdir()
        target.write_text(before)
    with new_file(target) as beside:
        beside.write_text("new")
        assert beside.parent == target.parent
        assert (target.read_text() if target.exists() else None) == before
    assert content(tmp_path) == {"reports/report.json": "new"}
    assert target.stat().st_mode & 0o777 == 0o644


def write_half(target: Path, failure: BaseException) -> None:
    with new_file(target) as beside:
        beside.write_text("half")
        raise failure


@each_failure
@pytest.mark.parametrize("before", [None, "old"])
def test_a_file_that_fails_leaves_the_old_one(tmp_path: Path, before: str | None, failure: BaseException) -> None:
    target = tmp_path / "report.json"
    if before:
        target.write_text(before)
    with pytest.raises(type(failure)):
        write_half(target, failure)
    assert content(tmp_path) == ({"report.json": before} if before else {})


@pytest.mark.parametrize("size", [0, 3, 1 << 20, (1 << 20) + 1])
def test_the_sum_of_a_file(tmp_path: Path, size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    (tmp_path / "file").write_bytes(data[:size])
    assert sha256_of(tmp_path / "file") == hashlib.sha256(data[:size]).hexdigest()


def test_the_sum_of_abc(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")  # the example of the standard
    assert sha256_of(tmp_path / "file") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


# What a killed process leaves

KILLED = """
import os, signal, sys
from pathlib import Path
from seq2engine.common.atomic_folders import new_file, new_folder
with new_folder(Path(sys.argv[1]), False, "mark.json") as beside, new_file(Path(sys.argv[2])) as file:
    (beside / "half").write_text("half")
    file.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_writer_cleans_up_after_a_killed_one(target: Path) -> None:
    report, theirs = target.with_name("report.json"), target.parent / ".target.settings"
    theirs.mkdir()  # begins like a leftover, but is none
    subprocess.run([sys.executable, "-c", KILLED, str(target), str(report)], check=False)
    assert not target.exists()
    assert not report.exists()
    assert len(list(target.parent.iterdir())) == 3
    make(target)
    with new_file(report) as beside:
        beside.write_text("new")
    assert sorted(target.parent.iterdir()) == sorted([target, report, theirs])
    assert content(target) == whole("new")


def test_what_is_still_being_written_is_left_alone(target: Path) -> None:
    report = target.with_name("report.json")
    with new_folder(target, force=True, marker=MARK) as slow, new_file(report) as slow_file:
        fill(slow, "slow")
        slow_file.write_text("slow")
        make(target)
        with new_file(report) as beside:
            beside.write_text("new")
        assert content(target) == whole("new")
        assert content(slow) == whole("slow")
    assert content(target) == whole("slow")
    assert report.read_text() == "slow"
    assert sorted(target.parent.iterdir()) == sorted([target, report])


def test_a_folder_that_was_cleaned_away_before_it_was_locked_is_made_again(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_lock, locked = fcntl.flock, []

    def flock(handle: int, how: int) -> None:
        locked.append(handle)
        if len(locked) == 1:
            folders.remove_leftovers(target.parent, target.name)
        really_lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    make(target)
    assert content(target) == whole("new")
    assert list(target.parent.iterdir()) == [target]


def test_without_hard_links_files_are_copied_and_a_pipe_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    fill(old, "one")
    (old / "link").symlink_to("nowhere")
    monkeypatch.setattr(os, "link", refuse_links)
    folders.keep_files(old, new, lambda path: path.name == MARK)
    assert content(new) == {"graphs/one": "one"}
    assert os.readlink(new / "link") == "nowhere"
    os.mkfifo(old / "pipe")
    with pytest.raises(BundleError, match="pipe is neither a file nor a link, so it cannot be kept; remove it"):
        folders.keep_files(old, new, lambda path: path.name == MARK)


def refuse_links(*places: object, **options: object) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")

"""Folders and files that are either whole or not there: written under a temporary name, then renamed.

The writer holds a lock (flock) on the temporary folder itself. The system releases it when the process ends, however it
ends: a temporary folder without a lock was left by a killed process, and the next writer removes it. filelock is no
substitute: it locks a file next to the folder, which a killed process leaves behind as well, and which is not safe to
remove (docs/LOG.md).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from seq2engine.errors import BundleError

AT_FDCWD, RENAME_EXCHANGE = -100, 2
UNFINISHED = ".new-"  # in the name of what is being written: .NAME.new-RANDOM


@contextmanager
def new_folder(target: Path, force: bool, marker: str, keep: Callable[[Path], None] | None = None) -> Iterator[Path]:
    """A folder to fill, which becomes `target` when the block ends well and vanishes when it does not.

    A target that is there is refused, or with `force` replaced in one step; but only a folder that holds `marker`
    (one we wrote) or nothing is ever replaced. `keep` is given the folder just before it becomes the target, to put
    into it what of the old one stays.
    """
    check_replaceable(target, force, marker)
    made = [parent for parent in target.parents if not parent.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target.parent, target.name)
        beside, lock = locked_beside(target, lambda prefix: tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    except OSError as error:
        remove_empty(made)
        raise BundleError(f"cannot write {target}: {error.strerror}") from error
    with removed_on_failure(beside, target, made, lock):
        os.chmod(beside, 0o755)
        yield beside
        for file in beside.rglob("*"):
            if file.is_file():
                file.chmod(0o644)  # some writers make files that only their owner reads
        check_replaceable(target, force, marker)  # again: another process may have put a folder there meanwhile
        if keep is not None:
            keep(beside)
        exchange(beside, target)
    shutil.rmtree(beside, ignore_errors=True)  # after an exchange this is the old folder


def locked_beside(target: Path, make: Callable[[str], str]) -> tuple[Path, int]:
    """What `make` makes beside `target`, and the descriptor that holds the lock on it: the caller closes it."""
    while True:
        beside = Path(make(f".{target.name}{UNFINISHED}"))
        lock = os.open(beside, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink and beside.exists():
            return beside, lock
        os.close(lock)  # another writer took it for a leftover in the moment before it was locked


def remove_leftovers(parent: Path, name: str | None = None) -> None:
    """Removes what killed processes left of a file or folder (None: of any); what is still being written is locked."""
    for path in parent.glob(f".{'*' if name is None else glob.escape(name)}{UNFINISHED}*"):
        remove_if_free(path)


def remove_if_free(path: Path) -> None:
    """Removes a file or folder that no living process holds a lock on."""
    with suppress(OSError):  # locked, or another process was faster
        lock = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        finally:
            os.close(lock)


def check_replaceable(target: Path, force: bool, marker: str) -> None:
    """Raises unless `target` is free, or ours and to be replaced."""
    if target.is_symlink() or target.is_file():
        kind = "link" if target.is_symlink() else "file"
        raise BundleError(f"{target} is a {kind}; name a folder that does not exist yet")
    if target.exists():
        ours = (target / marker).is_file() or not any(target.iterdir())
        if not ours:
            raise BundleError(f"{target} exists and has no {marker}, so it is not ours to replace; name another folder")
        if not force:
            raise BundleError(f"{target} exists; name another folder, or add --force to replace it")


def keep_files(old: Path, new: Path, replaced: Callable[[Path], bool]) -> None:
    """Puts all files of a folder, but for those that are replaced, into another one as well, without copying them.

    What the new folder has already stays as it is there. Links and empty folders are kept, too.
    """
    for path in sorted(old.rglob("*")) if old.is_dir() else ():
        relative = path.relative_to(old)
        place = new / relative
        if replaced(relative) or place.exists() or place.is_symlink():
            continue
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                place.mkdir(parents=True)
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, place, follow_symlinks=False)
        except OSError as error:  # a file system without hard links
            if not path.is_symlink() and not path.is_file():
                raise BundleError(f"{path} is neither a file nor a link, so it cannot be kept; remove it") from error
            shutil.copy2(path, place, follow_symlinks=False)


def remove_empty(folders: list[Path]) -> None:
    """Removes those of the folders that exist and are empty, the innermost first."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def exchange(new: Path, target: Path) -> None:
    """Renames `new` to `target`; a target that is there swaps places with it in one step of the file system."""
    if not target.exists():
        new.rename(target)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):  # not Linux
        exchange_in_steps(new, target)
    elif libc.renameat2(AT_FDCWD, os.fsencode(new), AT_FDCWD, os.fsencode(target), RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(code, os.strerror(code), str(target))
        exchange_in_steps(new, target)


def exchange_in_steps(new: Path, target: Path) -> None:
    """The same where the system has no such step: a moment without a target, but never one without its content."""
    aside = new.with_name(new.name + ".old")
    target.rename(aside)
    try:
        new.rename(target)
    except BaseException:
        aside.rename(target)
        raise
    aside.rename(new)


@contextmanager
def removed_on_failure(beside: Path, target: Path, made: list[Path], lock: int) -> Iterator[None]:
    """Removes what was to become the target, and the folders made for it, if the block fails; closes the lock."""
    try:
        yield
    except BaseException as error:
        if beside.is_dir():
            shutil.rmtree(beside, ignore_errors=True)
        else:
            beside.unlink(missing_ok=True)
        remove_empty(made)
        if isinstance(error, OSError):
            raise named(error, beside, target) from error
        raise
    finally:
        os.close(lock)


@contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """A file to write, which becomes `target` when the block ends well and vanishes when it does not."""

    def make(prefix: str) -> str:
        handle, name = tempfile.mkstemp(prefix=prefix, dir=target.parent)
        os.close(handle)
        return name

    made = [parent for parent in target.parents if not parent.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target.parent, target.name)
    beside, lock = locked_beside(target, make)
    with removed_on_failure(beside, target, made, lock):
        os.chmod(beside, 0o644)
        yield beside
        beside.replace(target)


def named(error: OSError, beside: Path, target: Path) -> OSError:
    """The error with the name of the target: the user knows no temporary name, nor one that is gone.

    An error that has no name at all is of writing into a file that was open, such as that of a full disk.
    """
    names = [Path(os.fsdecode(name)) for name in (error.filename, error.filename2) if name is not None]
    ours = not names or any(name.is_relative_to(beside) for name in names)
    return OSError(error.errno, error.strerror, str(target)) if ours and error.strerror is not None else error


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()

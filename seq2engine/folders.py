"""Folders that are either whole or not there: built beside their place, then renamed into it."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from seq2engine.errors import BundleError

AT_FDCWD, RENAME_EXCHANGE = -100, 2


@contextmanager
def new_folder(target: Path, force: bool, marker: str) -> Iterator[Path]:
    """A folder to fill, which becomes `target` when the block ends well and vanishes when it does not.

    A target that is there is refused, or with `force` replaced in one step; but only a folder that holds `marker`
    (one we wrote) or nothing is ever replaced.
    """
    check_replaceable(target, force, marker)
    made = [parent for parent in target.parents if not parent.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        remove_empty(made)
        raise BundleError(f"cannot write beside {target}: {error.strerror}") from error
    try:
        os.chmod(beside, 0o755)
        yield beside
        for file in beside.rglob("*"):
            if file.is_file():
                file.chmod(0o644)  # some writers make files that only their owner reads
        check_replaceable(target, force, marker)  # again: somebody else may have put a folder there meanwhile
        exchange(beside, target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        remove_empty(made)
        raise
    shutil.rmtree(beside, ignore_errors=True)  # after an exchange this is the old folder


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


def remove_empty(folders: list[Path]) -> None:
    """Removes those of the folders, the innermost first, that are there and that nobody has put anything into."""
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
def new_file(target: Path) -> Iterator[Path]:
    """A file to write, which becomes `target` when the block ends well and vanishes when it does not."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(handle)
    beside = Path(name)
    try:
        os.chmod(beside, 0o644)
        yield beside
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()

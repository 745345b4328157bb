"""Folders that are either whole or not there: built beside their place, then renamed into it."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from seq2engine.errors import BundleError

AT_FDCWD, RENAME_EXCHANGE = -100, 2


@contextmanager
def new_folder(target: Path, force: bool, marker: str) -> Iterator[Path]:
    """A folder to fill, which becomes `target` when the block ends well and vanishes when it does not.

    A target that is there is refused, or with `force` replaced in one step; but only a folder that holds `marker`
    (one we wrote) or nothing is ever replaced.
    """
    if target.exists() or target.is_symlink():
        if not target.is_dir() or target.is_symlink():
            raise BundleError(f"{target} is a file; name a folder that does not exist yet")
        ours = (target / marker).is_file() or not any(target.iterdir())
        if not ours:
            raise BundleError(f"{target} exists and has no {marker}, so it is not ours to replace; name another folder")
        if not force:
            raise BundleError(f"{target} exists; name another folder, or add --force to replace it")
    made = [parent for parent in target.parents if not parent.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise BundleError(f"cannot write beside {target}: {error.strerror}") from error
    try:
        os.chmod(beside, 0o755)
        yield beside
        for file in beside.rglob("*"):
            if file.is_file():
                file.chmod(0o644)  # some writers make files that only their owner reads
        exchange(beside, target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        for parent in made:
            parent.rmdir()
        raise
    shutil.rmtree(beside, ignore_errors=True)  # after an exchange this is the old folder


def exchange(new: Path, target: Path) -> None:
    """Renames `new` to `target`; a target that is there swaps places with it in one step of the file system."""
    if not target.exists():
        new.rename(target)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):  # not Linux: a moment without a target is the best to be had
        shutil.rmtree(target)
        new.rename(target)
    elif libc.renameat2(AT_FDCWD, os.fsencode(new), AT_FDCWD, os.fsencode(target), RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(code, os.strerror(code), str(target))
        shutil.rmtree(target)
        new.rename(target)


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

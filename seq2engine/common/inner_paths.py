"""Paths that a file in a folder names or that are written in it: none may lead out of the folder."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from seq2engine.errors import BundleError

from .json_files import is_text, shortened

LONGEST, LONGEST_PART = 1024, 255  # bytes of a path and of a name in it: what file systems take


def path_inside(root: Path, relative: str) -> Path:
    """The path that a file of `root` names. A ValueError where it is none, or leads out, by itself or over a link."""
    if problem := problem_with_path(relative):
        raise ValueError(f"{shortened(relative)} {problem}")
    path, folder = os.path.realpath(root / relative), os.path.realpath(root)
    if not path.startswith(os.path.join(folder, "")):
        raise ValueError(f"{shortened(relative)} lies outside")
    return Path(path)


def problem_with_path(relative: str) -> str:
    """What is wrong with a path that should be inside a folder, as far as its text shows it."""
    if not is_text(relative):
        return "is not text that a path can be"
    parts = PurePosixPath(relative).parts
    if len(relative.encode()) > LONGEST or any(len(part.encode()) > LONGEST_PART for part in parts):
        return "is too long for a path"
    if not parts or relative.startswith("/") or ".." in parts:
        return "lies outside"
    return ""


def place_inside(root: Path, *names: str) -> Path:
    """A place in `root` to write to. A symbolic link on the way is refused: it could redirect the write."""
    path = root
    for name in names:
        path /= name
        if path.is_symlink():
            raise BundleError(
                f"{path} is a link, and nothing is written through links; remove it, or put a folder there"
            )
    return path

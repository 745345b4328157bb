"""Every file that a bundle lists, and which of them are missing or changed.

manifest.json    graphs and their weights, the reference, the tokenizer: by hash
passport.json    engines: by hash and size
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from seq2engine.common.atomic_folders import sha256_of
from seq2engine.common.json_files import read_object
from seq2engine.errors import BundleError, ConfigError
from seq2engine.model.config import config_from_dict

from .bundle import REFERENCE, Bundle
from .engines import engine_folders
from .passport import PASSPORT, read_passport

CONFIG = "config.json"
EMPTY = hashlib.sha256().hexdigest()


@dataclass(frozen=True)
class ListedFile:
    """A file as the manifest or a passport describes it; `path` is relative to the bundle."""

    path: str
    what: str
    sha256: str
    bytes: int | None = None  # where the size was recorded


@dataclass(frozen=True)
class FileProblem:
    path: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path} {self.problem}"


def listed_files(bundle: Bundle) -> list[ListedFile]:
    """The files of manifest and passports; a passport that cannot be read lists none (`file_problems` names it)."""
    manifest = bundle.manifest
    files = [ListedFile(REFERENCE, "reference weights", manifest.checkpoint_sha256)]
    files += [ListedFile(path, "tokenizer and defaults", sha256) for path, sha256 in manifest.companions.items()]
    for precision, graphs in manifest.graphs.items():
        for name, entry in graphs.items():
            files.append(ListedFile(entry.path, f"{name} {precision}", entry.sha256))
            files.append(ListedFile(entry.data_path, f"{name} {precision} weights", entry.data_sha256))
    for folder in engine_folders(bundle.root):
        try:
            passport = read_passport(folder / PASSPORT)
        except BundleError:
            continue
        for name, engine in passport.engines.items():
            path = (folder / engine.file).relative_to(bundle.root).as_posix()
            files.append(ListedFile(path, f"{name} engine", engine.sha256, engine.bytes))
    return files


def file_problems(bundle: Bundle, hashed: bool) -> list[FileProblem]:
    """What is wrong with the files of a bundle: names and sizes are checked or, if `hashed`, every byte."""
    return [
        *config_problems(bundle),
        *passport_problems(bundle),
        *(
            FileProblem(file.path, problem)
            for file in listed_files(bundle)
            if (problem := problem_with_file(bundle, file, hashed))
        ),
    ]


def problem_with_file(bundle: Bundle, file: ListedFile, hashed: bool) -> str:
    try:
        path = bundle.inside(file.path)
    except BundleError:
        return "lies outside of the bundle"
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    if file.bytes is not None and size != file.bytes:
        return f"has {size:,} bytes, expected {file.bytes:,}"
    if size == 0 and file.sha256 != EMPTY:
        return "is empty"
    if hashed and sha256_of(path) != file.sha256:
        return "is not the file that was written (its hash differs)"
    return ""


def config_problems(bundle: Bundle) -> Iterator[FileProblem]:
    """config.json has no hash: it must be there and agree with the manifest."""
    path = bundle.root / CONFIG
    if not path.is_file():
        yield FileProblem(CONFIG, "is missing")
        return
    try:
        same = config_from_dict(read_object(path)) == bundle.config
    except (OSError, ValueError, ConfigError):
        same = False
    if not same:
        yield FileProblem(CONFIG, "is not the config that the manifest has")


def passport_problems(bundle: Bundle) -> Iterator[FileProblem]:
    for folder in engine_folders(bundle.root):
        path = folder / PASSPORT
        where = path.relative_to(bundle.root).as_posix()
        if not path.exists():
            yield FileProblem(where, "is missing")
            continue
        try:
            read_passport(path)
        except BundleError:
            yield FileProblem(where, "cannot be used")

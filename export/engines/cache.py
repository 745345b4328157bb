"""The engine cache: engines built before, under a hash of everything that went into the build.

    DIR/<key>/  engine  facts.json          an entry: whole or not there, see seq2engine/common/atomic_folders.py
        .<key>.lock                         held during a build; a second build of the key waits and reuses

A TensorRT engine differs from build to build in some bytes, so engines are never compared: the key is a hash of all
that goes into a build. An entry is checked against its own hash whenever it is used; a damaged one counts as missing.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from seq2engine.common.atomic_folders import new_folder, remove_if_free, remove_leftovers, sha256_of
from seq2engine.common.json_files import read_object, typed_from_json
from seq2engine.errors import BundleError

from ..artifact.build_flags import BuildFlags
from ..artifact.profiles import Shapes

RECIPE = 1  # incremented when the same inputs give another engine
ENGINE, FACTS = "engine", "facts.json"
LIMIT = 10 << 30  # bytes; the entries that were not used for longest go first
log = logging.getLogger("seq2engine")


@dataclass(frozen=True)
class EngineFacts:
    """What is known of an engine file, and what its build took."""

    bytes: int
    sha256: str
    build_seconds: float
    peak_memory: int

    def describe(self, file: Path) -> bool:
        return file.is_file() and file.stat().st_size == self.bytes and sha256_of(file) == self.sha256


def engine_key(
    model: bytes,
    weights_sha256: str,
    flavour: str,
    version: str,
    device: str,
    targets: Sequence[str],
    profiles: Sequence[Shapes],
    flags: BuildFlags,
) -> str:
    """A hash of everything that affects an engine; `model` is the graph as TensorRT gets it."""
    decides = {
        "recipe": RECIPE,
        "model": hashlib.sha256(model).hexdigest(),
        "weights": weights_sha256,
        "flavour": flavour,
        "version": version,
        "device": device,
        "targets": sorted(set(targets)),
        "profiles": list(profiles),
        "flags": dataclasses.asdict(flags),
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


class EngineCache:
    """A folder of engines that several processes may share. If it cannot be written to,
    engines are built and not kept."""

    def __init__(self, folder: Path, limit: int = LIMIT):
        self.folder, self.limit = folder, limit

    def find(self, key: str, into: Path) -> EngineFacts | None:
        """Copies the engine of that key to `into`, if there is a sound one."""
        entry = self.folder / key
        try:
            facts = typed_from_json(EngineFacts, read_object(entry / FACTS))
            shutil.copyfile(entry / ENGINE, into)
            os.utime(entry / FACTS)  # used now: the last to be removed
        except (OSError, ValueError):  # not there, removed by another process right now, or damaged
            into.unlink(missing_ok=True)
            return None
        if facts.describe(into):
            return facts
        into.unlink()
        return None

    def keep(self, key: str, engine: Path, facts: EngineFacts) -> None:
        """Puts a copy of an engine into the cache, and makes room for it."""
        try:
            with new_folder(self.folder / key, force=True, marker=FACTS) as beside:
                shutil.copyfile(engine, beside / ENGINE)
                (beside / FACTS).write_text(json.dumps(dataclasses.asdict(facts)) + "\n")
            self.make_room()
        except (OSError, BundleError) as error:
            log.warning("the engine was built, but not kept in the cache %s: %s", self.folder, error)

    def make_room(self) -> None:
        """Removes the entries that were not used for longest, and what killed builds left."""
        entries = []
        for path in self.folder.glob(f"*/{FACTS}"):
            with suppress(OSError):  # another process may be making room, too
                entries.append((path.stat().st_mtime, path.parent, (path.parent / ENGINE).stat().st_size))
        room = self.limit - sum(size for _, _, size in entries)
        for _, entry, size in sorted(entries)[:-1]:  # the newest is the one that was just built
            if room >= 0:
                break
            shutil.rmtree(entry, ignore_errors=True)
            room += size
        remove_leftovers(self.folder)
        for lock in self.folder.glob(".*.lock"):
            remove_if_free(lock)

    @contextmanager
    def building(self, key: str, waiting: Callable[[], None]) -> Iterator[None]:
        """Only one process at a time is inside for a key; `waiting` is called if another one is there."""
        path = self.folder / f".{key}.lock"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = lock_of(path, waiting)
        except OSError as error:
            log.warning("the engine cache %s cannot be used: %s", self.folder, error.strerror)
            yield
            return
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            os.close(lock)


def lock_of(path: Path, waiting: Callable[[], None]) -> int:
    """The descriptor of a lock file that is locked and still exists: its previous holder may have removed it."""
    while True:
        lock = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            except BaseException:
                os.close(lock)
                raise
        if os.fstat(lock).st_nlink:
            return lock
        os.close(lock)

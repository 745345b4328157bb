"""Files whose hash was checked before, and which have not changed since: they are not hashed again.

A file counts as unchanged while its device, inode, size and times of modification and change are those that it had when
it was hashed. Whoever writes to a file, replaces it or sets its time of modification also sets its time of change,
which no program can choose. A file that changed within `SETTLED` seconds before it was hashed is hashed again
next time: it might change again within the same tick of the clock.

Each fact is one small file in the user's cache folder, named by the hashed file's path and hash. Damaged ones count as
missing, and a folder that cannot be written to keeps nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from seq2engine.common.atomic_folders import new_file, sha256_of

SETTLED = 2.0  # seconds; file systems keep times to 2 s at worst


@dataclass(frozen=True)
class CheckedFiles:
    folder: Path

    def has_hash(self, path: Path, expected: str) -> bool:
        """Whether the SHA-256 of a file is the expected one, from its bytes or from what is known of it."""
        before, kept = state_of(path), self.place(path, expected)
        if same_text(kept, json.dumps(before)):
            return True
        settled = time.time() - os.stat(path).st_ctime > SETTLED
        if sha256_of(path) != expected:
            return False
        if settled and state_of(path) == before:
            with suppress(OSError), new_file(kept) as file:  # it is hashed again next time
                file.write_text(json.dumps(before), encoding="utf-8")
        return True

    def place(self, path: Path, expected: str) -> Path:
        name = hashlib.sha256(f"{path.resolve()} {expected}".encode("utf-8", "surrogateescape")).hexdigest()
        return self.folder / f"{name[:32]}.json"


def state_of(path: Path) -> list[int]:
    """What changes when anyone writes to a file or replaces it."""
    about = os.stat(path)
    return [about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns]


def same_text(path: Path, expected: str) -> bool:
    try:
        return path.read_text(encoding="utf-8") == expected
    except (OSError, ValueError):
        return False

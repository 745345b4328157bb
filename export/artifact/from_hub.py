"""A bundle on the Hugging Face hub, hf:NAME[@REVISION], as a folder of this machine.

The hub's cache keeps files as links into a store, but a bundle refuses links that lead out of its folder. So a commit
becomes a folder of its own, with hard links where the file system allows them: nothing is stored twice.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from seq2engine.common.atomic_folders import new_folder
from seq2engine.common.hub import Note, Snapshot, hub_name, snapshot_of
from seq2engine.common.progress import Progress, silent
from seq2engine.errors import HubError

MARKER = "manifest.json"
NOT_READ = ("README.md", ".gitattributes")
REPORTS = "reports/"


def cached_bundles() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seq2engine" / "bundles"


def bundle_folder_from_hub(
    name: str | os.PathLike[str], progress: Progress = silent, note: Note = lambda text: None
) -> Path:
    """The folder of a bundle on the hub; it is downloaded unless that commit is there already."""
    asked = hub_name(name)

    def choose(names: Sequence[str]) -> list[str]:
        if MARKER not in names:
            raise HubError(f"{asked} is not a bundle: no {MARKER}; make one with: seq2engine export {asked} DIR")
        return sorted(file for file in names if file not in NOT_READ and not file.startswith(REPORTS))

    snapshot = snapshot_of(asked, choose, progress, note)
    folder = cached_bundles() / asked.repo.replace("/", "--") / snapshot.commit
    if not (folder / MARKER).is_file():
        write_links(snapshot, folder)
    return folder


def write_links(snapshot: Snapshot, folder: Path) -> None:
    """Puts the files of a snapshot into a folder of their own."""
    with new_folder(folder, force=True, marker=MARKER) as beside:
        for file in snapshot.files:
            source, place = (snapshot.folder / file).resolve(), beside / file
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source, place)
            except OSError:  # another file system, or one without hard links
                shutil.copyfile(source, place)

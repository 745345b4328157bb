"""Where reports go: every run writes an HTML page and its JSON, named by kind and date, so none replaces another."""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from seq2engine.common.atomic_folders import new_file
from seq2engine.common.inner_paths import place_inside
from seq2engine.common.reports_index import write_index
from seq2engine.errors import BundleError

FOLDER = "reports"  # of a bundle or a checkpoint
SUFFIXES = (".html", ".json")


@dataclass(frozen=True)
class ReportFiles:
    """The two files of one report: `page` for people, `data` for programs. A reports folder gets its index with it."""

    page: Path
    data: Path

    def write(self, page: str, data: str) -> None:
        for path, text in ((self.page, page), (self.data, data)):
            try:
                with new_file(path) as beside:
                    beside.write_text(text, encoding="utf-8")
            except OSError as error:
                raise BundleError(
                    f"cannot write {path}: {error.strerror or error}; name another place with --out"
                ) from error
        if self.page.parent.name == FOLDER:
            write_index(self.page.parent)


def report_files(
    root: Path, kind: str, name: str = "", out: Path | None = None, now: datetime | None = None
) -> ReportFiles:
    """Where a report of `kind` is to be written: ROOT/reports/KIND-NAME-DATE-TIME.{html,json}.

    `out` is another folder or, ending in .html or .json, the file itself (which is then replaced). Call it before
    the work that is reported: a place that cannot be written to is refused here.
    """
    if out is not None and out.suffix in SUFFIXES:
        stem = out.with_suffix("")
    else:
        folder = place_inside(root, FOLDER) if out is None else out
        words = (kind, re.sub(r"[^\w.]+", "-", name).strip("-"), f"{now or datetime.now():%Y%m%d-%H%M%S}")
        stem = free_stem(folder / "-".join(filter(None, words)))
    check_writable(stem.parent)
    return ReportFiles(*(stem.with_name(stem.name + suffix) for suffix in SUFFIXES))


def free_stem(stem: Path) -> Path:
    """`stem`, or with a number appended if there is such a report already (two in one second)."""
    number, free = 1, stem
    while any(free.with_name(free.name + suffix).exists() for suffix in SUFFIXES):
        number += 1
        free = stem.with_name(f"{stem.name}-{number}")
    return free


def latest_report(root: Path, kind: str, suffix: str = ".json") -> Path | None:
    """The newest report of a kind that a folder holds in its reports; None if there is none."""
    return next(iter(reports_in(root / FOLDER, kind, suffix)), None)


def reports_in(folder: Path, kind: str, suffix: str = ".json") -> list[Path]:
    """The reports of a kind, the newest first; the age of a link is its own, not its target's."""
    found = folder.glob(f"{kind}-*{suffix}")
    return sorted(found, key=lambda path: (path.lstat().st_mtime_ns, path.name), reverse=True)


def check_writable(folder: Path) -> None:
    """Raises where no file can be written in a folder, which need not be there yet."""
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    try:
        if not there.is_dir():
            raise NotADirectoryError(20, os.strerror(20))
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise BundleError(f"cannot write in {folder}: {error.strerror}; name another place with --out") from error

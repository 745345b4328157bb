"""The index page of a reports folder: links to all reports, newest first, with their verdicts."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from seq2engine.common.atomic_folders import new_file
from seq2engine.common.json_files import read_object
from seq2engine.common.page import HERE, Html, badge_html, link_html, page_from_template, words_html

INDEX = "index.html"
LARGEST = 8_000_000  # bytes of a report's data up to which it is opened for its verdict
STAMP = re.compile(r"-\d{8}-\d{6}(-\d+)?$")  # the date of a report's name, which the table has in its own column


def write_index(folder: Path) -> None:
    """Writes the page again. A failure here does not affect the report itself."""
    with suppress(OSError), new_file(folder / INDEX) as beside:
        beside.write_text(index_html(folder), encoding="utf-8")


def index_html(folder: Path) -> str:
    pages = [path for path in folder.glob("*.html") if path.name != INDEX]
    newest = sorted(pages, key=lambda path: (path.lstat().st_mtime_ns, path.name), reverse=True)
    rows = [
        (
            link_html(STAMP.sub("", path.stem), quote(path.name)),
            words_html(f"{datetime.fromtimestamp(path.lstat().st_mtime):%Y-%m-%d %H:%M}", long=False),
            *summary_of(path.with_suffix(".json")),
        )
        for path in newest
    ]
    name = folder.resolve().parent.name
    counted = f"{len(rows)} report{'' if len(rows) == 1 else 's'}, newest first."
    return page_from_template(HERE, "index.html", {"title": f"Reports of {name}", "subtitle": counted, "rows": rows})


def summary_of(data: Path) -> tuple[Html, Html]:
    """The verdict as a badge, and a summary sentence, if the report's data has them."""
    values = values_of(data)
    verdict = values.get("verdict", values.get("passed"))
    badge = Html("")
    if isinstance(verdict, bool):
        badge = badge_html("passed", "good") if verdict else badge_html("failed", "bad")
    elif isinstance(verdict, str):
        badge = badge_html(verdict, "good" if verdict in ("passed", "equal") else "warn")
    return badge, words_html(sentence_of(values))


def values_of(data: Path) -> dict[str, Any]:
    """A report's data; empty where it is missing, not an object, or too large to read for one line."""
    try:
        return read_object(data, largest=LARGEST, finite=False)
    except (OSError, ValueError):
        return {}


def sentence_of(values: dict[str, Any]) -> str:
    """A report's result in one sentence: its own, with what a precision costs against fp32, or counts."""
    for name in ("reason", "summary"):
        if isinstance(values.get(name), str):
            cost = values.get("cost_line")
            return f"{values[name]}. {cost}" if cost and isinstance(cost, str) else str(values[name])
    delivered = values.get("delivered")
    if isinstance(delivered, dict) and isinstance(delivered.get("exact_match"), int | float):
        return f"exact match {delivered['exact_match']:.1%} on the dev set"
    if isinstance(values.get("damage"), list):
        found = values["damage"]
        return "; ".join(map(str, found)) if found else "all files are there"
    counts = [(name, values[name]) for name in ("cases", "arms", "stages") if isinstance(values.get(name), list | dict)]
    return ", ".join(f"{len(found)} {name}" for name, found in counts)

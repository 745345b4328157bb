"""Reads parallel text: a TSV, or two aligned files."""

from __future__ import annotations

from pathlib import Path

from seq2engine.errors import RequestError


def read_pairs(path: Path) -> list[tuple[str, str]]:
    """A TSV of source and target, or two aligned text files PATH.source and PATH.target, as pairs of text."""
    if path.is_file():
        rows = [line.split("\t") for line in read_lines(path)]
        if wrong := [i for i, row in enumerate(rows, start=1) if len(row) != 2]:
            columns = len(rows[wrong[0] - 1])
            raise RequestError(f"{path} line {wrong[0]} has {columns} columns, expected source<TAB>target")
        return [(source, target) for source, target in rows]
    sides = [Path(f"{path}.{side}") for side in ("source", "target")]  # with_name has no name for "." and "/"
    if not all(side.is_file() for side in sides):
        names = " and ".join(map(str, sides))
        raise RequestError(f"no data at {path}; expected a TSV of source and target, or two files {names}")
    sources, targets = (read_lines(side) for side in sides)
    if len(sources) != len(targets):
        counts = f"{len(sources)} and {len(targets)}"
        raise RequestError(f"{sides[0]} and {sides[1].name} have {counts} lines; they must be aligned line by line")
    return list(zip(sources, targets, strict=True))


def read_lines(path: Path) -> list[str]:
    """The lines of a file. Only a newline ends a line: a text may contain other separators, such as form feeds."""
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise RequestError(f"{path} line {line} is not UTF-8; convert the file first") from error
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]

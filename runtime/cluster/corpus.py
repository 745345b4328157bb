"""A corpus as blocks of lines: text, TSV and Parquet files, one or a folder of them.

Only references are sent (file, offset, number of lines), never text: every worker reads its own blocks from the
storage that all machines share. Lines are numbered from 1 over all files, sorted by name.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from seq2engine.errors import RequestError

from ..text.lines import Line, lines_from_chunks

CHUNK = 1 << 20  # bytes read at once
NEWLINE = ord("\n")
PARQUET, TSV = ".parquet", ".tsv"
TEXT_COLUMN = "text"  # of a Parquet file, where none is named
MOST_ROWS = 1 << 27  # of a row group, which is read as a whole; usual are a million


@dataclass(frozen=True)
class Block:
    """Some lines of a file: bytes `begin` to `end` of text, rows `begin` to `end` of a Parquet file's row group."""

    path: str
    first: int  # number of its first line in the corpus
    count: int
    begin: int
    end: int
    local: int  # number of its first line in the file
    group: int | None = None  # the row group; None of text
    column: str | None = None


def corpus_files(path: Path) -> list[Path]:
    """The file, or the files of a folder sorted by name, without hidden files and those that begin with _."""
    try:
        found = sorted(path.iterdir()) if path.is_dir() else [path]
        files = [file for file in found if not file.name.startswith((".", "_")) and file.is_file()]
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}") from error
    if not files:
        raise RequestError(f"{path} holds no files of lines; expected text, TSV or Parquet files")
    return files


def blocks_of(path: Path, lines: int, column: str | None = None) -> list[Block]:
    """Blocks of at most `lines` lines each; a block never spans two files.

    `column` is the source's: a number from 1 in TSV files (default: 1), a name in Parquet files (default: text, or the
    only column of strings). Files without either are decoded line by line, unless a column is named.
    """
    blocks: list[Block] = []
    for file in corpus_files(path):
        first = blocks[-1].first + blocks[-1].count if blocks else 1
        try:
            if file.suffix == PARQUET:
                blocks += parquet_blocks(file, first, lines, column)
            else:
                blocks += text_blocks(file, first, lines, tsv_column(file, column))
        except OSError as error:
            raise RequestError(f"cannot read {file}: {error.strerror or error}") from error
    return blocks


def tsv_column(file: Path, column: str | None) -> str | None:
    if column is None:
        return "1" if file.suffix == TSV else None
    if not column.isdecimal() or int(column) < 1:
        raise RequestError(f"--column {column} of {file.name}, expected the number of a column from 1")
    return column


def text_blocks(file: Path, first: int, lines: int, column: str | None) -> Iterator[Block]:
    """Cuts after every newline byte whose number is a multiple of `lines`, in one pass over the file."""
    begin, seen, local, position, last = 0, 0, 1, 0, b""
    with file.open("rb") as opened:
        while chunk := opened.read(CHUNK):
            ends = position + 1 + np.flatnonzero(np.frombuffer(chunk, np.uint8) == NEWLINE)
            for end in ends[lines - seen - 1 :: lines].tolist():
                yield Block(str(file), first, lines, begin, end, local, column=column)
                first, local, begin = first + lines, local + lines, end
            seen = (seen + len(ends)) % lines
            position, last = position + len(chunk), chunk
    if position > begin:
        count = seen + (not last.endswith(b"\n"))
        yield Block(str(file), first, count, begin, position, local, column=column)


def parquet_blocks(file: Path, first: int, lines: int, column: str | None) -> Iterator[Block]:
    with parquet_errors(str(file)):
        opened = opened_parquet(str(file))
        schema, metadata = opened.schema_arrow, opened.metadata
        groups = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    name = parquet_column(file, schema, column)
    local = 1
    for group, rows in enumerate(groups):
        if rows > MOST_ROWS:
            raise RequestError(
                f"{file} has {rows:,} rows in a row group, expected at most {MOST_ROWS:,}; write smaller row groups"
            )
        for begin in range(0, rows, lines):
            end = min(begin + lines, rows)
            yield Block(str(file), first, end - begin, begin, end, local, group, name)
            first, local = first + end - begin, local + end - begin


def parquet_column(file: Path, schema: Any, column: str | None) -> str:
    strings = [field.name for field in schema if str(field.type) in ("string", "large_string", "string_view")]
    if column is None:
        column = TEXT_COLUMN if TEXT_COLUMN in strings or len(strings) != 1 else strings[0]
    if column not in strings:
        have = ", ".join(strings) or "none"
        raise RequestError(f"{file} has no column of strings called {column}; name one with --column: {have}")
    return str(column)


def opened_parquet(path: str) -> Any:
    from pyarrow.parquet import ParquetFile

    return ParquetFile(path)


@contextmanager
def parquet_errors(path: str) -> Iterator[None]:
    """Errors of the reader in the block become one line; those of a damaged page come only when rows are read."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError, ValueError) as error:  # ValueError: text that is not UTF-8
        if isinstance(error, OSError) and error.strerror is not None:
            raise
        reason = (str(error).splitlines() or ["empty"])[0]
        raise RequestError(f"{path} is no Parquet file that can be read ({reason})") from error


def lines_of(block: Block) -> Iterator[Line]:
    """The lines of a block, by their numbers in the corpus; one that cannot be read has an error."""
    if block.group is not None:
        with parquet_errors(block.path):
            values = row_group(block.path, block.group, block.column or "")[block.begin : block.end].to_pylist()
        for number, value in enumerate(values, start=block.first):
            yield Line(number, "" if value is None else value)
        return
    offset = block.first - block.local
    for line in lines_from_chunks(chunks_of(block), block.local):
        numbered = dataclasses.replace(line, number=line.number + offset)
        yield numbered if block.column is None else with_column(numbered, int(block.column))


def chunks_of(block: Block) -> Iterator[bytes]:
    with open(block.path, "rb") as opened:
        opened.seek(block.begin)
        left = block.end - block.begin
        while left:
            chunk = opened.read(min(CHUNK, left))
            if not chunk:
                raise RequestError(f"{block.path} became shorter while it was decoded; start again with it as it is")
            left -= len(chunk)
            yield chunk


def with_column(line: Line, column: int) -> Line:
    if line.error is not None or not line.text:
        return line
    cells = line.text.split("\t")
    if len(cells) < column:
        return dataclasses.replace(line, text="", error=f"{len(cells)} columns, expected at least {column}")
    return dataclasses.replace(line, text=cells[column - 1])


@functools.lru_cache(maxsize=1)
def row_group(path: str, group: int, column: str) -> Any:
    """One column of a row group; the latest is cached, because blocks are smaller than groups."""
    return opened_parquet(path).read_row_group(group, columns=[column]).column(0)

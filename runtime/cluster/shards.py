"""The output of a corpus: a folder of shards, each written atomically, so that a job can be resumed.

    OUT/  job.json                                 what is decoded, and how; another job is refused
          shards/0000/part-000000000001.jsonl      {"line": 1, "output": "..."} for every line, in order
          shards/0000/part-000000000001.problems   lines that could not be decoded, where there are any
          output.txt or output.jsonl               all outputs in the order of the lines, on request

A shard is named by its first line, so a block that is decoded twice, as after the loss of a machine, is stored once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seq2engine.common.atomic_folders import new_file, remove_leftovers
from seq2engine.common.json_files import parse_json, read_object, shortened
from seq2engine.errors import BundleError, RequestError

from .corpus import Block

JOB, SHARDS = "job.json", "shards"
PER_FOLDER = 1000  # shards; a folder of a million files is slow to list


@dataclass(frozen=True)
class Record:
    """What `run` prints of a line, and its error or note on unknown characters, if any."""

    line: int
    output: str
    error: str | None = None
    note: str | None = None


def shard_path(out: Path, number: int, block: Block) -> Path:
    """The place of the shard of a block, of which it is the `number`th from 0."""
    return out / SHARDS / f"{number // PER_FOLDER:04d}" / f"part-{block.first:012d}.jsonl"


def problems_path(shard: Path) -> Path:
    return shard.with_suffix(".problems")


def open_job(out: Path, job: dict[str, Any]) -> None:
    """Creates the folder of a job; an existing one must be of the same job, which is then resumed."""
    described: dict[str, Any] = parse_json(json.dumps(job))
    if out.is_dir() and any(out.iterdir()):
        if not (out / JOB).is_file():
            raise RequestError(
                f"{out} has no {JOB}, so it is not the output of a corpus; name another folder with --out"
            )
        try:
            there = read_object(out / JOB)
        except (OSError, ValueError) as error:
            raise RequestError(f"{out / JOB} cannot be read ({error}); name another folder with --out") from error
        if differing := sorted(key for key in described.keys() | there.keys() if described.get(key) != there.get(key)):
            raise RequestError(
                f"{out} holds the output of another job ({', '.join(differing)} differ); name another folder, "
                "or repeat the command that began it"
            )
        return
    try:
        with new_file(out / JOB) as beside:
            beside.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise BundleError(f"cannot write {out}: {error.strerror}; name another folder with --out") from error


def missing_blocks(out: Path, blocks: Sequence[Block]) -> list[int]:
    """Numbers of the blocks whose shards are not there yet."""
    there = {path.name for path in (out / SHARDS).glob("*/part-*.jsonl")}
    return [number for number, block in enumerate(blocks) if shard_path(out, number, block).name not in there]


def write_shard(path: Path, records: Iterable[Record]) -> tuple[int, int]:
    """Writes a shard and, before it, its problems; returns its numbers of lines and errors."""
    lines, problems, errors = [], [], 0
    for record in records:
        lines.append(json_line({"line": record.line, "output": record.output}))
        errors += record.error is not None
        if (message := record.error or record.note) is not None:
            kind = "note" if record.error is None else "error"
            problems.append(json_line({"line": record.line, kind: message}))
    if problems:
        write_lines(problems_path(path), problems)
    write_lines(path, lines)
    return len(lines), errors


def json_line(values: dict[str, Any]) -> str:
    """One line of JSON; Unicode line separators are escaped."""
    text = json.dumps(values, ensure_ascii=False)
    for separator in "\u2028\u2029\x85":
        text = text.replace(separator, f"\\u{ord(separator):04x}")
    return text


def write_lines(path: Path, lines: Sequence[str]) -> None:
    with new_file(path) as beside:
        beside.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")


def problems_in(out: Path, blocks: Sequence[Block]) -> Iterator[tuple[int, str, bool]]:
    """Line, message, and whether it is an error, of all shards in order."""
    for number, block in enumerate(blocks):
        path = problems_path(shard_path(out, number, block))
        for values in read_lines(path, "error", "note") if path.is_file() else ():
            yield values["line"], values.get("error") or values.get("note") or "", "error" in values


def read_lines(path: Path, *texts: str) -> Iterator[dict[str, Any]]:
    """The objects of a shard or of its problems: an integer `line`, and at least one of these texts."""
    if not path.is_file():  # opening a pipe would wait for a writer
        raise RequestError(f"{path} is not a regular file; remove it and run it again")
    with path.open("rb") as opened:
        for line in opened:
            try:
                values = parse_json(line)
                if not is_record(values, texts):
                    raise ValueError(f"{shortened(values)}, expected line and {' or '.join(texts)}")
            except ValueError as error:
                raise RequestError(f"{path} is damaged ({error}); remove it and run it again") from error
            yield values


def is_record(values: Any, texts: Sequence[str]) -> bool:
    if not isinstance(values, dict) or type(values.get("line")) is not int:
        return False
    found = [values[name] for name in texts if name in values]
    return bool(found) and all(isinstance(text, str) for text in found)


def merge_shards(out: Path, blocks: Sequence[Block], name: str) -> Path:
    """One file with the outputs of all lines in order, as `run` prints them; every line must occur once."""
    target = out / name
    with new_file(target) as beside, beside.open("w", encoding="utf-8", newline="\n") as merged:
        for number, block in enumerate(blocks):
            path = shard_path(out, number, block)
            expected = block.first
            for values in read_lines(path, "output"):
                if values["line"] != expected:
                    raise RequestError(
                        f"{path} has line {values['line']}, expected {expected}; remove it and run it again"
                    )
                merged.write(f"{values['output']}\n")
                expected += 1
            if expected != block.first + block.count:
                raise RequestError(f"{path} ends at line {expected - 1}, expected more; remove it and run it again")
    return target


def remove_unfinished(out: Path) -> None:
    """Removes incomplete files of killed workers."""
    for folder in (out / SHARDS).glob("*"):
        remove_leftovers(folder)

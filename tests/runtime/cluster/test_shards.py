"""Shards: whole or not there, of one job, and merged only if every line occurs once."""

from __future__ import annotations

import os

import pytest

from seq2engine.errors import RequestError
from seq2engine.runtime.cluster.corpus import blocks_of
from seq2engine.runtime.cluster.shards import (
    PER_FOLDER,
    Record,
    merge_shards,
    missing_blocks,
    open_job,
    problems_in,
    problems_path,
    remove_unfinished,
    shard_path,
    write_shard,
)


@pytest.fixture
def blocks(tmp_path):
    (tmp_path / "in.txt").write_text("a\nb\nc\n")
    return blocks_of(tmp_path / "in.txt", 2)


def write_all(out, blocks):
    for number, block in enumerate(blocks):
        records = [Record(line, f"out {line}\u2028\nnext") for line in range(block.first, block.first + block.count)]
        write_shard(shard_path(out, number, block), records)


def test_shards_merge_to_what_run_prints(tmp_path, blocks):
    out = tmp_path / "out"
    open_job(out, {"a": 1})
    assert missing_blocks(out, blocks) == [0, 1]
    write_all(out, blocks)
    assert missing_blocks(out, blocks) == []
    merged = merge_shards(out, blocks, "output.txt")
    assert len(shard_path(out, 0, blocks[0]).read_text().splitlines()) == 2  # U+2028 ends no line
    assert merged.read_text() == "".join(f"out {i}\u2028\nnext\n" for i in (1, 2, 3))
    assert list(problems_in(out, blocks)) == []


def test_a_line_that_is_missing_is_no_output(tmp_path, blocks):
    out = tmp_path / "out"
    write_all(out, blocks)
    path = shard_path(out, 0, blocks[0])
    lines = path.read_text().splitlines(keepends=True)
    for wrong in (lines[:1], [lines[1], lines[0]], [lines[0], lines[0]], [lines[0], "{"]):
        path.write_text("".join(wrong))
        with pytest.raises(RequestError, match="remove it and run it again"):
            merge_shards(out, blocks, "output.txt")
        assert not (out / "output.txt").exists()


@pytest.mark.parametrize(
    "content",
    [b"3\n", b"[]\n", b"{}\n", b'{"line": 1}\n', b'{"line": "1", "output": "x"}\n', b'{"line": 1, "output": 3}\n',
     b"\xff\n", b"[" * 200_000 + b"\n", b'{"line": ' + b"9" * 5000 + b"}\n"],
)  # fmt: skip
def test_damaged_lines_are_one_error(tmp_path, blocks, content):
    out = tmp_path / "out"
    write_all(out, blocks)
    shard_path(out, 0, blocks[0]).write_bytes(content)
    problems_path(shard_path(out, 0, blocks[0])).write_bytes(content)
    with pytest.raises(RequestError, match="remove it and run it again"):
        merge_shards(out, blocks, "output.txt")
    with pytest.raises(RequestError, match="remove it and run it again"):
        list(problems_in(out, blocks))


def test_a_shard_that_is_a_pipe_is_refused(tmp_path, blocks):
    out = tmp_path / "out"
    write_all(out, blocks)
    path = shard_path(out, 0, blocks[0])
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RequestError, match="not a regular file; remove it and run it again"):
        merge_shards(out, blocks, "output.txt")


def test_problems_come_in_order(tmp_path, blocks):
    out = tmp_path / "out"
    write_shard(shard_path(out, 1, blocks[1]), [Record(3, "", error="bad")])
    assert write_shard(shard_path(out, 0, blocks[0]), [Record(1, "x", note="odd"), Record(2, "")]) == (2, 0)
    assert list(problems_in(out, blocks)) == [(1, "odd", False), (3, "bad", True)]


def test_a_folder_is_of_one_job(tmp_path):
    out = tmp_path / "out"
    open_job(out, {"beam": 2, "input": [("a", 1)]})
    open_job(out, {"beam": 2, "input": [("a", 1)]})
    with pytest.raises(RequestError, match=r"output of another job \(beam differ\)"):
        open_job(out, {"beam": 3, "input": [("a", 1)]})
    for content in ("{", "[]", "3"):
        (out / "job.json").write_text(content)
        with pytest.raises(RequestError, match="cannot be read"):
            open_job(out, {"beam": 2})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    with pytest.raises(RequestError, match=r"has no job\.json"):
        open_job(tmp_path / "other", {})


def test_what_killed_workers_left_is_removed(tmp_path, blocks):
    out = tmp_path / "out"
    write_all(out, blocks)
    left = shard_path(out, 0, blocks[0]).parent / ".part-000000000001.jsonl.new-abc"
    left.write_text("half")
    assert missing_blocks(out, blocks) == []
    remove_unfinished(out)
    assert not left.exists()


def test_folders_stay_small(tmp_path, blocks):
    assert shard_path(tmp_path, PER_FOLDER - 1, blocks[0]).parent.name == "0000"
    assert shard_path(tmp_path, PER_FOLDER, blocks[0]).parent.name == "0001"

"""Blocks of a corpus: whatever the size of a block, its lines are those that one machine reads."""

from __future__ import annotations

import random

import pytest

from seq2engine.errors import RequestError
from seq2engine.runtime.cluster import corpus
from seq2engine.runtime.cluster.corpus import blocks_of, corpus_files, lines_of, row_group
from seq2engine.runtime.text.lines import lines_from_chunks

ODD = b"\xef\xbb\xbffirst\r\n\n\xe2\x80\xa8sep\nbad \xff byte\n\xef\xbb\xbfno mark here\nlast"


def seen(path, lines, column=None):
    return [
        (line.number, line.text, line.error) for block in blocks_of(path, lines, column) for line in lines_of(block)
    ]


def whole(data):
    return [(line.number, line.text, line.error) for line in lines_from_chunks([data])]


@pytest.mark.parametrize("data", [ODD, ODD + b"\n", b"", b"\n", b"\n\n", b"a", b"a\n" * 7], ids=range(7))
@pytest.mark.parametrize("lines", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("chunk", [1, 5, 1 << 20])
def test_blocks_hold_the_lines_of_the_file(tmp_path, monkeypatch, data, lines, chunk):
    monkeypatch.setattr(corpus, "CHUNK", chunk)
    path = tmp_path / "in.txt"
    path.write_bytes(data)
    assert seen(path, lines) == whole(data)
    blocks = blocks_of(path, lines)
    assert all(block.count == len(list(lines_of(block))) for block in blocks)
    assert all(block.count == lines for block in blocks[:-1])


def test_blocks_of_random_files(tmp_path, monkeypatch):
    rng = random.Random(3)
    for number in range(60):
        data = b"".join(rng.choice([b"a", b"bc\r\n", b"\n", b"\xc3\xa9", b"\xff"]) for _ in range(rng.randrange(60)))
        monkeypatch.setattr(corpus, "CHUNK", rng.randint(1, 9))
        path = tmp_path / f"{number}.txt"
        path.write_bytes(data)
        assert seen(path, rng.randint(1, 6)) == whole(data)


def test_files_of_a_folder_are_numbered_through(tmp_path):
    (tmp_path / "b.txt").write_text("three\nfour")
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "c.tsv").write_text("five\tx\n")
    (tmp_path / ".hidden").write_text("no\n")
    (tmp_path / "_SUCCESS").write_text("no\n")
    (tmp_path / "folder").mkdir()
    assert [(number, text) for number, text, _ in seen(tmp_path, 1)] == list(
        enumerate(("one", "two", "three", "four", "five"), start=1)
    )


def test_columns_of_tsv(tmp_path):
    path = tmp_path / "in.tsv"
    path.write_text("a\tb\n\nc\n")
    assert [text for _, text, _ in seen(path, 2)] == ["a", "", "c"]
    assert [(text, error) for _, text, error in seen(path, 2, "2")] == [
        ("b", None),
        ("", None),
        ("", "1 columns, expected at least 2"),
    ]
    plain = tmp_path / "in.txt"
    plain.write_text("a\tb\n")
    assert [text for _, text, _ in seen(plain, 2)] == ["a\tb"]
    assert [text for _, text, _ in seen(plain, 2, "2")] == ["b"]
    for column in ("0", "-1", "text"):
        with pytest.raises(RequestError, match="expected the number of a column"):
            blocks_of(path, 2, column)


def test_parquet(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="comes with the extra `cluster`")
    import pyarrow.parquet as parquet

    path = tmp_path / "in.parquet"
    texts = ["one", None, "drei\nzeilen", "vier", "fünf"]
    parquet.write_table(arrow.table({"id": list(range(5)), "source": texts}), path, row_group_size=3)
    for lines in (1, 2, 3, 10):
        assert seen(path, lines) == [(i, text or "", None) for i, text in enumerate(texts, start=1)]
    both = tmp_path / "both.parquet"
    parquet.write_table(arrow.table({"a": ["x"], "b": ["y"], "n": [1]}), both)
    assert [text for _, text, _ in seen(both, 1, "b")] == ["y"]
    for column in (None, "n", "nothing"):
        with pytest.raises(RequestError, match=r"name one with --column: a, b"):
            blocks_of(both, 1, column)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(RequestError, match="is no Parquet file"):
        blocks_of(tmp_path / "broken.parquet", 1)


def test_damaged_parquet_is_one_error(tmp_path):
    """Bytes changed one after the other: an error that names the file, or lines; never another exception."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    path = tmp_path / "in.parquet"
    parquet.write_table(arrow.table({"source": ["a", None, "c" * 40]}), path)
    content = path.read_bytes()
    refused: list[str] = []
    for place in range(0, len(content), 3):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
        row_group.cache_clear()
        try:
            for block in blocks_of(path, 2):
                list(lines_of(block))
        except RequestError as error:
            refused.append(str(error))
    assert len(refused) > 10
    assert all(str(path) in line and "\n" not in line for line in refused)


def test_rows_of_parquet_are_limited(tmp_path, monkeypatch):
    """Rows cost nothing in a file: 2^60 of them would be a list of blocks that fits into no memory."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    parquet.write_table(arrow.table({"source": ["a", "b"]}), tmp_path / "in.parquet")
    monkeypatch.setattr(corpus, "MOST_ROWS", 1)
    with pytest.raises(RequestError, match="2 rows in a row group, expected at most 1; write smaller"):
        blocks_of(tmp_path / "in.parquet", 1)


def test_what_is_no_corpus(tmp_path):
    with pytest.raises(RequestError, match="holds no files of lines"):
        corpus_files(tmp_path)
    with pytest.raises(RequestError, match="holds no files of lines"):
        corpus_files(tmp_path / "nowhere")


def test_a_file_that_became_shorter(tmp_path):
    path = tmp_path / "in.txt"
    path.write_text("one\ntwo\n")
    (block,) = blocks_of(path, 8)
    path.write_text("one\n")
    with pytest.raises(RequestError, match="became shorter while it was decoded"):
        list(lines_of(block))

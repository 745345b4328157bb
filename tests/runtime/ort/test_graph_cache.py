"""Graphs that are kept: found again for the same thing only, whatever happened to their files or their folder."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from seq2engine.export import forms
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.ort import graph_cache
from seq2engine.runtime.ort.graph_cache import GraphCache
from seq2engine.runtime.search.options import SearchOptions

GRAPH = b"a graph" * 100
ABOUT = {"graph": "decoder_step", "hash": "ab", "form": {"screened": True}}


class Maker:
    """Makes a graph, and counts how often."""

    def __init__(self, graph: bytes = GRAPH):
        self.graph, self.calls = graph, 0

    def __call__(self) -> bytes:
        self.calls += 1
        return self.graph


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_a_graph_is_made_once(tmp_path):
    make, cache = Maker(), GraphCache(tmp_path / "deep" / "er")
    assert [cache.graph(ABOUT, make) for _ in range(3)] == [GRAPH] * 3
    assert make.calls == 1


@pytest.mark.parametrize(("name", "value"), [("graph", "encoder"), ("hash", "cd"), ("form", {"screened": False})])
def test_another_graph_has_its_own_file(tmp_path, name, value):
    cache = GraphCache(tmp_path)
    cache.graph(ABOUT, Maker())
    assert cache.graph({**ABOUT, name: value}, Maker(b"another")) == b"another"
    assert cache.graph(ABOUT, Maker(b"")) == GRAPH


@pytest.mark.parametrize(
    ("name", "value"), [("libraries", lambda: {"onnxruntime": "9.9"}), ("code_of_forms", lambda: "changed")]
)
def test_other_libraries_and_other_code_make_it_anew(tmp_path, monkeypatch, name, value):
    cache = GraphCache(tmp_path)
    cache.graph(ABOUT, Maker())
    monkeypatch.setattr(graph_cache, name, value)
    assert cache.graph(ABOUT, Maker(b"new")) == b"new"


def damaged(path: Path, how: str) -> None:
    content = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "cut in its hash": content[:20],
            "cut": content[:-1],
            "longer": content + b"\0",
            "one bit": content[:-1] + bytes([content[-1] ^ 1]),
            "another graph": content[:32] + b"x" * len(GRAPH),
        }[how]
    )


@pytest.mark.parametrize("how", ["empty", "cut in its hash", "cut", "longer", "one bit", "another graph"])
def test_a_damaged_file_is_made_again_and_replaced(tmp_path, how):
    cache = GraphCache(tmp_path)
    cache.graph(ABOUT, Maker())
    damaged(only_file(tmp_path), how)
    make = Maker()
    assert [cache.graph(ABOUT, make) for _ in range(2)] == [GRAPH] * 2
    assert make.calls == 1


def test_the_file_of_another_key_is_not_taken(tmp_path):
    cache = GraphCache(tmp_path)
    cache.graph(ABOUT, Maker())
    first = only_file(tmp_path)
    cache.graph({**ABOUT, "hash": "cd"}, Maker(b"another"))
    (second,) = set(tmp_path.iterdir()) - {first}
    second.replace(first)
    make = Maker()
    assert cache.graph(ABOUT, make) == GRAPH
    assert make.calls == 1


@pytest.mark.parametrize("how", ["others may write", "link", "pipe", "folder"])
def test_what_others_may_have_put_there_is_not_taken(tmp_path, how):
    cache = GraphCache(tmp_path / "graphs")
    cache.graph(ABOUT, Maker())
    path = only_file(cache.folder)
    if how == "others may write":
        path.chmod(0o666)
    else:
        path.rename(tmp_path / "planted")
        {"link": lambda: path.symlink_to(tmp_path / "planted"), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[
            how
        ]()
    make = Maker()
    assert cache.graph(ABOUT, make) == GRAPH
    assert make.calls == 1


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path):
    (tmp_path / "file").write_text("no folder")
    make, cache = Maker(), GraphCache(tmp_path / "file" / "below")
    assert [cache.graph(ABOUT, make) for _ in range(2)] == [GRAPH] * 2
    assert make.calls == 2


def test_a_full_disk_keeps_nothing_and_leaves_nothing(tmp_path, monkeypatch):
    @contextmanager
    def full(path: Path) -> Iterator[Path]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield path

    monkeypatch.setattr(graph_cache, "new_file", full)
    cache = GraphCache(tmp_path)
    assert cache.graph(ABOUT, Maker()) == GRAPH
    assert not list(tmp_path.iterdir())


def test_the_graphs_that_were_not_used_for_longest_are_removed(tmp_path, monkeypatch):
    cache, paths = GraphCache(tmp_path), {}
    for number in range(4):
        before = set(tmp_path.iterdir())
        cache.graph({"graph": number}, Maker())
        (paths[number],) = set(tmp_path.iterdir()) - before
        os.utime(paths[number], (number, number))
    cache.graph({"graph": 0}, Maker(b""))  # used now
    monkeypatch.setattr(graph_cache, "MOST_BYTES", 3 * paths[0].stat().st_size)
    cache.graph({"graph": 4}, Maker())
    left = set(tmp_path.iterdir())
    assert len(left) == 3
    assert paths[0] in left
    assert paths[3] in left


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")
    return onnx_from_model(random_model(PRESETS["tiny"], seed=0), folder / "bundle", ("fp32", "w8a8"))


@pytest.mark.parametrize("precision", ["fp32", "w8a8"])
def test_the_second_session_makes_no_graph_and_decodes_the_same(bundle, precision, tmp_path, monkeypatch):
    def outputs() -> list[object]:
        with open_session(bundle, precision=precision, threads=1, cache=tmp_path) as session:
            return [generate(session, [[5, 6, 7], [8, 9]], SearchOptions(max_length=8, beam=beam)) for beam in (1, 3)]

    with open_session(bundle, precision=precision, threads=1) as session:
        plain = [generate(session, [[5, 6, 7], [8, 9]], SearchOptions(max_length=8, beam=beam)) for beam in (1, 3)]
    assert outputs() == plain
    monkeypatch.setattr(forms, "formed_graph", None)  # a call would raise
    assert outputs() == plain


LIGHT = """
import sys
from pathlib import Path
import seq2engine
from seq2engine.runtime.opening import open_session
bundle, precision, draft, cache = sys.argv[1:]
with open_session(bundle, precision=precision, threads=2, draft=draft or None, cache=Path(cache)) as session:
    seq2engine.generate(session, [[5, 6, 7]])
print(*sys.modules)
"""


@pytest.mark.parametrize(("precision", "draft"), [("fp32", ""), ("fp32", "auto"), ("w8a8", "")])
def test_a_session_of_kept_graphs_does_without_onnx(bundle, precision, draft, tmp_path):
    """It takes 40 ms and 11 MB to import."""
    found = []
    for _ in range(2):
        command = [sys.executable, "-c", LIGHT, str(bundle.root), precision, draft, str(tmp_path)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
        )
        found.append({"onnx", "google.protobuf"} & set(done.stdout.split()))
    assert found[0]
    assert not found[1]


def test_other_weights_have_other_graphs(bundle, tmp_path):
    other = onnx_from_model(random_model(PRESETS["tiny"], seed=1), tmp_path / "other", ("fp32",))
    for each in (bundle, other):
        open_session(each, precision="fp32", threads=1, cache=tmp_path / "kept").close()
    assert len(list((tmp_path / "kept" / "graphs").iterdir())) == 4


OPENS = """
import sys
from pathlib import Path
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.search.options import SearchOptions
with open_session(sys.argv[1], precision="fp32", threads=1, cache=Path(sys.argv[2])) as session:
    print(generate(session, [[5, 6, 7]], SearchOptions(max_length=8)))
"""


def test_processes_at_once_leave_whole_files(bundle, tmp_path):
    command = [sys.executable, "-c", OPENS, str(bundle.root), str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = {process.communicate()[0] for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(outputs) == 1
    assert {path.suffix for path in (tmp_path / "graphs").iterdir()} == {".onnx"}

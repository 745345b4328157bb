"""The engine cache alone: keys, entries that are sound or count as missing, room, and two processes at once."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import itertools
import os
import threading
import time

import pytest

from seq2engine.common.atomic_folders import sha256_of
from seq2engine.errors import BuildError
from seq2engine.export.artifact.build_flags import PLAIN, BuildFlags, bytes_from_text, text_of_bytes
from seq2engine.export.engines.cache import EngineCache, EngineFacts, engine_key

KEY, OTHER = "a" * 64, "b" * 64
SHAPES = {"tokens": ((1, 1), (2, 1), (4, 1))}


@pytest.fixture
def cache(tmp_path):
    return EngineCache(tmp_path / "cache")


@pytest.fixture
def engine(tmp_path):
    """A file of an engine, and its facts."""
    path = tmp_path / "built.engine"
    path.write_bytes(b"kernels" * 100)
    return path, EngineFacts(700, sha256_of(path), 1.5, 12345)


def test_an_engine_comes_back_as_it_was_kept(cache, engine, tmp_path):
    file, facts = engine
    assert cache.find(KEY, tmp_path / "copy") is None
    cache.keep(KEY, file, facts)
    assert cache.find(KEY, tmp_path / "copy") == facts
    assert (tmp_path / "copy").read_bytes() == file.read_bytes()
    assert cache.find(OTHER, tmp_path / "other") is None
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [("engine", b"kernels" * 99), ("engine", b"Kernels" * 100), ("facts.json", b"{"), ("facts.json", b"[1]")],
)
def test_a_damaged_entry_counts_as_missing_and_is_replaced(cache, engine, tmp_path, name, content):
    file, facts = engine
    cache.keep(KEY, file, facts)
    (cache.folder / KEY / name).write_bytes(content)
    assert cache.find(KEY, tmp_path / "copy") is None
    assert not (tmp_path / "copy").exists()
    cache.keep(KEY, file, facts)
    assert cache.find(KEY, tmp_path / "copy") == facts


def test_what_was_not_used_for_longest_makes_room(cache, engine, tmp_path):
    file, facts = engine
    cache.limit = 1500  # two engines
    for age, key in enumerate(("c" * 64, KEY, OTHER)):
        cache.keep(key, file, facts)
        os.utime(cache.folder / key / "facts.json", (age, age))
    assert sorted(path.name for path in cache.folder.iterdir()) == [KEY, OTHER]
    cache.find(KEY, tmp_path / "copy")  # now the most recently used
    cache.keep("d" * 64, file, facts)
    assert sorted(path.name for path in cache.folder.iterdir()) == [KEY, "d" * 64]
    cache.limit = 10  # too little for any: the newest stays all the same
    cache.keep("e" * 64, file, facts)
    assert [path.name for path in cache.folder.iterdir()] == ["e" * 64]


def test_leftovers_of_killed_builds_go_and_held_ones_stay(cache, engine):
    file, facts = engine
    cache.keep(KEY, file, facts)
    (cache.folder / f".{OTHER}.lock").touch()
    (cache.folder / f".{OTHER}.new-abc").mkdir()
    with cache.building("d" * 64, waiting=lambda: pytest.fail("nobody else is building")):
        cache.keep(KEY, file, facts)
        assert sorted(path.name for path in cache.folder.iterdir()) == [f".{'d' * 64}.lock", KEY]
    assert [path.name for path in cache.folder.iterdir()] == [KEY]


def test_a_second_build_of_a_key_waits_for_the_first(cache):
    order, inside = [], threading.Event()

    def second():
        inside.wait()
        with cache.building(KEY, waiting=lambda: order.append("waits")):
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with cache.building(KEY, waiting=lambda: pytest.fail("nobody else is building")):
        with cache.building(OTHER, waiting=lambda: pytest.fail("another key is free")):
            inside.set()
        while "waits" not in order:
            time.sleep(0.01)
        order.append("first")
    thread.join()
    assert order == ["waits", "first", "second"]
    assert list(cache.folder.iterdir()) == []


def test_an_interrupt_while_waiting_leaves_nothing_open(cache, monkeypatch):
    def flock(handle, how):
        raise BlockingIOError if how & fcntl.LOCK_NB else KeyboardInterrupt

    monkeypatch.setattr(fcntl, "flock", flock)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt), cache.building(KEY, waiting=lambda: None):
        pytest.fail("it is held by another")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_cache_that_cannot_be_written_costs_no_build(tmp_path, engine, caplog):
    file, facts = engine
    (tmp_path / "file").touch()
    cache = EngineCache(tmp_path / "file" / "cache")
    with cache.building(KEY, waiting=lambda: None):
        cache.keep(KEY, file, facts)
    assert cache.find(KEY, tmp_path / "copy") is None
    assert [record.getMessage().split(str(cache.folder))[0] for record in caplog.records] == [
        "the engine cache ",
        "the engine was built, but not kept in the cache ",
    ]
    assert os.strerror(errno.ENOTDIR) in caplog.text


def test_everything_that_decides_over_an_engine_is_in_its_key():
    base = {
        "model": b"graph",
        "weights_sha256": "ab",
        "flavour": "tensorrt_rtx",
        "version": "1.7.1",
        "device": "",
        "targets": ("sm86",),
        "profiles": (SHAPES,),
        "flags": PLAIN,
    }
    changes = [
        {},
        {"model": b"other graph"},
        {"weights_sha256": "cd"},
        {"flavour": "tensorrt"},
        {"version": "1.8.0"},
        {"device": "NVIDIA H100"},
        {"targets": ("sm86", "sm89")},
        {"profiles": (SHAPES, SHAPES)},
        {"profiles": ({"tokens": ((1, 1), (2, 1), (8, 1))},)},
        {"flags": BuildFlags(weight_streaming=True)},
        {"flags": BuildFlags(refit=True)},
        {"flags": BuildFlags(workspace=1)},
    ]
    keys = [engine_key(**{**base, **change}) for change in changes]
    assert all(one != other for one, other in itertools.combinations(keys, 2))
    assert engine_key(**base) == keys[0]
    assert {field.name for field in dataclasses.fields(BuildFlags)} == {"weight_streaming", "refit", "workspace"}
    twice = engine_key(**{**base, "targets": ("sm89", "sm86", "sm89")})
    assert twice == engine_key(**{**base, "targets": ("sm86", "sm89")})  # order and repetition change no engine


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("1000", 1000), ("512M", 512 << 20), ("2G", 2 << 30), ("3k", 3072)]
)
def test_sizes_are_read_and_written(text, size):
    assert bytes_from_text(text) == size
    assert bytes_from_text(text_of_bytes(size)) == size


@pytest.mark.parametrize("text", ["", "M", "-1", "1.5G", "2T", "٣M"])
def test_sizes_that_are_none(text):
    with pytest.raises(BuildError, match=r"is not a size; write bytes, or for example 512M or 2G"):
        bytes_from_text(text)


def test_flags_are_written_as_options():
    assert PLAIN.options() == []
    flags = BuildFlags(weight_streaming=True, refit=True, workspace=1 << 20)
    assert flags.options() == ["--weight-streaming", "--refit", "--workspace", "1M"]

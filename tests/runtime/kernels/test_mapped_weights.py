"""Weight files in memory: mapped once while they are in use, and only where that is safe."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest

from seq2engine.export.ort_form import FileWeight
from seq2engine.runtime.kernels.library import library
from seq2engine.runtime.kernels.mapped_weights import FILES, mapped

pytestmark = pytest.mark.skipif(library() is None, reason="the kernel library is not built here, or needs AVX2")
NUMBERS = np.arange(24, dtype=np.float32).reshape(4, 6)


def weight_at(offset: int, dims: tuple[int, ...] = (4, 6)) -> FileWeight:
    return FileWeight("w", "weights.bin", "float32", dims, offset)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "weights.bin"
    path.write_bytes(b"\0" * 64 + NUMBERS.tobytes())
    return path


def test_a_file_is_mapped_once_and_not_for_longer_than_it_is_used(path):
    first, second = mapped(path), mapped(path)
    assert first is second
    assert np.array_equal(first.array(weight_at(64)), NUMBERS)
    del first, second
    gc.collect()
    assert not any(key[0] == str(path.resolve()) for key in FILES)


def test_a_file_that_was_replaced_is_mapped_anew(path):
    before = mapped(path)
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[::-1])
    os.replace(other, path)
    assert mapped(path) is not before
    assert np.array_equal(before.array(weight_at(64)), NUMBERS), "whoever reads the old one goes on with it"


@pytest.mark.parametrize(("offset", "dims"), [(68, (4, 6)), (64, (5, 6)), (66, (4, 6)), (-64, (4, 6))])
def test_a_tensor_that_is_not_in_the_file_is_not_read(path, offset, dims):
    assert mapped(path).array(weight_at(offset, dims)) is None


@pytest.mark.parametrize("kind", ["missing", "empty", "pipe", "folder"])
def test_what_is_no_file_is_not_mapped(tmp_path, kind):
    path = tmp_path / kind
    {"missing": str, "empty": lambda path: path.touch(), "pipe": os.mkfifo, "folder": os.mkdir}[kind](path)
    assert mapped(path) is None

"""Rows that move inside device memory: the result is that of numpy's indexing."""

from __future__ import annotations

import ctypes

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.host_device import HostDevice

from seq2engine.export.artifact.passport import EngineTensor
from seq2engine.runtime.trt.memory import Slab, room_for_moves
from seq2engine.runtime.trt.moves import SPARE, gather_rows, put_rows, row_moves, set_length

MOST = [{"B": 6, "S": 5, "M": 1, "L": 1}]
TENSORS = [EngineTensor(name, "float32", ("B", 2, "S", 3)) for name in ("a", "b", "c")]


def slab_with(device: HostDevice, shape: tuple[int, ...], seed: int) -> tuple[Slab, list[np.ndarray]]:
    slab, rng = Slab(device, TENSORS, MOST), np.random.default_rng(seed)
    values = [rng.random(shape, dtype=np.float32) for _ in TENSORS]
    for tensor, value in zip(TENSORS, values, strict=True):
        view(slab, tensor.name, shape)[...] = value
    return slab, values


def view(slab: Slab, name: str, shape: tuple[int, ...]) -> np.ndarray:
    array = slab.array(name, shape)
    return np.frombuffer((ctypes.c_uint8 * array.bytes).from_address(array.address), np.float32).reshape(shape)


@given(st.lists(st.integers(0, 7), max_size=8))
def test_moves_one_after_the_other_do_what_they_would_at_once(rows: list[int]) -> None:
    places = {row: row for row in range(-1, 8)}
    for to, source in row_moves(rows):
        assert to != source
        places[to] = places[source]
    assert [places[row] for row in range(len(rows))] == rows
    assert all(places[row] == row for row in range(len(rows), 8))


def test_rows_in_circles_take_one_copy_more() -> None:
    assert sum(to == SPARE for to, _ in row_moves([1, 0, 3, 4, 2, 5])) == 2
    assert list(row_moves([0, 1, 2])) == []
    assert list(row_moves([1, 3])) == [(0, 1), (1, 3)]


@given(st.integers(1, 6), st.lists(st.integers(0, 5), max_size=6), st.integers(0, 99))
def test_gathered_rows(batch: int, rows: list[int], seed: int) -> None:
    device, shape = HostDevice(), (batch, 2, 4, 3)
    rows = [row % batch for row in rows]
    slab, values = slab_with(device, shape, seed)
    spare = device.allocate(room_for_moves(TENSORS, MOST))
    gather_rows(device, slab, shape, rows, spare)
    device.synchronize()
    for tensor, value in zip(TENSORS, values, strict=True):
        np.testing.assert_array_equal(view(slab, tensor.name, (len(rows), 2, 4, 3)), value[rows])


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.permutations(range(4)), st.integers(0, 4))
def test_rows_that_others_take(length: int, theirs: int, width: int, order: list[int], count: int) -> None:
    width, rows = max(theirs, width), order[:count]
    device, shape, coming_shape = HostDevice(), (4, 2, length, 3), (count or 1, 2, theirs, 3)
    slab, values = slab_with(device, shape, 1)
    coming, new = slab_with(device, coming_shape, 2)
    spare = device.allocate(room_for_moves(TENSORS, MOST))
    after = set_length(device, slab, shape, width, spare)
    put_rows(device, slab, after, rows, coming, coming_shape)
    device.synchronize()
    for number, tensor in enumerate(TENSORS):
        expected = np.zeros(after, dtype=np.float32)
        kept = min(length, width)
        expected[:, :, :kept] = values[number][:, :, :kept]
        expected[rows] = 0
        expected[rows, :, :theirs] = new[number][: len(rows)]
        np.testing.assert_array_equal(view(slab, tensor.name, after), expected)

"""What a large batch needed goes back with the next one; workers share what they can; arrays are as numpy's."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.ort import encoder, memory
from seq2engine.runtime.ort.memory import LARGE, OWN_PAGES, HeldMemory, Pages, finite, resized, rows_of
from seq2engine.runtime.ort.session import OrtSession
from seq2engine.runtime.parallel import workers_for
from seq2engine.runtime.search.options import SearchOptions

VOCAB, SOURCES, BEAM = 40_000, 64, 4
WIDE = dataclasses.replace(
    PRESETS["tiny"],
    encoder_layers=1,
    decoder_layers=1,
    d_model=16,
    heads=2,
    d_ff=16,
    source_vocab=64,
    target_vocab=VOCAB,
    share_embeddings=False,
)
DECODES = """
import sys
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.parallel import workers_for
from seq2engine.runtime.search.options import SearchOptions

def resident():
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon:")).split()[1]) * 1024

beam, sources = int(sys.argv[2]), int(sys.argv[3])
options = SearchOptions(max_length=4, beam=beam)
with open_session(sys.argv[1], threads=2) as session:
    assert len(workers_for(session, sources, sources * beam)) == 2
    on_step = {"workers": None, "alone": lambda emitted: None}[sys.argv[4]]  # who watches the steps gets one decode
    held = []
    for count in (1, sources, 1):
        generate(session, [[5, 6, 7]] * count, options, on_step)
        held.append(resident())
print(held[2] - held[0])
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory") / "bundle"
    return onnx_from_model(random_model(WIDE, seed=0), folder, ("fp32", "w8a8"))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked")
@pytest.mark.parametrize("how", ["workers", "alone"])
def test_what_a_large_batch_needed_goes_back_with_the_next(bundle, how):
    command = [sys.executable, "-c", DECODES, str(bundle.root), str(BEAM), str(SOURCES), how]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    logits = SOURCES * BEAM * VOCAB * 4
    assert int(done.stdout) < logits / 2, "a step has several tensors of the size of its logits"


@pytest.mark.parametrize("precision", ["fp32", "w8a8"])
def test_workers_have_graphs_of_their_own_where_kernels_share_the_weights(bundle, precision):
    with open_session(bundle, precision=precision, threads=2) as session:
        worker = workers_for(session, SOURCES, SOURCES * BEAM)[0]
        assert worker.encoder is not session.encoder
        assert worker.encoder.lock is None
        assert worker.decoders.whole.session is not session.decoders.whole.session


@pytest.mark.parametrize("precision", ["fp32", "w8a8"])
def test_workers_have_a_decoder_of_their_own_and_in_int8_an_encoder(bundle, precision, without_kernels):
    with open_session(bundle, precision=precision, threads=2) as session:
        worker = workers_for(session, SOURCES, SOURCES * BEAM)[0]
        assert (worker.encoder is session.encoder) is (precision == "fp32")
        assert (worker.encoder.lock is None) is (precision == "w8a8")
        assert worker.decoders.whole.session is not session.decoders.whole.session


TIED = dataclasses.replace(WIDE, d_model=256, d_ff=64, source_vocab=VOCAB, share_embeddings=True, tie_output=True)
OPENS = """
import sys
from pathlib import Path
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.ort import encoder
from seq2engine.runtime.ort.memory import trim
from seq2engine.runtime.search.options import SearchOptions

def resident():
    trim()
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon:")).split()[1]) * 1024

kept = Path(sys.argv[3])
with open_session(sys.argv[2], threads=1, cache=kept) as session:  # libraries are in memory from here on
    generate(session, [[5, 6, 7]], SearchOptions(max_length=4))
before, found = resident(), []
with open_session(sys.argv[1], threads=1, cache=kept) as session:
    for beam in map(int, sys.argv[4:]):
        generate(session, [[5, 6, 7]], SearchOptions(max_length=4, beam=beam, scores=False))
        found.append(resident() - before)
print(*found)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked")
@pytest.mark.parametrize(
    ("beams", "tables"),
    [
        ([1], [0.75]),  # greedy search reads rows of the table where they are stored, and a quarter of it in int8
        ([2], [1.75]),  # beam search reads a packed copy
        ([1, 2, 1], [0.75, 2.0, 2.0]),  # both, and what is left of the first step; one more copy would make it 2.25
    ],
)
def test_no_table_is_held_twice(beams, tables, tmp_path):
    """The vocabulary is nearly all of the model: 40,000 x 256 numbers, for source, target and output alike."""
    large = onnx_from_model(random_model(TIED, seed=0), tmp_path / "large", ("fp32",))
    tiny = dataclasses.replace(TIED, source_vocab=64, target_vocab=64)
    small = onnx_from_model(random_model(tiny, seed=0), tmp_path / "small", ("fp32",))
    command = [sys.executable, "-c", OPENS, large.root, small.root, tmp_path / "kept", *map(str, beams)]
    for _ in range(2):  # what making graphs takes is not counted
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    table = VOCAB * TIED.d_model * 4
    held = [int(number) / table for number in done.stdout.split()]
    assert all(each < most for each, most in zip(held, tables, strict=True)), held


@pytest.mark.slow
@pytest.mark.usefixtures("without_kernels")
def test_a_session_opens_the_step_that_is_asked_for(tmp_path):
    bundle = onnx_from_model(random_model(TIED, seed=0), tmp_path / "bundle", ("fp32", "w8a8"))

    def forms(precision: str, *beams: int) -> list[tuple[bool, bool]]:
        with open_session(bundle, precision=precision, threads=1) as session:
            decoders, found = session.decoders, []
            for beam in beams:
                generate(session, [[5, 6, 7]], SearchOptions(max_length=3, beam=beam, scores=False))
                found.append((decoders.first.form.screened, decoders.first.form.complete))
            return found

    assert forms("fp32", 1, 1) == [(True, False), (True, False)]
    assert forms("fp32", 1, 2, 1) == [(True, False), (True, True), (True, True)]
    assert forms("w8a8", 1, 2) == [(True, True), (True, True)], "one graph does both"


def test_memory_is_given_back_before_batches_unlike_those_before():
    held = HeldMemory()
    assert [held.fits(sources, 100) for sources in (32, 32, 4, 32)] == [False, True, True, True]
    assert [held.fits(sources, 100) for sources in (3, 3, 4, 4)] == [False, True, False, True]
    assert [held.fits(4, numbers) for numbers in (50, LARGE, 1)] == [True, True, True]  # how long they are is no matter
    assert [held.fits(4, numbers) for numbers in (LARGE + 1, LARGE + 1, 1, 1)] == [False, False, False, True]
    assert [held.fits(4, LARGE + 1, most) for most in (LARGE + 1, LARGE)] == [True, False]
    held.forget()
    assert not held.fits(4, 60)


def test_sources_of_other_lengths_take_the_memory_of_those_before(bundle, monkeypatch):
    """Pages that the system has to clear again took a third of a step that verifies drafts."""
    returned = []
    monkeypatch.setattr(encoder, "trim", lambda: returned.append(True))
    with OrtSession.from_bundle(bundle, "fp32", 1) as session:
        for length in (5, 20, 3, 12, 24):
            generate(session, [[3] * length], SearchOptions(max_length=3))
    assert returned == [True]  # after opening


@pytest.fixture
def pages(monkeypatch):
    """No pages of earlier batches."""
    monkeypatch.setattr(memory, "PAGES", Pages())
    return memory.PAGES


def place_of(array):
    return array.__array_interface__["data"][0]


def test_pages_are_those_of_an_array_that_is_gone(pages):
    first, other = finite((4, OWN_PAGES), "float32"), finite((4, OWN_PAGES), "float32")
    first[...] = 3
    place, view = place_of(first), first[1:, 5:]
    assert place_of(other) != place
    del first
    assert place_of(finite((4, OWN_PAGES), "float32")) != place, "a view is left"
    del view
    again = finite((2, OWN_PAGES), "float32")
    assert place_of(again) == place
    assert again.shape == (2, OWN_PAGES)
    assert (again == 3).all(), "nothing was cleared"
    assert np.isfinite(finite((4, OWN_PAGES), "float16")).all(), "pages of another type may hold anything"


def test_pages_that_are_too_large_or_too_small_are_not_taken(pages):
    kept = [place_of(finite((count, OWN_PAGES), "int8")) for count in (8,)]
    assert place_of(finite((1, OWN_PAGES), "int8")) not in kept, "8 times as many as it needs"
    assert len(pages.blocks) == 2
    small = finite((2, OWN_PAGES), "int8")
    assert place_of(small) not in kept or len(small) == 2
    del small
    finite((64, OWN_PAGES), "int8")
    sizes = sorted(len(block) // OWN_PAGES for _, block in pages.blocks)
    assert sizes[-1] == 64
    assert len(sizes) == 2, "in the place of a smaller one"


def test_an_array_that_has_grown_keeps_its_pages(pages):
    array = finite((2, OWN_PAGES), "float32", over_allocation=4)
    place, array = place_of(array), resized(array, (6, OWN_PAGES))
    assert place_of(finite((2, OWN_PAGES), "float32", over_allocation=4)) != place
    del array
    assert place_of(finite((2, OWN_PAGES), "float32", over_allocation=4)) == place


def test_pages_go_back_with_a_batch_of_far_fewer_sources(pages):
    held, in_use = HeldMemory(), finite((2, OWN_PAGES), "float32")
    held.fits(32, 10 * LARGE)
    for sources, kept in ((32, 2), (20, 2), (33, 2), (8, 2), (4, 1), (4, 2), (32, 2), (3, 1)):
        finite((2, OWN_PAGES), "float32")
        assert len(pages.blocks) == 2
        held.fits(sources, 10 * LARGE)
        assert len(pages.blocks) == kept, sources
        assert in_use.size


def test_an_array_with_room_grows_where_it_is(pages):
    array = finite((2, OWN_PAGES), "float32", over_allocation=3)
    array[...] = 5
    larger = resized(array, (3, 2, OWN_PAGES))
    assert np.shares_memory(array, larger)
    assert larger.reshape(6, -1)[:2].min() == 5
    assert not larger.reshape(6, -1)[2:].any()
    assert resized(larger, (7, OWN_PAGES)) is None, "no more room"
    assert resized(np.zeros(4), (2,)) is None, "not ours"


@pytest.mark.parametrize("rows", [[0, 1, 3, 5], [1, 2, 3], [5], [3, 1, 0, 2], [0, 0, 1, 2], [0, 5, 2, 4], [4, 0, 5, 2]])
@pytest.mark.parametrize("size", [4, OWN_PAGES])
def test_rows_are_those_of_numpy(rows, size):
    array = finite((6, size), "int32")
    array[...] = np.arange(6)[:, None]
    wanted = array[rows]
    kept = rows_of(array, np.array(rows))
    assert np.array_equal(kept, wanted)
    in_place = size == OWN_PAGES and rows in ([0, 1, 3, 5], [1, 2, 3], [0, 5, 2, 4])
    assert np.shares_memory(kept, array) is in_place


@pytest.mark.parametrize("size", [3, OWN_PAGES])
def test_arrays_are_zeros_at_first(pages, size):
    array = finite((2, size), "int64")
    assert array.shape == (2, size)
    assert array.dtype == np.int64
    assert array.flags.c_contiguous
    assert not array.any()
    array[1, -1] = 7
    assert array.sum() == 7


def test_a_batch_that_grows_has_room_to_grow_again(pages):
    """Its first growth copies it, the next ones leave all rows where they are."""
    array = finite((2, OWN_PAGES), "float32")
    array[:] = [[1.0], [2.0]]
    grown = rows_of(array, np.array([0, 1, 0]))
    assert not np.shares_memory(grown, array)
    again = rows_of(grown, np.array([0, 1, 2, 0]))
    assert np.shares_memory(again, grown)
    assert again[:, 0].tolist() == [1.0, 2.0, 1.0, 1.0]
    assert rows_of(np.arange(2), np.array([0, 1, 1])).tolist() == [0, 1, 1]

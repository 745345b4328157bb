"""Parallel decodes: the same outputs, in the same order, on any worker; errors that name the right source."""

from __future__ import annotations

import gc
import itertools
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.workers import FEW_ROWS, workers_for_few_rows

from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.runtime import generate as generating
from seq2engine.runtime.generate import generate
from seq2engine.runtime.machine_speed import rows_of_worker
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.ort import session as ort_session
from seq2engine.runtime.ort.graphs import model_from_bundle
from seq2engine.runtime.ort.session import OrtSession, OrtSettings
from seq2engine.runtime.parallel import balanced_parts, in_parallel, part_cost, workers_for
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step_output import NotFiniteError, StepOutput
from seq2engine.runtime.threads import (
    Workers,
)
from seq2engine.runtime.torch_session import TorchSession

MODEL = random_model("tiny", seed=5)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return onnx_from_model(MODEL, tmp_path_factory.mktemp("parallel") / "bundle", ("fp32", "w8a8"))


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch):
    """The model of these tests is far too small for workers."""
    workers_for_few_rows(monkeypatch)


def sources_of(count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 256, rng.integers(1, 30)).tolist() for _ in range(count)]


def tokens_of(found):
    return [[h.tokens for h in row] for row in found]


@pytest.mark.each_value
@pytest.mark.parametrize("shortlist", [None, tuple(range(3, 200, 3))])
@pytest.mark.parametrize("beam", [1, 4])
def test_outputs_are_those_of_one_decode(bundle, shortlist, beam):
    sources = sources_of(70)
    options = SearchOptions(max_length=12, beam=beam, nbest=beam, shortlist=shortlist)
    with open_session(bundle, threads=2) as several, open_session(bundle, threads=1) as alone:
        assert len(workers_for(several, len(sources), len(sources) * beam)) == 2
        assert tokens_of(generate(several, sources, options)) == tokens_of(generate(alone, sources, options))


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(1, 5), st.integers(1, 4))
def test_the_dearest_part_is_as_cheap_as_possible(lengths, width, count):
    parts = balanced_parts(lengths, width, count)
    assert sorted(number for part in parts for number in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in parts)
    assert 1 <= len(parts) <= count
    ordered = sorted(lengths, reverse=True)

    def dearest(cuts):
        edges = [0, *cuts, len(ordered)]
        return max(part_cost(ordered[first:end], width) for first, end in itertools.pairwise(edges) if first < end)

    places = range(len(ordered) + 1)
    least = min(dearest(cuts) for cuts in itertools.combinations_with_replacement(places, count - 1))
    found = [part_cost(sorted((lengths[number] for number in part), reverse=True), width) for part in parts]
    assert max(found) == least


def test_a_worker_has_few_long_sources_or_many_short_ones():
    assert balanced_parts([5, 40, 6, 7, 5, 5, 8, 5], width=4, count=2) == [[1], [0, 2, 3, 4, 5, 6, 7]]
    assert [len(part) for part in balanced_parts([9] * 8, width=4, count=2)] == [4, 4]
    assert balanced_parts([9, 3, 5], width=1, count=1) == [[0, 1, 2]]


@pytest.mark.parametrize("beam", [1, 4])
def test_int8_outputs_are_those_of_decodes_of_the_same_parts(bundle, beam, monkeypatch):
    """Kernels for other numbers of rows may round last bits otherwise, and an int8 step can hang on a last bit: so each
    part is decoded alone, not all sources in one batch."""
    sources, parts = sources_of(70), []
    options = SearchOptions(max_length=12, beam=beam, nbest=beam)

    def seen(*given):
        found = in_parallel(*given)
        parts.extend(numbers for numbers, _ in found)
        return found

    with (
        open_session(bundle, precision="w8a8", threads=2) as several,
        open_session(bundle, precision="w8a8", threads=1) as alone,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(generating, "in_parallel", seen)
            found = generate(several, sources, options)
        assert len(parts) == 2
        assert sorted(parts[0] + parts[1]) == list(range(70))
        for part in parts:
            expected = generate(alone, [sources[number] for number in part], options)
            assert tokens_of(found[number] for number in part) == tokens_of(expected)


def test_a_batch_is_judged_by_tokens_read_and_written(bundle):
    """Outputs of equal sources may differ in length, and each token takes a step."""
    noted = []
    with open_session(bundle, precision="w8a8", threads=2) as session:
        session.workers.note = lambda rows, alone, seconds, tokens, switches: noted.append((rows, tokens))
        for length in (3, 9):
            generate(session, [[5, 6, 7], [8, 9]], SearchOptions(max_length=length, min_length=length))
    assert noted == [(2, 5 + 2 * 3), (2, 5 + 2 * 9)]


def test_prefixes_go_with_their_sources(bundle):
    sources = sources_of(66)
    prefixes = [[3 + number] if number % 3 else [] for number in range(66)]
    with open_session(bundle, threads=2) as session:
        found = generate(session, sources, SearchOptions(max_length=6), prefixes=prefixes)
    assert all(nbest[0].tokens[: len(prefix)] == tuple(prefix) for nbest, prefix in zip(found, prefixes, strict=True))


def test_who_gets_workers(bundle):
    enough = 2 * FEW_ROWS["fp32"]
    with open_session(bundle, threads=2) as session:
        assert workers_for(session, enough, enough - 1) == (session,)
        assert workers_for(session, 1, enough) == (session,)  # one source cannot be dealt out
        workers = workers_for(session, 2, enough)
        assert [worker.threads for worker in workers] == [1, 1]
        assert workers[0] is workers[1], "weights are there once for all workers"
    with open_session(bundle, precision="w8a8", threads=2) as session:
        assert len(workers_for(session, 4, 2 * FEW_ROWS["w8a8"])) == 2
    with open_session(bundle, threads=1) as session:
        assert workers_for(session, enough, enough) == (session,)
    with open_session(bundle, threads=2, deterministic=True) as session:
        assert workers_for(session, enough, enough) == (session,)
    with open_session(bundle, "torch") as session:
        assert workers_for(session, enough, enough) == (session,)


def test_a_small_model_has_workers_only_for_many_rows(bundle, monkeypatch):
    """Two loops in Python hold each other up where the graph is quick."""
    monkeypatch.undo()
    with open_session(bundle, precision="w8a8", threads=2) as session:
        rows = 2 * rows_of_worker(session.config, 2, "w8a8", kernels=session.form.kernels)
        assert rows > 1000
        assert workers_for(session, 64, rows - 1) == (session,)
        assert len(workers_for(session, 64, rows)) == 2


def test_sessions_have_the_threads_that_suit_their_model_or_those_asked_for(monkeypatch, bundle):
    monkeypatch.undo()
    monkeypatch.setattr(ort_session, "sensible_threads", lambda config: 3)
    monkeypatch.setattr(ort_session, "rows_of_threads", lambda config, threads, precision, kernels: 8)
    sources, options = [[5, 6, 7, 2]] * 4, SearchOptions(max_length=6)
    with open_session(bundle) as session:
        assert session.threads == 3
        (worker,) = workers_for(session, 4, 4)
        assert worker.threads == 1
        assert workers_for(session, 8, 8) == (session,)
        found = generate(session, sources, options)
    with open_session(bundle, threads=5) as session:
        assert session.threads == 5
        assert workers_for(session, 4, 4) == (session,)
        assert generate(session, sources, options) == found


class ThreeWorkers(TorchSession):
    """Runs in three threads, and goes wrong on sources that begin with 13."""

    def __init__(self):
        super().__init__(random_model("tiny", seed=5))
        self.workers = Workers(3, lambda: 1, lambda: self)

    def encode(self, source_ids, source_mask):
        state = super().encode(source_ids, source_mask)
        state["wrong"] = torch.from_numpy(source_ids[:, 0] == 13)
        return state

    def step(self, state, *given):
        logits = super().step(state, *given).logits
        logits[state["wrong"].numpy()] = np.nan
        return StepOutput(logits)


def test_an_error_names_the_source_by_its_number_in_the_request():
    sources = sources_of(11)
    sources[7] = [13, 5, 6]
    with ThreeWorkers() as session, pytest.raises(NotFiniteError, match=r"source 7: the model's logits are not finite"):
        generate(session, sources, SearchOptions(max_length=4))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 5))
def test_every_source_is_dealt_out_once(lengths, count):
    class Dealt:
        workers = Workers(min(count, len(lengths)), lambda: 3 * len(lengths), object)

    found = in_parallel(Dealt(), [[0] * length for length in lengths], 3, lambda worker, part: list(part), len)
    assert sorted(number for part, _ in found for number in part) == list(range(len(lengths)))
    assert all(part == got for part, got in found)
    assert len(found) <= count


def test_the_session_of_workers_goes_with_its_owner(bundle):
    session = open_session(bundle, threads=2)
    (worker, _) = workers_for(session, 64, 64)
    assert isinstance(worker, OrtSession)
    session.close()
    assert session.workers is None


@pytest.mark.parametrize("precision", ["fp32", "w8a8"])
def test_a_session_that_is_dropped_is_freed_at_once(bundle, precision):
    """Graphs are large: they must not wait for the garbage collector."""
    session = open_session(bundle, precision=precision, threads=2)
    generate(session, sources_of(70), SearchOptions(max_length=4))
    kept = weakref.ref(session.decoders)
    gc.disable()
    try:
        del session
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kernels", [True, False])
def test_only_sessions_of_two_threads_that_have_a_cheap_worker_follow_the_machine(bundle, kernels):
    """One whose weights the other session has packed already, or that is small."""
    for precision, threads, follows in (("w8a8", 2, True), ("fp32", 2, kernels), ("w8a8", 3, False)):
        model = model_from_bundle(bundle, precision)
        with OrtSession(model, OrtSettings(threads=threads, kernels=kernels)) as session:
            assert session.workers.follows == follows


def test_a_batch_that_one_thread_decodes_has_the_same_output(bundle, monkeypatch):
    monkeypatch.undo()
    sources, options = [[5, 6, 7 + number % 3, 2] for number in range(8)], SearchOptions(max_length=6, beam=2)
    with open_session(bundle, precision="w8a8", threads=2) as session:
        together = generate(session, sources, options)
        choice = session.workers.choice(16)
        choice.chosen, choice.trying = True, False
        (worker,) = workers_for(session, 8, 16)
        assert worker is not session
        assert worker.threads == 1
        assert generate(session, sources, options) == together
        assert workers_for(session, 2, 4) == (session,)  # few rows

"""Parallel decodes: the same outputs, in the same order, on any worker; errors that name the right source."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.workers import FEW_ROWS, workers_for_few_rows

from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime import generate as generating
from seq2engine.runtime import threads as threads_module
from seq2engine.runtime.generate import generate
from seq2engine.runtime.machine_speed import WHOLE_ROWS, rows_of_worker
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.ort import session as ort_session
from seq2engine.runtime.ort.graphs import model_from_bundle
from seq2engine.runtime.ort.session import OrtSession, OrtSettings
from seq2engine.runtime.parallel import balanced_parts, in_parallel, part_cost, workers_for
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step_output import NotFiniteError, StepOutput
from seq2engine.runtime.threads import (
    EVIDENCE,
    FUSED_ROWS,
    MANY_ROWS,
    MOST_ROWS,
    RARELY,
    SHARED,
    TRIAL,
    EncoderLock,
    MachineSpeed,
    OneThread,
    Workers,
    derived_speed,
    is_small,
    row_work,
    rows_for_threads,
    rows_per_worker,
    step_seconds,
    threads_for,
    usable_cores,
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


def test_a_worker_pays_where_multiplying_outweighs_reading_all_weights():
    """Of a large model; twice as fast a memory halves the rows, and further workers that share it need more each."""
    base, memory, products = PRESETS["base"], 50e9, 50e9

    def rows(threads=2, size=1, memory=memory, products=products, fused=False):
        speed = MachineSpeed(
            threads, (memory / 2, memory), (1e12, 1e12), (products, products * threads), *[(16e-6, 9e-6)] * 2
        )
        return rows_per_worker(base, threads, speed, size, fused)

    assert rows() == 8  # 2 readers, of twice the int8 products for each byte, times 2
    assert rows(size=4) == 16
    assert rows(memory=2 * memory) == 4
    assert rows(threads=8) == 4 * rows()
    assert rows(memory=memory / 3) == rows()  # attention and logits are more than the rest of a row
    assert rows(memory=memory / 3, size=4) == 3 * rows(size=4)
    assert rows(fused=True) == FUSED_ROWS  # threads that share fused operators hardly wait for each other
    assert rows(size=4, fused=True) == rows(size=4)
    assert rows_of_worker(base, 2, "fp32") >= WHOLE_ROWS


def test_row_work_is_the_weights_of_all_products():
    model = random_model("tiny", seed=5)
    inside = [
        parameter.numel()
        for name, parameter in model.decoder.named_parameters()
        if name.endswith("weight") and parameter.dim() == 2 and "cross_attn.kv." not in name
    ]
    assert row_work(model.config) == sum(inside) + model.output.weight.numel()


@pytest.mark.parametrize(
    ("limits", "cores"),
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("50000 100000", 1),
        ("6400000 100000", 8),
        ("", 8),
    ],
)
def test_cores_are_those_that_the_container_may_use(tmp_path, monkeypatch, limits, cores):
    limit = tmp_path / "cpu.max"
    limit.write_text(limits)
    monkeypatch.setattr(threads_module, "CGROUP_LIMIT", limit)
    monkeypatch.setattr(threads_module.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert usable_cores() == cores
    limit.unlink()
    assert usable_cores() == 8


TWO = MachineSpeed(
    2, memory=(30e9, 48e9), cached=(64e9, 100e9), products=(54e9, 108e9), chained=(16e-6, 10e-6), fused=(15e-6, 7.7e-6)
)


def test_a_step_reads_its_weights_or_multiplies_by_them_and_its_threads_meet():
    base = PRESETS["base"]
    weights, meetings = row_work(base), SHARED * base.decoder_layers + 1
    assert step_seconds(base, 1, 1, TWO) == 4 * weights / 30e9
    assert step_seconds(base, 1, 2, TWO) == 4 * weights / 48e9 + meetings * TWO.region()
    assert step_seconds(base, 1, 1, TWO, size=1) == weights / 30e9
    assert step_seconds(base, 64, 1, TWO) == 64 * weights / 54e9
    assert step_seconds(base, 64, 2, TWO) == 64 * weights / 108e9 + meetings * TWO.region()
    assert TWO.region() == pytest.approx(2e-6)
    tiny = PRESETS["tiny"]
    assert step_seconds(tiny, 1, 1, TWO) == 4 * row_work(tiny) / 64e9  # it stays in the caches


@pytest.mark.parametrize("cores", [1, 2, 3, 4, 6, 8, 16, 32, 64])
def test_large_models_have_many_threads_and_small_ones_few(cores):
    speed = derived_speed(cores)
    assert threads_for(PRESETS["tiny"], speed) == min(2, cores)
    assert min(cores, 32) <= threads_for(PRESETS["base"], speed) <= cores


def test_few_rows_of_a_small_model_have_one_thread():
    assert not is_small(PRESETS["base"])
    assert is_small(PRESETS["tiny"])
    few, more = (rows_for_threads(PRESETS["tiny"], 2, TWO, size) for size in (4, 1))
    assert MANY_ROWS < few < more
    assert rows_for_threads(PRESETS["tiny"], 2, TWO, 4, fused=True) < few, "in a program threads meet sooner"
    quick_to_meet = dataclasses.replace(TWO, chained=(16e-6, 8.1e-6))
    few, more = (rows_for_threads(PRESETS["tiny"], 2, quick_to_meet, size) for size in (4, 1))
    assert 1 < few < more < MANY_ROWS
    never = dataclasses.replace(TWO, chained=(16e-6, 1.0))
    assert rows_for_threads(PRESETS["tiny"], 2, never, 4) == MOST_ROWS


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


def test_no_worker_goes_on_while_another_waits_for_the_encoder():
    lock, order = EncoderLock(), []

    def worker(name, fails=False):
        try:
            with lock.held():
                while not order and lock.waiting < 3:  # the first one, until all three want it
                    time.sleep(0.001)
                order.append("in")
                if fails:
                    raise ValueError(name)
        except ValueError:
            pass
        order.append("on")

    workers = [threading.Thread(target=worker, args=(name, name == 1)) for name in range(3)]
    for each in workers:
        each.start()
    for each in workers:
        each.join(timeout=600)
    assert order == ["in"] * 3 + ["on"] * 3


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


def begun():
    """The choice of a session whose first batch, which does not count, is done."""
    choice = OneThread()
    choice.note(False, 9.0, 1, 10**6)
    assert not choice.next()
    return choice


def decoded(choice, count, all_threads, one_thread, switches=10**6):
    """Batches that take so many seconds each way; how many of them one thread decoded."""
    alone = 0
    for _ in range(count):
        way = choice.next()
        alone += way
        choice.note(way, one_thread if way else all_threads, 1, switches)
    return alone


def test_one_thread_decodes_where_it_is_faster_and_all_threads_are_tried_again():
    choice = begun()
    assert decoded(choice, 1 + TRIAL, 2.0, 1.0) == TRIAL  # the first batch shows that the cores are shared
    assert decoded(choice, TRIAL, 2.0, 1.0) == 0  # and once more with all threads
    assert choice.chosen
    again = round(RARELY * TRIAL * 1.0)
    assert decoded(choice, again, 2.0, 1.0) == again
    assert decoded(choice, TRIAL, 0.5, 1.0) == 0  # a trial of all threads: the neighbour has left
    assert decoded(choice, TRIAL, 0.5, 1.0) == TRIAL
    assert not choice.chosen


def test_the_first_batches_after_a_rest_do_not_speak_for_the_other_way():
    choice = begun()
    assert decoded(choice, 1, 2.0, 1.0) == 0
    assert decoded(choice, TRIAL, 0.5, 1.0) == TRIAL
    assert decoded(choice, TRIAL, 0.5, 1.0) == 0
    assert not choice.chosen


def test_all_threads_stay_where_one_is_not_surely_faster():
    choice = begun()
    assert decoded(choice, 1 + TRIAL, 1.05, 1.0) == TRIAL
    assert not choice.chosen
    assert decoded(choice, round(RARELY * TRIAL * 1.0) - 1, 1.0, 1.0) == 0


def test_one_thread_is_not_tried_where_threads_keep_their_cores():
    assert decoded(OneThread(), 100, 2.0, 1.0, switches=0) == 0


def test_one_interrupted_short_batch_is_no_reason_for_a_trial():
    """An interruption in a millisecond is not a thousand of them in a second."""
    choice = OneThread()
    for number in range(200):
        assert not choice.next()
        choice.note(False, 0.001, 10, 1 if number % 50 == 0 else 0)


def test_a_trial_of_short_batches_is_long_enough_to_tell():
    """Of short batches some take many times as long as others, the first one most of all."""
    choice, slow = OneThread(), {0: 0.5, 9: 0.02, 23: 0.02}
    alone = 0
    for number in range(100):
        way = choice.next()
        alone += way
        choice.note(way, slow.get(number, 0.001), 1, 10**6)
    assert alone >= EVIDENCE / 0.001 / 2
    assert not choice.chosen


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


def test_a_new_size_of_batch_begins_with_the_latest_choice():
    workers = Workers(2, lambda: 10**6, object, follows=True)
    for _ in range(2 + 2 * TRIAL):
        workers.note(8, bool(workers.for_batch(8, 8)), 1.0 if workers.for_batch(8, 8) else 2.0, 1, 10**6)
    assert workers.choice(8).chosen
    assert workers.choice(64).chosen


def test_batches_that_have_one_thread_for_their_few_rows_are_no_trial():
    workers = Workers(2, lambda: 10**6, object, thread_rows=14, follows=True)
    for _ in range(10):
        assert len(workers.for_batch(9, 9)) == 1
        workers.note(9, True, 5.0, 1, 10**6)
    assert not workers.choice(9).chosen


def test_batches_of_other_threads_do_not_end_a_trial():
    choice = begun()
    choice.note(False, 1.0, 1, 10**6)
    for _ in range(10):
        choice.note(False, 1.0, 1, 10**6)  # decodes that had begun before it
    assert choice.next()

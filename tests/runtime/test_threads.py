"""How many threads and workers a decode has: from the speed of the machine, and from batches that were timed."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest

from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime import threads as threads_module
from seq2engine.runtime.machine_speed import WHOLE_ROWS, rows_of_worker
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

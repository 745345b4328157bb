"""The scheduler: every request gets what it gets alone, whatever comes and goes beside it, and all rows are freed."""

from __future__ import annotations

import dataclasses
import threading
import time
from concurrent.futures import CancelledError
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stand_in_engines import BEAMS, MODEL, copied, exported, put_engines, session_over

from seq2engine.errors import BusyError, DeadlineError, RequestError
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.ort.graphs import model_from_bundle
from seq2engine.runtime.ort.session import OrtSession, OrtSettings
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step_output import StepOutput
from seq2engine.runtime.serving.scheduler import HELD_STEPS, Scheduler
from seq2engine.runtime.serving.tickets import Request
from seq2engine.runtime.torch_session import TorchSession

CONFIG = dataclasses.replace(
    PRESETS["tiny"], d_model=32, d_ff=48, source_vocab=40, target_vocab=40, max_source=20, max_target=24
)
OPTIONS = (
    SearchOptions(max_length=24, scores=False),
    SearchOptions(max_length=7),
    SearchOptions(max_length=16, banned=((5,), (6,)), forced_bos=9),
    SearchOptions(max_length=12, min_length=4, no_repeat_ngram=2),
    SearchOptions(max_length=20, beam=3, nbest=2),
    SearchOptions(max_length=9, beam=3, length_penalty=0.5),
    SearchOptions(max_length=10, sample=True, nbest=2, seed=4),
    SearchOptions(max_length=8, alternatives=True, nbest=3),
    SearchOptions(max_length=8, shortlist=(3, 4, 5, 6, 7, 11), prompt=(8, 12)),
)
SOON = 120  # seconds that nothing here takes


def source_of(number):
    rng = np.random.default_rng(number)
    return rng.integers(3, CONFIG.source_vocab, rng.integers(1, CONFIG.max_source + 1)).tolist()


@pytest.fixture(scope="module", params=["static", "growing"])
def session(request, tmp_path_factory):
    bundle = onnx_from_model(
        random_model(CONFIG, 3), tmp_path_factory.mktemp("b") / "b", ("fp32",), cache_form=request.param
    )
    with open_session(bundle, threads=1) as opened:
        opened.alone = {}
        yield opened


def alone(session, source, options):
    """What a request gets without neighbours."""
    key = source, options
    if key not in session.alone:
        session.alone[key] = generate(session, [source_of(source)], OPTIONS[options])[0]
    return [found.tokens for found in session.alone[key]]


def freed(scheduler):
    """Waits until nothing runs, and checks that nothing is left."""
    for _ in range(int(SOON / 0.01)):
        if (
            not scheduler.active
            and not scheduler.queued
            and not any(b.running.used for b in scheduler.batches.values())
        ):
            return True
        time.sleep(0.01)
    return False


@contextmanager
def held(session):
    """No step is done inside until the gate is set."""
    gate, step = threading.Event(), session.step

    def waiting(*args):
        assert gate.wait(SOON)
        return step(*args)

    with mock.patch.object(session, "step", waiting):
        try:
            yield gate
        finally:
            gate.set()


def test_a_request_gets_what_it_gets_alone_whatever_comes_and_goes(session):
    """Random arrivals, options and cancellations, with fewer rows than requests."""
    arrivals = st.lists(
        st.tuples(
            st.integers(0, 30),  # which source
            st.integers(0, len(OPTIONS) - 1),
            st.sampled_from([0.0, 0.0, 0.001, 0.004]),  # seconds since the one before
            st.sampled_from([False, False, False, True]),  # whether the client goes away
            st.booleans(),  # whether tokens are streamed
        ),
        min_size=1,
        max_size=24,
    )

    @settings(max_examples=12, deadline=None, derandomize=True, database=None)
    @given(arrivals=arrivals, rows=st.integers(1, 9))
    def holds(arrivals, rows):
        with Scheduler(session, rows) as scheduler:
            asked = []
            for source, options, delay, goes, streams in arrivals:
                time.sleep(delay)
                streamed = []
                request = Request(source_of(source), OPTIONS[options], on_token=streamed.append if streams else None)
                (ticket,) = scheduler.submit(request)
                asked.append((ticket, source, options, goes, streamed if streams else None))
                if goes and delay:
                    ticket.cancel()
            for ticket, *_, goes, _ in asked:
                if goes:
                    ticket.cancel()
            for ticket, source, options, goes, streamed in asked:
                if goes and ticket.future.cancelled():
                    continue
                found = [one.tokens for one in ticket.result(SOON)]
                assert found == alone(session, source, options)
                if streamed and OPTIONS[options].width == 1:
                    assert tuple(streamed) == found[0]
            assert freed(scheduler)
        counted = scheduler.counters.requests
        assert counted["done"] + counted["cancelled"] == len(arrivals)
        assert not scheduler.batches or not any(batch.running.cohorts for batch in scheduler.batches.values())

    holds()


def test_an_output_is_there_as_soon_as_it_is_finished(session):
    order = []
    lengths = (24, 3, 12)
    with Scheduler(session) as scheduler:
        requests = [Request([5, 6, 7], SearchOptions(max_length=length, ignore_eos=True)) for length in lengths]
        with held(session):
            tickets = scheduler.submit(*requests)
            for ticket, length in zip(tickets, lengths, strict=True):
                ticket.future.add_done_callback(lambda future, length=length: order.append(length))
        for ticket in tickets:
            ticket.result(SOON)
    assert order == [3, 12, 24]


def test_sources_that_begin_together_are_answered_one_by_one(session):
    """One search, equal options: the output that ends first does not wait for the others."""
    options, wanted = SearchOptions(max_length=24), {}
    for number in range(40):
        wanted.setdefault(len(generate(session, [source_of(number)], options)[0][0].tokens), number)
    order = []
    with Scheduler(session) as scheduler:
        with held(session):
            lengths = sorted(wanted, reverse=True)
            tickets = scheduler.submit(*[Request(source_of(wanted[length]), options) for length in lengths])
            for ticket, length in zip(tickets, lengths, strict=True):
                ticket.future.add_done_callback(lambda future, length=length: order.append(length))
        for ticket in tickets:
            ticket.result(SOON)
    assert len(wanted) > 1
    assert order == sorted(wanted)


def test_the_batch_grows_and_shrinks(session):
    sizes = []
    step = session.step

    def seen(state, tokens, *others):
        sizes.append(len(tokens))
        return step(state, tokens, *others)

    def fixed(length):
        return SearchOptions(max_length=length, ignore_eos=True)

    begun, queued = threading.Event(), threading.Event()

    def waits_for_the_others(_):  # in the scheduler's thread: however slow ours is, the first request is still running
        begun.set()
        assert queued.wait(SOON)

    with mock.patch.object(session, "step", seen), Scheduler(session, rows=6) as scheduler:
        (first,) = scheduler.submit(Request([5, 6], fixed(24), on_token=waits_for_the_others))
        assert begun.wait(SOON)
        others = scheduler.submit(*[Request([7, 8, 9], fixed(4)) for _ in range(9)])
        queued.set()
        for ticket in (first, *others):
            ticket.result(SOON)
    assert sizes[0] == 1
    assert max(sizes) == 6
    assert sizes[-1] < 6


@pytest.mark.parametrize(("running", "coming", "held"), [(8, 1, HELD_STEPS), (8, 2, 0), (4, 1, 0), (1, 1, 0)])
def test_new_requests_join_a_large_batch_together_or_after_some_steps(session, running, coming, held):
    """An encoder call stops all running requests, so a single new one waits a little before it joins a large batch."""
    sizes = []
    step, queued = session.step, threading.Event()

    def seen(state, tokens, *others):
        sizes.append(len(tokens))
        return step(state, tokens, *others)

    begun = threading.Event()

    def waits_for_the_others(_):  # in the scheduler's thread, after the first step
        begun.set()
        assert queued.wait(SOON)

    options = SearchOptions(max_length=24, ignore_eos=True)
    with mock.patch.object(session, "step", seen), Scheduler(session, rows=16) as scheduler:
        first = Request([5, 6], options, on_token=waits_for_the_others)
        tickets = scheduler.submit(*[first] * running)
        assert begun.wait(SOON)
        tickets += scheduler.submit(*[Request([7, 8], options)] * coming)
        queued.set()
        for ticket in tickets:
            ticket.result(SOON)
    assert sizes[: held + 2] == [running] * (1 + held) + [running + coming]


def test_what_cannot_be_decoded_is_refused_at_once_and_nobody_else_notices(session):
    with Scheduler(session) as scheduler:
        with held(session):
            (good,) = scheduler.submit(Request(source_of(1), OPTIONS[0]))
            with pytest.raises(RequestError, match="source 0 has 21 tokens, at most 20"):
                scheduler.submit(Request([3] * 21))
            with pytest.raises(RequestError, match="max length 30, at most 24"):
                scheduler.submit(Request([3], SearchOptions(max_length=30)))
            with pytest.raises(RequestError, match="300 sources at once, at most 256"):
                scheduler.submit(*[Request([3])] * 300)
        assert [one.tokens for one in good.result(SOON)] == alone(session, 1, 0)
    assert scheduler.counters.requests["refused"] == 302


def test_a_request_that_breaks_its_batch_is_the_only_one_that_fails(session):
    """Logits of one source are not finite: the others of its search begin again, and stream each token once."""
    step = session.step

    def broken(state, tokens, position, *others):
        answer = step(state, tokens, position, *others)
        wrong = (session.tensor(state, "source_mask").sum(axis=1) == 13) & (position == 3)
        logits = answer.logits.copy()
        logits[wrong] = np.nan
        return StepOutput(logits)

    sources = [[3] * (13 if number == 4 else 5 + number) for number in range(7)]
    options = SearchOptions(max_length=9)
    expected = [generate(session, [source], options)[0][0].tokens for source in sources]
    streamed = [[] for _ in sources]
    with mock.patch.object(session, "step", broken), Scheduler(session) as scheduler:
        requests = [Request(s, options, on_token=outputs.append) for s, outputs in zip(sources, streamed, strict=True)]
        tickets = scheduler.submit(*requests)
        for number, ticket in enumerate(tickets):
            if number == 4:
                with pytest.raises(RequestError, match="the model's logits are not finite"):
                    ticket.result(SOON)
            else:
                assert ticket.result(SOON)[0].tokens == expected[number] == tuple(streamed[number])
        assert freed(scheduler)


def test_a_full_queue_is_an_error_at_once(session):
    with Scheduler(session, rows=1, queue=2) as scheduler:
        with held(session):
            (first,) = scheduler.submit(Request([5], OPTIONS[0]))
            while not scheduler.active:
                time.sleep(0.001)
            waiting = scheduler.submit(Request([6], OPTIONS[0]), Request([7], OPTIONS[0]))
            with pytest.raises(BusyError, match="2 requests are waiting, at most 2; try again later"):
                scheduler.submit(Request([8], OPTIONS[0]))
        for ticket in (first, *waiting):
            ticket.result(SOON)
    assert scheduler.counters.requests["busy"] == 1


def test_a_request_that_is_late_is_an_error_and_frees_its_row(session):
    with Scheduler(session, rows=1) as scheduler:
        with held(session):
            running, queued = scheduler.submit(*[Request([5], OPTIONS[0], timeout=SOON) for _ in range(2)])
            (patient,) = scheduler.submit(Request([6], OPTIONS[0]))
            while not scheduler.active:
                time.sleep(0.001)
            for ticket in (running, queued):  # time is over while one is decoded, and not before
                assert ticket.deadline == ticket.arrived + SOON
                ticket.deadline = ticket.arrived
        with pytest.raises(DeadlineError, match="being decoded"):
            running.result(SOON)
        with pytest.raises(DeadlineError, match="in the queue"):
            queued.result(SOON)
        assert patient.result(SOON)
        assert freed(scheduler)


def test_a_client_that_goes_away_frees_its_rows_in_the_next_step(session):
    with Scheduler(session, rows=2) as scheduler:
        options = SearchOptions(max_length=24, ignore_eos=True)
        with held(session):
            gone = scheduler.submit(*[Request([5], options)] * 2)
            (next_one,) = scheduler.submit(Request([6], SearchOptions(max_length=2, ignore_eos=True)))
            while scheduler.active < 2:
                time.sleep(0.001)
            for ticket in gone:
                ticket.cancel()
        assert len(next_one.result(SOON)[0].tokens) == 2
        with pytest.raises(CancelledError):
            gone[0].result()
        assert freed(scheduler)
    assert scheduler.counters.steps <= 1 + 2 + 1  # one with both, then the next one's


def test_stopping_finishes_what_runs_and_refuses_what_comes(session):
    scheduler = Scheduler(session, rows=2)
    with held(session) as gate:
        tickets = scheduler.submit(*[Request(source_of(n), OPTIONS[0]) for n in range(5)])
        stopping = threading.Thread(target=scheduler.close)
        stopping.start()
        while not scheduler.stopping:
            time.sleep(0.001)
        with pytest.raises(BusyError, match="is stopping"):
            scheduler.submit(Request([5]))
        gate.set()
        stopping.join(SOON)
    assert [[one.tokens for one in t.result(0)] for t in tickets] == [alone(session, n, 0) for n in range(5)]
    assert not scheduler.thread.is_alive()


def test_stopping_without_draining_cancels(session):
    scheduler = Scheduler(session, rows=1)
    with held(session) as gate:
        tickets = scheduler.submit(*[Request([5], OPTIONS[0])] * 3)
        for ticket in tickets:
            ticket.future.add_done_callback(lambda future: all(t.future.done() for t in tickets) and gate.set())
        scheduler.close(drain=False)
    assert all(ticket.future.cancelled() for ticket in tickets)


def test_an_engine_serves_within_its_limits(tmp_path):
    """At most 4 rows, a cache of fixed length, tokens chosen ahead where the engine can."""
    folder = put_engines(copied(exported(tmp_path)["static"], tmp_path / "run7"), BEAMS)
    sources = [[(7 * row + 3 * place) % 30 + 3 for place in range(1 + row % 9)] for row in range(11)]
    several = (
        SearchOptions(max_length=12),
        SearchOptions(max_length=8, scores=False),
        SearchOptions(max_length=9, beam=3),
    )
    reference = TorchSession(MODEL)
    expected = [generate(reference, [s], several[n % 3])[0][0].tokens for n, s in enumerate(sources)]
    with session_over(folder) as engine, Scheduler(engine, rows=32) as scheduler:
        assert scheduler.rows == 4
        found = scheduler.generate(*[Request(s, several[n % 3]) for n, s in enumerate(sources)])
    assert [one[0].tokens for one in found] == expected


@pytest.mark.parametrize(("rows", "queue"), [(0, 1), (1, 0)])
def test_no_rows_and_no_queue_are_refused(session, rows, queue):
    with pytest.raises(RequestError, match="expected at least 1 each"):
        Scheduler(session, rows, queue)


def test_a_session_that_chooses_tokens_ahead_is_joined_when_it_waits(tmp_path):
    """Rows change only between two waits; maximum lengths differ within one batch, bans make another."""
    bundle = onnx_from_model(random_model(CONFIG, 3), tmp_path / "b", ("fp32",))
    options = (OPTIONS[0], OPTIONS[1], OPTIONS[2], OPTIONS[4])
    with (
        OrtSession(model_from_bundle(bundle, "fp32"), OrtSettings(1, on_device=True)) as device,
        Scheduler(device, rows=5) as scheduler,
    ):
        assert device.ahead is not None
        expected = [generate(device, [source_of(n)], options[n % 4])[0] for n in range(20)]
        tickets = []
        for number in range(20):
            tickets += scheduler.submit(Request(source_of(number), options[number % 4]))
            time.sleep(0.002 * (number % 3))
        gone = scheduler.submit(*[Request(source_of(n), options[0]) for n in range(4)])
        for ticket in gone:
            ticket.cancel()
        found = [ticket.result(SOON) for ticket in tickets]
        assert [[one.tokens for one in nbest] for nbest in found] == [[one.tokens for one in e] for e in expected]
        assert freed(scheduler)

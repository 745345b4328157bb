"""Parallel decodes: the same outputs, in the same order, on any worker; errors that name the right source."""

from __future__ import annotations

import gc
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
from seq2engine.model.config import PRESETS
from seq2engine.runtime import threads as threads_module
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.ort import session as ort_session
from seq2engine.runtime.ort.session import WORKER_ROWS, OrtSession
from seq2engine.runtime.parallel import in_parallel, workers_for
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step_output import NotFiniteError, StepOutput
from seq2engine.runtime.threads import EncoderLock, Workers, row_work, rows_per_worker, sensible_threads, usable_cores
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


@pytest.mark.parametrize(
    ("precision", "shortlist"), [("fp32", None), ("fp32", tuple(range(3, 200, 3))), ("w8a8", None)]
)
@pytest.mark.parametrize("beam", [1, 4])
def test_outputs_are_those_of_one_decode(bundle, precision, shortlist, beam):
    sources = sources_of(70)
    options = SearchOptions(max_length=12, beam=beam, nbest=beam, shortlist=shortlist)
    with (
        open_session(bundle, precision=precision, threads=2) as several,
        open_session(bundle, precision=precision, threads=1) as alone,
    ):
        assert len(workers_for(several, len(sources), len(sources) * beam)) == 2
        found, expected = generate(several, sources, options), generate(alone, sources, options)
    assert [[h.tokens for h in row] for row in found] == [[h.tokens for h in row] for row in expected]


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
        rows = 2 * rows_per_worker(session.config, WORKER_ROWS["w8a8"])
        assert rows > 1000
        assert workers_for(session, 64, rows - 1) == (session,)
        assert len(workers_for(session, 64, rows)) == 2
    assert rows_per_worker(PRESETS["base"], 2) == 2
    assert rows_per_worker(PRESETS["base"], 32) == 32


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


def test_threads_are_as_many_as_the_model_is_large(monkeypatch, bundle):
    monkeypatch.setattr(threads_module, "usable_cores", lambda: 64)
    assert sensible_threads(PRESETS["tiny"]) == 2
    assert sensible_threads(PRESETS["base"]) == 64
    monkeypatch.setattr(ort_session, "sensible_threads", sensible_threads)  # which tests do without otherwise
    with open_session(bundle) as session:
        assert session.threads == 2
    with open_session(bundle, threads=5) as session:
        assert session.threads == 5
    monkeypatch.setattr(threads_module, "usable_cores", lambda: 1)
    assert sensible_threads(PRESETS["base"]) == 1


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
        self.workers = Workers(3, 1, lambda: self)

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
def test_every_source_is_dealt_out_once_and_parts_are_even(lengths, count):
    class Dealt:
        workers = Workers(min(count, len(lengths)), 3 * len(lengths), object)

    found = in_parallel(Dealt(), [[0] * length for length in lengths], 3, lambda worker, part: list(part))
    assert sorted(number for part, _ in found for number in part) == list(range(len(lengths)))
    assert all(part == got for part, got in found)
    sizes = [len(part) for part, _ in found]
    assert max(sizes) - min(sizes) <= 1


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

"""A whole benchmark on a tiny model: what is compared, what is timed, and what is refused. No time is ever asserted."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest

from seq2engine.benchmarks import arms, options, runner, timed_decode
from seq2engine.benchmarks.cases import Case, sources_for
from seq2engine.benchmarks.options import BenchOptions
from seq2engine.benchmarks.result import PARTS
from seq2engine.benchmarks.runner import bench_bundle
from seq2engine.benchmarks.timed_decode import PIECES, fixed_decode, repeated_step
from seq2engine.benchmarks.timing import Samples
from seq2engine.errors import RequestError, SessionError, UsageError
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.encoder_inputs import padded
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step_output import StepOutput

CASE = Case("small", batch=3, beam=2, source=5, target=9)
GREEDY = Case("greedy", batch=2, beam=1, source=4, target=3)
SINGLE = Case("single", batch=1, beam=1, source=4, target=12)
SMALL = dataclasses.replace(
    PRESETS["tiny"], encoder_layers=1, decoder_layers=1, d_model=16, heads=2, d_ff=16, source_vocab=64, target_vocab=64
)


@pytest.fixture(scope="module", params=["static", "growing"])
def any_bundle(request, tmp_path_factory):
    return onnx_from_model(
        random_model(SMALL), tmp_path_factory.mktemp("bench") / "small", ("fp32",), cache_form=request.param
    )


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return onnx_from_model(random_model(SMALL), tmp_path_factory.mktemp("bench") / "small", ("fp32",))


class Wrapped:
    """A session with something changed, the rest passed through."""

    ahead = None  # each of its steps is asked for

    def __init__(self, session):
        self.session = session

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.session.close()

    def __getattr__(self, name):
        return getattr(self.session, name)


class Liar(Wrapped):
    """Never outputs the best token for the last source."""

    def step(self, state, *inputs):
        logits = np.array(self.session.step(state, *inputs).logits)
        best = logits[-1].argmax(axis=-1)
        logits[-1, np.arange(len(best)), best] = -30
        return StepOutput(logits)


class Broken(Wrapped):
    def encode(self, source_ids, source_mask):
        raise RequestError("the encoder is on fire")


def swap(monkeypatch, kind):
    """ONNX Runtime's session becomes one of that kind."""

    def opener(bundle, backend, precision, threads, **others):
        session = open_session(bundle, backend, precision, threads)
        return kind(session) if backend == "onnxruntime" else session

    monkeypatch.setattr(arms, "open_session", opener)


def test_every_arm_is_timed_in_every_part(any_bundle):
    reports = []
    progress = lambda stage, fraction: reports.append((stage, fraction))  # noqa: E731
    result = bench_bundle(any_bundle, BenchOptions(cases=[CASE, GREEDY], rounds=2, threads=1, quick=True), progress)
    assert list(result.arms) == ["torch fp32", "onnxruntime fp32"]
    assert result.first == "torch fp32"
    assert result.cache_form == any_bundle.cache_form
    assert [case.case for case in result.cases] == [CASE, GREEDY]
    for case in result.cases:
        for name, arm in case.arms.items():
            assert case.same(name)
            assert tuple(arm.parts) == PARTS
            assert {len(measure.samples.nanoseconds) for measure in arm.parts.values()} == {2}
            assert arm.cache.steps == case.case.target
            assert tuple(arm.split) == PIECES
            for pieces, whole in zip(
                zip(*(times.nanoseconds for times in arm.split.values()), strict=True),
                arm.parts["end_to_end"].samples.nanoseconds,
                strict=True,
            ):
                assert min(pieces) >= 0
                assert 0 < sum(pieces) <= whole  # all of a decode, and nothing twice
            assert all(sum(arm.split[piece].nanoseconds) > 0 for piece in ("encoder", "step", "search", "copies"))
            assert (sum(arm.split["compaction"].nanoseconds) > 0) == (arm.cache.compactions + arm.cache.growths > 0)
    assert [result.cases[0].arms["torch fp32"].parts[part].tokens for part in PARTS] == [15, 3, 27]
    assert {stage for stage, fraction in reports if fraction == 1} == {stage for stage, _ in reports}


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["w8a8", "quantised"])
def test_speculative_decoding_is_an_arm_of_its_own_where_one_row_is_decoded(tmp_path, draft):
    drafted = onnx_from_model(random_model(SMALL, 3), tmp_path / "b", ("fp32", "w8a8"))
    asked = BenchOptions(
        ["onnxruntime"],
        ["fp32", "w8a8"],
        [CASE, SINGLE],
        rounds=1,
        threads=1,
        quick=False,
        draft=draft,
    )
    result = bench_bundle(drafted, asked)
    name = f"onnxruntime fp32 draft {draft}"
    assert list(result.arms) == ["onnxruntime fp32", "onnxruntime w8a8", name]
    assert result.arms[name].draft == draft
    assert result.arms[name].peak_bytes > 0
    assert [name in case.arms for case in result.cases] == [False, True]
    assert result.cases[1].same(name)


def test_arms_record_what_they_loaded(bundle):
    result = bench_bundle(bundle.root, BenchOptions(cases=[GREEDY], rounds=1, threads=1, quick=True))
    on_disk = {
        "torch fp32": (bundle.root / "model.safetensors").stat().st_size,
        "onnxruntime fp32": sum(path.stat().st_size for path in (bundle.root / "onnx" / "fp32").iterdir()),
    }
    assert {name: arm.bytes for name, arm in result.arms.items()} == on_disk
    assert all(arm.load_ms > 0 for arm in result.arms.values())


def test_threads_default_to_all_cores(bundle, monkeypatch):
    monkeypatch.setattr(options, "usable_cores", lambda: 1)
    result = bench_bundle(bundle, BenchOptions(backends=["onnxruntime"], cases=[GREEDY], rounds=1, quick=True))
    assert result.environment.threads == 1
    assert list(result.arms) == ["onnxruntime fp32"]


@pytest.mark.parametrize(
    ("backends", "threads", "rest"),
    [(["torch", "onnxruntime"], 2, runner.REST), (["torch", "onnxruntime"], 1, 0.0), (["onnxruntime"], 2, 0.0)],
)
def test_arms_rest_only_where_workers_of_another_may_spin(bundle, monkeypatch, backends, threads, rest):
    asked = {}

    def interleaved(arms, rounds, warmup, progress, stage, lead, rest, after):
        asked[stage] = (lead, rest)
        return {name: Samples((1_000_000,) * rounds) for name in arms}

    monkeypatch.setattr(runner, "interleaved", interleaved)
    bench_bundle(bundle, BenchOptions(backends, cases=[GREEDY], rounds=1, threads=threads, quick=True))
    assert asked == {f"bench: greedy, {part}": (runner.LEAD, rest) for part in PARTS}


def test_an_arm_with_other_outputs_is_shown_as_differing(bundle, monkeypatch):
    swap(monkeypatch, Liar)
    (case,) = bench_bundle(bundle, BenchOptions(cases=[GREEDY], rounds=1, threads=1, quick=True)).cases
    assert (case.arms["onnxruntime fp32"].equal, case.arms["onnxruntime fp32"].equal_timed) == (1, 1)
    assert case.same("torch fp32")
    assert not case.same("onnxruntime fp32")


def test_an_arm_that_fails_is_a_failed_run(bundle, monkeypatch):
    swap(monkeypatch, Broken)
    with pytest.raises(SessionError, match=r"onnxruntime fp32 failed at case greedy, .* the encoder is on fire"):
        bench_bundle(bundle, BenchOptions(cases=[GREEDY], rounds=1, threads=1, quick=True))


def test_a_bad_request_is_refused_whole_before_anything_is_loaded(bundle, monkeypatch):
    monkeypatch.setattr(arms, "open_session", None)
    beyond = Case("long", batch=1, beam=1, source=65, target=99)
    with pytest.raises(UsageError) as refused:
        bench_bundle(bundle, BenchOptions(["torch", "abacus", "torch"], ["fp16"], [beyond], rounds=0, threads=0))
    for problem in (
        "backend 'abacus', expected one of torch, onnxruntime",
        "backend 'torch' twice",
        "precision 'fp16', expected one of fp32",
        "case long: source 65, the model takes at most 64",
        "case long: output 99, the model gives at most 64",
        "rounds 0, expected at least 1",
        "threads 0, expected at least 1",
    ):
        assert problem in str(refused.value)
    with pytest.raises(UsageError, match=re.escape("no backend to time; no precision to time; no case to time")):
        bench_bundle(bundle, BenchOptions([], [], []))


def test_the_decode_that_is_timed_is_generate_with_the_model_s_own_rules(tmp_path, monkeypatch):
    """A loop of the benchmark's own would leave out what `generate` does, and time something else."""
    (tmp_path / "generation.json").write_text('{"forced_bos": 5, "max_length": 4, "min_length": 2}')
    bundle = onnx_from_model(random_model(SMALL), tmp_path / "bundle", ("fp32",), companions=tmp_path)
    seen = []

    def watched(session, sources, options, *more):
        seen.append((type(session).__name__, len(sources), options.ignore_eos, options.forced_bos))
        return generate(session, sources, options, *more)

    monkeypatch.setattr(timed_decode, "generate", watched)
    monkeypatch.setattr(runner, "LEAD", 0.0)
    bench_bundle(bundle, BenchOptions(["onnxruntime"], cases=[CASE], rounds=2, threads=1, quick=True))
    counted, timed = ("CountedSession", 3, True, 5), ("WatchedSession", 3, True, 5)
    assert seen == [counted] + [timed] * (runner.WARMUP + 2)


def test_parallel_decodes_are_watched_each_on_its_own(bundle):
    """Two workers at the same time: the pieces are their mean, and come to no more than the whole."""
    with open_session(bundle, threads=1) as one, open_session(bundle, threads=1) as other:
        session = Wrapped(one)
        session.workers = SimpleNamespace(for_batch=lambda sources, rows: (one, other))
        watched = timed_decode.WatchedSession(session)
        generate(watched, sources_for(CASE, SMALL), SearchOptions(max_length=3, beam=2, ignore_eos=True))
    assert len(watched.parallel) == 2
    assert all(spent["step"] > 0 and spent["encoder"] > 0 for spent in watched.parallel)
    assert not any(watched.spent.values())
    split = watched.split(10**12)
    assert sum(split.values()) == 10**12
    assert split["step"] == sum(spent["step"] for spent in watched.parallel) // 2


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
@pytest.mark.parametrize("case", [CASE, GREEDY, dataclasses.replace(CASE, target=1)], ids=str)
def test_a_fixed_decode_never_ends_early(bundle, backend, case):
    with open_session(bundle, backend, threads=1) as session:
        found = fixed_decode(session, sources_for(case, SMALL), SearchOptions(max_length=case.target, beam=case.beam))
    assert [len(row) for row in found.tokens] == [case.target] * case.batch
    assert all(0 <= token < SMALL.target_vocab for row in found.tokens for token in row)
    assert len(found.trail) == case.target


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
@pytest.mark.parametrize("case", [CASE, dataclasses.replace(CASE, target=1)], ids=str)
def test_the_repeated_step_is_the_one_halfway(any_bundle, backend, case):
    """Again and again the same logits, and the best continuation of them is what the decode chose there."""
    sources = sources_for(case, SMALL)
    with open_session(any_bundle, backend, threads=1) as session:
        wanted = SearchOptions(max_length=case.target, beam=case.beam)
        decoded = fixed_decode(session, sources, wanted)
        again = repeated_step(session, *padded(sources, SMALL.pad_id), wanted, decoded.trail)
        first = np.array(again().logits)
        for _ in range(3):
            np.testing.assert_array_equal(again().logits, first)
    assert first.shape == (case.batch, case.beam, SMALL.target_vocab)
    if case.target > 1:
        tokens, parents = decoded.trail[case.target // 2]
        ranked = np.argsort(-first, axis=-1)
        for row, beam in np.ndindex(tokens.shape):
            assert tokens[row, beam] in ranked[row, parents[row, beam], : 2 * case.beam]

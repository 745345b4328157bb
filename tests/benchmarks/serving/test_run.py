"""The load benchmark on a tiny model: equal outputs, all requests answered, and the report on them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from seq2engine.benchmarks.serving import run
from seq2engine.benchmarks.serving.arms import ROWS
from seq2engine.benchmarks.serving.load import Clock, Measured, poisson_arrivals
from seq2engine.benchmarks.serving.ragged import LENGTHS, LONGEST, TINY, RaggedSession, ragged_sources, with_ends
from seq2engine.benchmarks.serving.steps import StepCount, step_counts
from seq2engine.errors import ConfigError
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.runtime.generate import generate
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step_output import Candidates, Reduced, StepOutput


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    bundle = onnx_from_model(random_model(TINY, 0), tmp_path_factory.mktemp("b") / "b", ("fp32",))
    with RaggedSession.from_bundle(bundle, "fp32", threads=1) as opened:
        yield opened


@pytest.mark.parametrize("scores", [True, False])
def test_all_arms_answer_all_requests_alike(session, scores):
    sources = [source[:12] for source in ragged_sources(TINY, 16)]
    result = run.load_result(session, sources, SearchOptions(max_length=LONGEST, scores=scores), 1, (0.5,))
    assert set(result.runs) == set(run.ARMS)
    assert result.equal == 1.0
    assert set(result.saturation) == set(run.ARMS)
    for found in result.runs.values():
        assert all((one.latency > 0).all() for one in found)
    values = json.loads(result.to_json())
    assert len(values["equal_p99"]) == len(run.LIMITS)
    assert run.CONTINUOUS in run.report_text(result)
    asked = run.arguments_parser("").parse_args(["out.html"])
    assert "Equal 99th percentile" in run.report_html(result, TINY, asked, "here")


def test_steps_are_counted_whatever_the_speed(session):
    """Whole batches take the longest output's steps each; continuous batching fewer, over as many rows in use."""
    sources = [source[:24] for source in ragged_sources(TINY, 64)]
    options = SearchOptions(max_length=LONGEST, scores=False)
    found = step_counts(session, sources, options)
    lengths = [len(nbest[0].tokens) for nbest in generate(session, sources, options)]
    batches = [lengths[first : first + ROWS] for first in range(0, len(lengths), ROWS)]
    assert found[run.ONE] == StepCount(sum(lengths), sum(lengths))
    assert found[run.WHOLE].steps == found[run.KEPT].steps == sum(map(max, batches))
    assert found[run.KEPT].rows == sum(ROWS * max(batch) for batch in batches)
    assert found[run.CONTINUOUS].steps < found[run.WHOLE].steps
    assert sum(lengths) <= found[run.CONTINUOUS].rows < found[run.KEPT].rows
    assert "step" not in vars(session)


def test_other_outputs_are_an_error(session, monkeypatch):
    class Wrong(run.ARMS[run.CONTINUOUS]):
        def ask(self, source, done):
            super().ask(source, lambda tokens: done((*tokens, 9)))

    monkeypatch.setitem(run.ARMS, run.CONTINUOUS, Wrong)
    sources = [source[:5] for source in ragged_sources(TINY, 8)]
    with pytest.raises(ConfigError, match="continuous batching gives outputs of other lengths"):
        run.load_result(session, sources, SearchOptions(max_length=LONGEST), 1, (0.5,))


def test_rates_at_a_percentile_lie_on_the_line_between_two_runs():
    def measured(rate, latency):
        due = np.arange(100) / rate
        return Measured(rate, due, due + latency, ((),) * 100)

    result = run.LoadResult({}, {"a": [measured(10, 1.0), measured(20, 3.0)]}, 1.0)
    low, high = (one.throughput for one in result.runs["a"])
    assert result.rate_within("a", 2.0) == pytest.approx((low + high) / 2)
    assert result.rate_within("a", 0.5) == 0.0
    assert result.rate_within("a", 9.0) == pytest.approx(high)


@pytest.mark.parametrize("candidates", [1, 2])
def test_outputs_end_where_they_are_due(candidates):
    """Also for a step that puts out one token only, as that of a large vocabulary does."""
    end = TINY.end_id
    tokens = np.array([[[7, 8]], [[end, 8]], [[7, 8]]])[..., :candidates]  # [B, K, C]
    reduced = Reduced(Candidates(tokens, np.zeros(tokens.shape)), np.ones((3, 1)))
    found = with_ends(StepOutput(np.zeros((3, 1, 0))), reduced, np.array([False, False, True]), TINY)
    first, replaced, last = found.best.tokens[:, 0, 0]
    assert (first, last) == (7, end)
    assert replaced != end
    assert tokens[1, 0, 0] == end  # the step's own memory


def test_lengths_are_mixed_as_described():
    """A tenth of the requests are paragraphs, and they hold about two fifths of all tokens."""
    lengths = LENGTHS["paragraphs"].drawn(20_000, np.random.default_rng(0))
    long = lengths > 80
    assert long.mean() == pytest.approx(0.1, abs=0.03)
    assert lengths[long].sum() / lengths.sum() == pytest.approx(0.4, abs=0.1)
    assert lengths.min() >= 1
    assert lengths.max() == LENGTHS["paragraphs"].most
    assert LENGTHS["sentences"].drawn(20_000, np.random.default_rng(0)).mean() == pytest.approx(24, rel=0.05)


@pytest.mark.parametrize("clock", ["cpu", "wall"])
def test_clocks_skip_what_nobody_waits_for(clock):
    own = Clock(clock)
    own.skip_to(50.0)
    assert 50.0 <= own.now() < 55.0
    own.skip_to(10.0)
    assert own.now() >= 50.0


def test_arrivals_have_their_rate():
    assert poisson_arrivals(50.0, 4000, 0)[-1] == pytest.approx(80, rel=0.1)
    assert not poisson_arrivals(float("inf"), 5, 0).any()

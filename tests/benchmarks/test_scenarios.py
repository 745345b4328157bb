"""Scenarios: queueing that can be worked out by hand, and a tiny model through all three."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rounding import FP64

from seq2engine.benchmarks.cases import Case
from seq2engine.benchmarks.options import BenchOptions
from seq2engine.benchmarks.report.page import bench_html, bench_table
from seq2engine.benchmarks.report.tables import figure_text
from seq2engine.benchmarks.result import result_from_dict
from seq2engine.benchmarks.runner import bench_bundle
from seq2engine.benchmarks.scenarios import (
    SCENARIOS,
    ScenarioOptions,
    latencies,
    ragged_sources,
    run_scenarios,
    server_figures,
)
from seq2engine.benchmarks.timing import Samples
from seq2engine.errors import UsageError
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS

CASE = Case("scenario", batch=1, beam=2, source=8, target=5)
SMALL = dataclasses.replace(
    PRESETS["tiny"], encoder_layers=1, decoder_layers=1, d_model=16, heads=2, d_ff=16, source_vocab=64, target_vocab=64
)


def test_a_queue_by_hand() -> None:
    """Arrivals at 1, 2, 3 and 9; work of 3 each: they end at 4, 7, 10 and 13."""
    found = latencies(np.array([1.0, 1, 1, 6]), np.full(4, 3.0))
    assert found.tolist() == [3, 5, 7, 4]


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0.01, 9)), min_size=1, max_size=30))
def test_the_queue_equals_a_simulated_loop(queries: list[tuple[float, float]]) -> None:
    arrival = free = 0.0
    expected = []
    for gap, work in queries:
        arrival += gap
        free = max(free, arrival) + work
        expected.append(free - arrival)
    gaps, works = (np.array(column) for column in zip(*queries, strict=True))
    # Both add up to n gaps and n works, and subtract three times; no sum is larger than that of all.
    near = 2 * (2 * len(queries) + 3) * FP64 * (gaps.sum() + works.sum())
    np.testing.assert_allclose(latencies(gaps, works), expected, rtol=0, atol=near)


def test_the_rate_is_the_theory_s() -> None:
    """Equal work (M/D/1): mean wait is rate * work^2 / (2 (1 - load)); and the bound is kept, just."""
    work = Samples((10_000_000,) * 5)
    found = server_figures(work, bound_ms=50, seed=1)
    assert found["p99_ms"] == pytest.approx(50, rel=0.01)
    # At load r a wait beyond t works has a chance of about exp(-x t), x the root of exp(x) - 1 = x / r; one percent
    # beyond four works is x = 1.1, and so r = 0.55.
    assert found["queries_per_second"] == pytest.approx(55, rel=0.05)
    gaps = np.random.default_rng(0).exponential(1 / 70, 400_000)
    waits = latencies(gaps, np.full(400_000, 0.01)) - 0.01
    assert waits.mean() == pytest.approx(70 * 0.01**2 / (2 * 0.3), rel=0.05)


def test_rates_grow_with_patience_and_a_bound_below_the_work_allows_none() -> None:
    work = Samples((10_000_000, 12_000_000, 15_000_000))
    rates = [server_figures(work, bound, seed=0)["queries_per_second"] for bound in (5, 20, 40, 400)]
    assert rates == sorted(rates)
    assert rates[0] == 0
    assert rates[3] < 1000 / 12.33


def test_sources_are_ragged_and_the_same_again() -> None:
    found = ragged_sources(CASE, SMALL, 50, seed=3)
    assert found == ragged_sources(CASE, SMALL, 50, seed=3)
    assert {len(source) for source in found} == set(range(2, 9))


def test_all_scenarios_on_two_arms(tmp_path: object) -> None:
    bundle = onnx_from_model(random_model(SMALL), f"{tmp_path}/bundle", ("fp32",))
    result = bench_bundle(
        bundle, BenchOptions(cases=[CASE], rounds=1, threads=1, scenarios=SCENARIOS, queries=4, quick=True)
    )
    assert [(found.scenario, found.arm) for found in result.scenarios] == [
        (scenario, arm) for scenario in ("single", "server", "offline") for arm in ("torch fp32", "onnxruntime fp32")
    ]
    for found in result.scenarios:
        assert all(value >= 0 for value in found.figures.values())
        if found.scenario == "single":
            assert found.figures["first_token_p50_ms"] < found.figures["end_to_end_p50_ms"]
            assert len(found.samples["end_to_end"].nanoseconds) == 4
    servers = [found.figures["bound_ms"] for found in result.scenarios if found.scenario == "server"]
    assert servers[0] == servers[1]  # one bound for all
    assert result_from_dict(json.loads(result.to_json())) == result
    for text in (bench_table(result), bench_html(result)):
        assert "first token" in text
        assert "queries/s" in text
        assert "sources/s" in text


def test_refusals() -> None:
    with pytest.raises(UsageError, match="unknown scenario burst, expected some of single, offline, server"):
        run_scenarios(ScenarioOptions(["single", "burst"]), {}, [CASE])
    with pytest.raises(UsageError, match="a bound of 0 ms, expected more than 0"):
        run_scenarios(ScenarioOptions(["server"], bound_ms=0), {}, [CASE])
    with pytest.raises(UsageError, match="a bound without the scenario server"):
        run_scenarios(ScenarioOptions(["single"], bound_ms=5), {}, [CASE])


def test_a_rate_that_cannot_be_had_is_no_zero() -> None:
    assert figure_text("queries_per_second", 0.0) == "none"
    assert figure_text("queries_per_second", 0.0004) == "0.000400"
    assert figure_text("p99_ms", 0.0) == "0"


@pytest.mark.parametrize(("beam", "shown"), [(1, {"single", "server"}), (2, set())])
def test_drafts_are_shown_where_single_sources_are_decoded(tmp_path: Path, beam: int, shown: set[str]) -> None:
    bundle = onnx_from_model(random_model(SMALL, 3), tmp_path / "bundle", ("fp32", "w8a8"))
    case = dataclasses.replace(CASE, beam=beam)
    asked = {"rounds": 1, "threads": 1, "scenarios": SCENARIOS, "queries": 3, "draft": "w8a8", "quick": True}
    result = bench_bundle(bundle, BenchOptions(["onnxruntime"], ["fp32"], [case], **asked))
    drafted = [found.scenario for found in result.scenarios if "draft" in found.arm]
    assert set(drafted) == shown
    assert {found.scenario for found in result.scenarios if found.arm == "onnxruntime fp32"} == set(SCENARIOS)

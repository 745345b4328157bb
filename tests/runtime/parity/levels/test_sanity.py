"""No pass against its own outputs: where most differ, or quality falls, no budget helps; PyTorch's own rounding may."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from support.parity_cases import SMALL, bundle_of, changed, parity_with

from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.runtime.numerics import budgets as compare
from seq2engine.runtime.numerics.budgets import DecodeResult, Divergence
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.parity.compare import searches_of
from seq2engine.runtime.parity.levels import divergence
from seq2engine.runtime.parity.levels.baseline import Against
from seq2engine.runtime.parity.levels.sanity import (
    SAMPLE,
    decode_doubt,
    more_often,
    most_differ,
    outputs_of,
    quality_doubts,
    spread_rows,
)
from seq2engine.runtime.parity.options import ParityOptions
from seq2engine.runtime.parity.run import parities_of
from seq2engine.runtime.quality.intervals import Difference, Interval, Rate
from seq2engine.runtime.text.sources import random_sources

HUGE = 1e12


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return bundle_of(SMALL, tmp_path_factory.mktemp("sanity"))


@pytest.fixture
def huge_budgets(monkeypatch):
    """All budgets made so large that nothing is wrong by them."""
    allowed = {name: compare.Factors(HUGE, HUGE) for name in compare.FACTORS}
    monkeypatch.setattr(compare, "FACTORS", allowed)
    monkeypatch.setattr(divergence.Gap, "verdict", property(lambda gap: "tie"))
    monkeypatch.setattr(compare.TensorResult, "reason", property(lambda tensor: ""))
    monkeypatch.setattr(compare.ScoreResult, "__bool__", lambda scores: True)
    monkeypatch.setattr(
        "seq2engine.runtime.parity.levels.batch_invariance.InvarianceResult.reason", property(lambda arranged: "")
    )


def other_token(logits, position):
    """The best token is never chosen."""
    best = logits.argmax(-1)
    np.put_along_axis(logits, best[..., None], np.float32(-1e9), -1)


def nothing(logits, position):
    pass


class TestAll:
    @pytest.mark.slow
    @pytest.mark.parametrize("precision", ["fp32", "fp16"])
    def test_outputs_that_all_differ_fail_within_huge_budgets(self, bundle, huge_budgets, precision):
        with changed(bundle, precision, answered=other_token) as candidate:
            result = parity_with(bundle, candidate)
        assert all(result.tensors)
        assert all(result.decodes)
        assert not result
        assert result.reason == "decodes: greedy: most outputs differ, 0 of 16 equal, which fails even within budget"

    def test_a_good_export_has_no_doubts(self, bundle, huge_budgets):
        with changed(bundle, answered=nothing) as candidate:
            result = parity_with(bundle, candidate)
        assert result
        assert result.doubts == ()

    def test_a_quantised_candidate_is_not_excused_by_a_pytorch_that_agrees(self, tmp_path, huge_budgets, monkeypatch):
        """Over its own weights, as the command does it: the graph's outputs all differ, PyTorch's do not."""
        bundle = onnx_from_model(random_model(SMALL, 4), tmp_path / "b", ("int4",))
        opened = open_session

        def wrong(bundle, backend="onnxruntime", precision="fp32", *rest, **more):
            if backend == "onnxruntime":
                return changed(bundle, precision, answered=other_token)
            return opened(bundle, backend, precision, *rest, **more)

        monkeypatch.setattr("seq2engine.runtime.parity.sessions.open_session", wrong)
        monkeypatch.setattr("seq2engine.runtime.parity.run.with_finding", lambda result, *given: result)
        (result,) = parities_of(bundle, ["int4"], options=ParityOptions(count=16, beam=2, max_length=8, threads=1))
        assert not result
        assert result.reason.startswith("decodes: greedy: most outputs differ, 0 of 16 equal (PyTorch int4: ")

    @pytest.mark.slow
    def test_two_sessions_that_were_to_be_compared_fail_where_most_differ(self, tmp_path, monkeypatch):
        """int4 explains it all, but `--against` asks whether two are equal, and they are not. No fault is located."""
        monkeypatch.setattr("seq2engine.runtime.parity.run.finding_of", lambda *given: pytest.fail("located"))
        bundle = onnx_from_model(random_model(SMALL, 4), tmp_path / "b", ("fp32", "int4"))
        options = ParityOptions(count=24, beam=4, max_length=20, threads=1, against=Against(None, None, "fp32"))
        (result,) = parities_of(bundle, ["int4"], options=options)
        assert any(most_differ(decode) for decode in result.decodes), (
            "quantisation no longer changes enough: plant more"
        )
        assert not result
        assert result.reason.startswith("decodes: ")
        assert result.claim == "differs from onnxruntime fp32"


@pytest.fixture(scope="module")
def torch16(bundle):
    with open_session(bundle, "torch", "fp16", threads=1) as session:
        yield session


class TestExcuse:
    def doubt(self, session, differing, own_differing, count=40):
        """Of `count` sources the candidate differs in the first ones; PyTorch fp16 in those rows."""
        sources = random_sources(SMALL, count)
        (options, *_) = searches_of(session, 8, 2)
        outputs = outputs_of(session, sources, range(count), options, 8)
        outputs = {row: (*tokens, 1) if row in own_differing else tokens for row, tokens in outputs.items()}
        apart = tuple(Divergence(row, 0, "tie", "tokens", 0.0, 1.0, outputs[row], (1,)) for row in range(differing))
        return decode_doubt(DecodeResult("greedy", count, apart), options, sources, outputs, session, 8)

    def test_half_is_not_most(self, torch16):
        assert self.doubt(torch16, 20, ()) is None
        assert self.doubt(torch16, 21, ()) is not None

    def test_pytorch_that_agrees_everywhere_excuses_nothing(self, torch16):
        doubt = self.doubt(torch16, 21, ())
        assert not doubt
        assert f"19 of 40 equal (PyTorch fp16: {SAMPLE} of {SAMPLE} equal)" in doubt.reason

    def test_pytorch_that_differs_as_often_does(self, torch16):
        doubt = self.doubt(torch16, 30, range(5, 36))
        assert doubt
        assert doubt.reason == ""
        assert "no fewer than of PyTorch fp16" in doubt.excuse

    def test_pytorch_that_differs_less_often_does_not(self, torch16):
        assert not self.doubt(torch16, 40, range(20))

    def test_few_sources_are_evidence_too(self, torch16):
        assert not self.doubt(torch16, 2, (), count=2)

    @pytest.mark.parametrize(
        ("first", "second", "more"), [(0, 0, False), (5, 0, False), (6, 0, True), (10, 9, False), (20, 4, True)]
    )
    def test_the_sign_test_detects_more_frequent_differences(self, first, second, more):
        assert more_often(first, second) is more

    def test_rows_reach_over_all(self):
        assert spread_rows(3, 5) == [0, 1, 2]
        assert spread_rows(101, 5) == [0, 25, 50, 75, 100]


def rate(low, high, metric="WER", lines=400):
    one = Interval(0.3, 0.2, 0.4)
    return Rate("greedy", metric, lines, one, one, Difference((low + high) / 2, low, high))


class TestQuality:
    @pytest.mark.parametrize(
        ("metric", "low", "high", "fell"),
        [("WER", 0.01, 0.02, True), ("PER", 0.0, 0.02, False), ("BLEU", -3.0, -1.0, True), ("chrF", 1.0, 3.0, False)],
    )
    def test_a_score_falls_where_its_whole_interval_is_worse(self, metric, low, high, fell):
        assert rate(low, high, metric).significantly_worse is fell

    def test_what_falls_is_a_reason(self):
        (doubt,) = quality_doubts([rate(0.01, 0.03), rate(-0.01, 0.01, "PER")], None, "")
        expected = "greedy: WER +2.00% [+1.00, +3.00], significantly worse, which fails even within budget"
        assert doubt.reason == expected

    def test_what_falls_for_pytorch_at_this_precision_too_is_excused(self):
        (doubt,) = quality_doubts([rate(0.01, 0.03)], [rate(-0.01, 0.01, lines=256)], "PyTorch bf16")
        assert doubt
        assert doubt.excuse == "not so against PyTorch bf16, +0.00% [-1.00, +1.00] on 256 lines"

    def test_what_falls_against_it_is_not(self):
        assert not quality_doubts([rate(0.01, 0.03)], [rate(0.01, 0.02)], "PyTorch bf16")[0]


def test_a_result_with_a_doubt_fails_at_its_level_and_in_json(bundle):
    with changed(bundle, answered=nothing) as candidate:
        result = parity_with(bundle, candidate)
    doubts = quality_doubts([rate(0.01, 0.03)], None, "")
    failed = dataclasses.replace(result, rates=(rate(0.01, 0.03),), doubts=doubts)
    assert failed.first_failure == ("quality", doubts[0])
    assert '"reason": "quality: greedy: WER' in failed.to_json()

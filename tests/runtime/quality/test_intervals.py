"""Scores with intervals: paired, repeatable, and as wide as chance makes them."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seq2engine.errors import MissingPackageError, RequestError
from seq2engine.runtime.quality.intervals import (
    METRICS,
    bootstrapped_rate,
    check_metrics,
    difference_text,
    rates_from_outputs,
)

REFERENCES = {"a": ["x y z"], "b": ["x y"], "c": ["x", "y"], "d": ["z z z z"]}
RIGHT = {"a": "x y z", "b": "x y", "c": "y", "d": "z z z z"}
WRONG = {**RIGHT, "b": "x q"}


def rates(reference, candidate, references=REFERENCES, metrics=("errors",)):
    return {rate.metric: rate for rate in rates_from_outputs("greedy", reference, candidate, references, metrics)}


class TestErrors:
    def test_values_are_those_of_the_whole_corpus(self):
        found = rates(RIGHT, WRONG)
        assert list(found) == ["WER", "lines wrong"]
        assert found["WER"].reference.value == 0.0
        assert found["WER"].candidate.value == pytest.approx(1 / 10)
        assert found["lines wrong"].difference.value == pytest.approx(1 / 4)
        assert found["lines wrong"].worse_by == pytest.approx(1 / 4)

    def test_equal_sides_differ_by_nothing_in_every_resample(self):
        """Both are resampled alike, however wide their own intervals are."""
        rate = rates(WRONG, WRONG)["WER"]
        assert rate.candidate.low < rate.candidate.value < rate.candidate.high
        assert (rate.difference.low, rate.difference.value, rate.difference.high) == (0.0, 0.0, 0.0)

    def test_stress_marks_are_counted_with_and_without(self):
        found = rates({"w": "AH0 B"}, {"w": "AH1 B"}, {"w": ["AH0 B"]})
        assert list(found) == ["PER", "WER", "PER, no stress", "WER, no stress"]
        assert found["PER"].candidate.value == 0.5
        assert found["PER, no stress"].candidate.value == 0.0

    @settings(max_examples=20, deadline=None)
    @given(st.lists(st.booleans(), min_size=30, max_size=60))
    def test_intervals_hold_the_value_and_are_as_wide_as_a_share_s(self, wrong):
        errors = np.array([wrong, wrong], dtype=float)
        rate = bootstrapped_rate("greedy", "WER", errors, np.ones_like(errors))
        share = np.mean(wrong)
        deviation = np.sqrt(share * (1 - share) / len(wrong))
        assert rate.candidate.low <= rate.candidate.value <= rate.candidate.high
        assert rate.candidate.high - rate.candidate.low == pytest.approx(2 * 1.96 * deviation, rel=0.35, abs=0.02)


class TestMetrics:
    def test_unknown_ones_are_refused(self):
        with pytest.raises(RequestError, match=r"unknown metric 'rouge', expected one of errors, bleu, chrf"):
            check_metrics(["errors", "rouge"])
        assert METRICS == ("errors", "bleu", "chrf")

    def test_without_sacrebleu_one_line_names_what_to_install(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "sacrebleu", None)
        monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
        with pytest.raises(MissingPackageError, match=r"pip install 'seq2engine\[metrics\]'"):
            check_metrics(["bleu"])
        check_metrics(["errors"])

    def test_without_rapidfuzz_one_line_names_what_to_install(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "rapidfuzz", None)
        monkeypatch.delitem(sys.modules, "rapidfuzz.distance.Levenshtein", raising=False)
        monkeypatch.delitem(sys.modules, "rapidfuzz.distance", raising=False)
        with pytest.raises(MissingPackageError, match=r"counting errors needs rapidfuzz.*pip install 'rapidfuzz'"):
            check_metrics(["errors"])

    def test_with_sacrebleu_values_are_its_own(self):
        sacrebleu = pytest.importorskip("sacrebleu")
        outputs = {"one": "the cat sat on the mat", "two": "a dog barked at the old gate"}
        right = {"one": ["the cat sat on a mat"], "two": ["a dog barked at the gate", "the dog barked at the old gate"]}
        found = rates(outputs, outputs, right, ("bleu", "chrf"))
        streams = [[targets[0] for targets in right.values()], [None, right["two"][1]]]
        assert found["BLEU"].candidate.value == pytest.approx(
            sacrebleu.BLEU().corpus_score(list(outputs.values()), streams).score
        )
        assert found["chrF"].candidate.value == pytest.approx(
            sacrebleu.CHRF().corpus_score(list(outputs.values()), streams).score
        )

    def test_a_drop_of_bleu_is_significant_and_equal_outputs_never_are(self):
        right = {f"source {i}": [f"the cat number {i} sat on the old mat"] for i in range(40)}
        good = {source: targets[0] for source, targets in right.items()}
        bad = {
            source: text.replace("sat on the", "fell") if i % 2 else text
            for i, (source, text) in enumerate(good.items())
        }
        worse = rates(good, bad, right, ("bleu", "chrf"))
        for rate in worse.values():
            assert rate.significantly_worse
            assert rate.worse_by == pytest.approx(rate.reference.value - rate.candidate.value)
            assert rate.candidate.low < rate.candidate.value < rate.candidate.high
            assert difference_text(rate).endswith(f"(p = {rate.difference.p_value:.2g})")
        better, equal = (rates(bad, other, right, ("bleu",))["BLEU"] for other in (good, bad))
        assert not better.significantly_worse
        assert not equal.significantly_worse
        assert difference_text(equal) == "+0.00"

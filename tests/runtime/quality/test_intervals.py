"""Scores with intervals: paired, repeatable, and as wide as chance makes them."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seq2engine.errors import MissingPackageError, RequestError
from seq2engine.runtime.quality.intervals import METRICS, check_metrics, rate_of, rates_from_outputs

REFERENCES = {"a": ["x y z"], "b": ["x y"], "c": ["x", "y"], "d": ["z z z z"]}
RIGHT = {"a": "x y z", "b": "x y", "c": "y", "d": "z z z z"}
WRONG = {**RIGHT, "b": "x q"}


def rates(reference, candidate, references=REFERENCES, metrics=("errors",)):
    return {rate.metric: rate for rate in rates_from_outputs("greedy", reference, candidate, references, metrics)}


class TestErrors:
    def test_values_are_those_of_the_whole_corpus(self):
        found = rates(RIGHT, WRONG)
        assert list(found) == ["PER", "WER"]
        assert found["PER"].reference.value == 0.0
        assert found["PER"].candidate.value == pytest.approx(1 / 10)
        assert found["WER"].difference.value == pytest.approx(1 / 4)
        assert found["WER"].worse_by == pytest.approx(1 / 4)

    def test_equal_sides_differ_by_nothing_in_every_resample(self):
        """Both are resampled alike, however wide their own intervals are."""
        rate = rates(WRONG, WRONG)["WER"]
        assert rate.candidate.low < rate.candidate.value < rate.candidate.high
        assert (rate.difference.low, rate.difference.value, rate.difference.high) == (0.0, 0.0, 0.0)

    def test_stress_marks_are_counted_with_and_without(self):
        found = rates({"w": "AH0 B"}, {"w": "AH1 B"}, {"w": ["AH0 B"]})
        assert found["PER"].candidate.value == 0.5
        assert found["PER, no stress"].candidate.value == 0.0

    @settings(max_examples=20, deadline=None)
    @given(st.lists(st.booleans(), min_size=30, max_size=60))
    def test_intervals_hold_the_value_and_are_as_wide_as_a_share_s(self, wrong):
        table = np.array([[flag, 1, flag] for flag in wrong], dtype=float)
        rate = rate_of("greedy", "WER", (table, table), lambda sums: sums[:, 2] / len(wrong))
        share = np.mean(wrong)
        deviation = np.sqrt(share * (1 - share) / len(wrong))
        assert rate.candidate.low <= rate.candidate.value <= rate.candidate.high
        assert rate.candidate.high - rate.candidate.low == pytest.approx(2 * 1.96 * deviation, rel=0.35, abs=0.02)


class TestMetrics:
    def test_unknown_ones_are_refused(self):
        with pytest.raises(RequestError, match=r"unknown metric 'rouge', expected one of errors, bleu, chrf"):
            check_metrics(["errors", "rouge"])
        assert METRICS == ("errors", "bleu", "chrf")

    def test_without_sacrebleu_one_line_says_what_to_install(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "sacrebleu", None)
        monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
        with pytest.raises(MissingPackageError, match=r"pip install 'seq2engine\[text\]'"):
            check_metrics(["bleu"])
        check_metrics(["errors"])

    def test_with_a_stand_in_references_come_as_streams_and_sums_are_scored(self, monkeypatch):
        """The stand-in counts words that match, in the shape of sacrebleu's own statistics."""
        seen = []

        class Matching:
            def _extract_corpus_statistics(self, said, streams):
                seen.append(streams)
                rights = [[target for target in targets if target] for targets in zip(*streams, strict=True)]
                return [[line in right, 1] for line, right in zip(said, rights, strict=True)]

            def _compute_score_from_stats(self, sums):
                return types.SimpleNamespace(score=100 * sums[0] / sums[1])

        stand_in = types.SimpleNamespace(BLEU=Matching, CHRF=Matching)
        monkeypatch.setitem(sys.modules, "sacrebleu", types.SimpleNamespace(metrics=stand_in))
        monkeypatch.setitem(sys.modules, "sacrebleu.metrics", stand_in)
        found = rates(RIGHT, WRONG, metrics=("bleu", "chrf"))
        assert seen[0] == [["x y z", "x y", "x", "z z z z"], [None, None, "y", None]]
        assert (found["BLEU"].reference.value, found["chrF"].candidate.value) == (100.0, 75.0)
        assert found["BLEU"].worse_by == 25.0

    def test_with_sacrebleu_values_are_its_own(self):
        sacrebleu = pytest.importorskip("sacrebleu")
        said = {"one": "the cat sat on the mat", "two": "a dog barked at the old gate"}
        right = {"one": ["the cat sat on a mat"], "two": ["a dog barked at the gate", "the dog barked at the old gate"]}
        found = rates(said, said, right, ("bleu", "chrf"))
        streams = [[targets[0] for targets in right.values()], [None, right["two"][1]]]
        assert found["BLEU"].candidate.value == pytest.approx(
            sacrebleu.BLEU().corpus_score(list(said.values()), streams).score
        )
        assert found["chrF"].candidate.value == pytest.approx(
            sacrebleu.CHRF().corpus_score(list(said.values()), streams).score
        )

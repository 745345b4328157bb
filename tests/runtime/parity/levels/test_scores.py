"""Scores of equal outputs have a budget of their own, which PyTorch's error gives them."""

from __future__ import annotations

import dataclasses

from support.parity_cases import SMALL, bundle_of, parity_with

from seq2engine.runtime.numerics.budgets import DecodeResult, ScoreResult
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.parity.levels.divergence import Judge, Rescored
from seq2engine.runtime.search.options import SearchOptions


def test_scores_are_compared_where_tokens_are_equal(tmp_path):
    bundle = bundle_of(dataclasses.replace(SMALL, decoder_layers=1, encoder_layers=1), tmp_path)
    with open_session(bundle, "onnxruntime", "fp32", threads=1) as candidate:
        result = parity_with(bundle, candidate, count=4, max_length=6, beam=2, batch=4)
    assert result, result.reason
    greedy, beam = result.decodes
    assert greedy.scores is None  # greedy search compares nothing, so it has no score here
    assert beam.scores.compared == beam.equal
    assert 0.0 <= beam.scores.difference <= beam.scores.largest <= 1e-3


def test_the_budget_grows_with_the_output_and_a_wrong_score_is_beyond_it(tmp_path):
    bundle = bundle_of(dataclasses.replace(SMALL, decoder_layers=1, encoder_layers=1), tmp_path)
    with (
        open_session(bundle, "torch", "fp64", threads=1) as oracle,
        open_session(bundle, "torch", "fp32", threads=1) as reference,
    ):
        judge = Judge(oracle, reference, 4, usual=1e-6)
        for beam in (1, 2):
            options = SearchOptions(max_length=12, beam=beam, length_penalty=0.0)
            budgets = [
                judge.scores([Rescored(0, [5, 6], tuple(range(4, 4 + length)), 0.1)], options).budget
                for length in (2, 8)
            ]
            assert 0.0 < budgets[0] < budgets[1] < 1e-3
        wrong = judge.scores([Rescored(3, [5, 6], (7, 8), 0.1), Rescored(4, [5], (7, 8), 1e-8)], options)
        assert not wrong
        assert wrong.compared == 2
        assert "score of source 3 differs by 0.1" in DecodeResult("greedy", 2, scores=wrong).reason
        assert judge.scores([], options) is None


def test_a_result_without_a_difference_holds():
    assert ScoreResult(3, 0, 0.0, 0.0, 0.0)
    assert DecodeResult("greedy", 3, scores=ScoreResult(3, 0, 0.0, 0.0, 0.0))

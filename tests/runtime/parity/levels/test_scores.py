"""Scores of equal outputs have a budget of their own, which PyTorch's error gives them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.hugging_face_models import batch_of, small_model, sources, up_to_end
from support.parity_cases import SMALL, bundle_of, parity_with
from transformers import GenerationConfig

from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.importers.hugging_face import checkpoint_from_hugging_face
from seq2engine.runtime.generate import generate
from seq2engine.runtime.numerics.budgets import DecodeResult, ScoreResult
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.parity.levels.divergence import Judge, Rescored
from seq2engine.runtime.parity.levels.tensors import usual_spread
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


@pytest.mark.slow
@pytest.mark.parametrize("penalty", [-1.0, 1.0])
def test_long_outputs_have_the_scores_of_transformers_within_their_budget(tmp_path, penalty):
    """A sum of a hundred log-probabilities, at a penalty of -1 times its length: 1e-3 would be no bound."""
    length, rows = 96, sources()[:4]
    model = small_model("marian", 3, max_position_embeddings=length).eval()
    names = ("decoder_start_token_id", "eos_token_id", "pad_token_id")
    model.generation_config = GenerationConfig(
        num_beams=2,
        max_new_tokens=length - 1,
        min_new_tokens=length - 8,
        length_penalty=penalty,
        return_dict_in_generate=True,
        output_scores=True,
        **{name: getattr(model.config, name) for name in names},
    )
    ids, mask = batch_of(rows, model.config.pad_token_id)
    with torch.inference_mode():
        theirs = model.generate(ids, attention_mask=mask)
    expected = [up_to_end(row[1:], model.config.eos_token_id) for row in theirs.sequences.tolist()]
    model.save_pretrained(tmp_path / "library")
    ours = checkpoint_from_hugging_face(tmp_path / "library").model
    bundle = onnx_from_model(ours, tmp_path / "bundle", ("fp32",))
    options = SearchOptions(max_length=length - 1, min_length=length - 8, beam=2, length_penalty=penalty)
    with (
        open_session(bundle, "torch", "fp64", threads=1) as oracle,
        open_session(bundle, "torch", "fp32", threads=1) as reference,
        open_session(bundle, "onnxruntime", "fp32", threads=1) as candidate,
    ):
        judge = Judge(oracle, reference, 4, usual_spread(oracle, reference, rows, SearchOptions(max_length=8), 4))
        best = [found[0] for found in generate(candidate, rows, options)]
        cases = [
            Rescored(row, rows[row], one.tokens, abs(one.score - score))
            for row, (one, score) in enumerate(zip(best, theirs.sequences_scores.tolist(), strict=True))
            if list(one.tokens) == expected[row]
        ]
        result = judge.scores(cases, options)
    assert result is not None
    assert result, result.reason

"""Workloads and their sources."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from seq2engine.benchmarks.cases import (
    CASES,
    Case,
    case_problems,
    cases_at_lengths,
    cases_for,
    cases_from_grid,
    cases_from_text,
    size_problems,
    sources_for,
)
from seq2engine.errors import UsageError
from seq2engine.model.config import ModelConfig
from seq2engine.model.presets import PRESETS

TINY = PRESETS["tiny"]


def test_default_cases_fit_every_preset():
    for config in PRESETS.values():
        assert config.takes_features or cases_for(config) == CASES
        assert case_problems(cases_for(config), config) == []


def test_default_cases_are_cut_to_the_model():
    small = dataclasses.replace(TINY, max_source=7, max_target=5)
    assert {(case.source, case.target) for case in cases_for(small)} == {(7, 5)}
    assert [(case.batch, case.beam) for case in cases_for(small)] == [(1, 1), (1, 4), (8, 1), (8, 4)]


def test_sources_are_seeded_whole_and_ordinary():
    case = Case("x", batch=50, beam=1, source=40, target=1)
    config = dataclasses.replace(TINY, source_vocab=9, target_vocab=9, pad_id=8, start_id=0, end_id=3)
    sources = sources_for(case, config, seed=1)
    assert sources == sources_for(case, config, seed=1)
    assert sources != sources_for(case, config, seed=2)
    assert [len(source) for source in sources] == [40] * 50
    assert {token for source in sources for token in source} == {1, 2, 4, 5, 6, 7}
    assert all(type(token) is int for token in sources[0])


def test_beam_does_not_change_the_sources():
    greedy, beam = (Case("x", batch=2, beam=beam, source=5, target=5) for beam in (1, 4))
    assert sources_for(greedy, TINY) == sources_for(beam, TINY)


def test_every_problem_is_listed():
    cases = [Case("a", 0, 1, 65, 64), Case("b", 1, -1, 1, 65), Case("b", 1, 1, 1, 1)]
    assert size_problems(cases) == [
        "two cases are called b",
        "case a: batch 0, expected at least 1",
        "case b: beam -1, expected at least 1",
    ]
    assert case_problems(cases, TINY) == [
        "case a: source 65, the model takes at most 64",
        "case b: output 65, the model gives at most 64",
    ]
    assert size_problems([]) == ["no case to time"]


def test_a_vocabulary_of_special_tokens_has_no_sources():
    config = ModelConfig(source_vocab=3, target_vocab=3)
    assert case_problems(CASES, config) == ["the source vocabulary of 3 has nothing but special tokens"]


def test_cases_from_text():
    assert cases_from_text(["8x4x32x16"]) == (Case("8x4x32x16", batch=8, beam=4, source=32, target=16),)
    assert str(cases_from_text(["8x4x32x16"])[0]) == "batch 8, beam 4, source 32, output 16"


def test_text_that_is_no_case_is_refused():
    with pytest.raises(UsageError, match="case 8x4, 1x1x-3x2, axbxcxd: expected batch x beam x source x output"):
        cases_from_text(["8x4", "1x1x3x2", "1x1x-3x2", "axbxcxd"])


def test_cases_are_swept_over_output_lengths():
    cases = cases_at_lengths(cases_from_text(["8x4x32x16", "8x4x32x99", "1x1x5x7"]), [64, 128])
    assert [case.name for case in cases] == ["8x4x32x64", "8x4x32x128", "1x1x5x64", "1x1x5x128"]
    assert cases[1] == Case("8x4x32x128", batch=8, beam=4, source=32, target=128)


def test_a_sweep_is_every_combination_cut_to_the_model():
    config = dataclasses.replace(PRESETS["tiny"], max_source=64, max_target=32)
    found = cases_from_grid(config, {"batch": [1, 3]})
    assert len(found) == 2 * 2 * 2  # batch, beam, source; both outputs are cut to one
    assert {(case.source, case.target) for case in found} == {(32, 32), (64, 32)}
    assert found[0] == Case("1x1x32x32", 1, 1, 32, 32)


def test_a_window_of_audio_has_one_length() -> None:
    config = PRESETS["whisper-tiny.en"]
    assert {case.source for case in cases_for(config)} == {1500}
    assert not case_problems(cases_for(config), config)
    wrong = [Case("short", 1, 1, 32, 32), Case("long", 1, 1, 1500, 448)]
    assert case_problems(wrong, config) == [
        "case short: source 32, a window of audio has 1500",
        "case long: output 448, the model gives at most 447",
    ]
    case = dataclasses.replace(wrong[1], batch=2)
    sources, again, others = ([source.features for source in sources_for(case, config, seed)] for seed in (1, 1, 2))
    assert [features.shape for features in sources] == [(80, 3000)] * 2
    assert np.array_equal(sources, again)
    assert not np.array_equal(sources, others)

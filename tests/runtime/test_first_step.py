"""The first step of several beams has one row for each source: outputs are those of a step of all beams."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.rounding import rounding_from_session

from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.steps import tree_cache
from seq2engine.runtime.text.continuous_batching import translate_many

TINY = dataclasses.replace(PRESETS["tiny"], source_vocab=60, target_vocab=60, max_source=24, max_target=24)
POSITIONS = {"sinusoidal": TINY, "relative": dataclasses.replace(TINY, positions="relative", max_distance=9)}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all hypotheses, CTranslate2's style": {"nbest": 3, "beam_style": "ctranslate2"},
    "shortlist": {"shortlist": tuple(range(3, 40))},
    "shortlist of fewer tokens than beams": {"shortlist": (7, 9)},
    "coverage": {"coverage_penalty": 0.3, "alignments": True},
    "prefix": {"prefix": (11, 12)},
    "prompt": {"prompt": (11, 12, 13)},
    "rules": {"banned": ((5,), (6, 7)), "min_length": 4, "no_repeat_ngram": 2, "repetition_penalty": 1.3},
    "phrases": {"phrases": ((21, 22),)},
    "alternatives": {"alternatives": True, "nbest": 3, "beam": 2},
    "samples": {"sample": True, "nbest": 3, "seed": 5, "beam": 1},
}


@pytest.fixture(scope="module", params=list(POSITIONS))
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("first") / "bundle"
    bundle = onnx_from_model(random_model(POSITIONS[request.param], seed=3), folder, ("fp32",))
    with open_session(bundle, threads=1, attention=True, draft=None) as opened, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_cache, "FIRST_STEP", 1)  # it pays for a small model, too
        yield opened


def sources_of(count: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 60, rng.integers(1, 24)).tolist() for _ in range(count)]


@pytest.mark.parametrize("given", list(OPTIONS.values()), ids=list(OPTIONS))
def test_outputs_are_those_of_steps_of_all_beams(session: Any, given: dict[str, Any], monkeypatch: Any) -> None:
    options = SearchOptions(**{"beam": 4, "max_length": 10, **given})
    sources = sources_of(5, seed=1)
    beams: list[int] = []

    def counting(honest: Any) -> Any:
        def counted(state: Any, tokens: np.ndarray, *rest: Any) -> Any:
            beams.append(tokens.shape[1])
            return honest(state, tokens, *rest)

        return counted

    monkeypatch.setattr(session, "step", counting(session.step))
    monkeypatch.setattr(session, "ahead", None)  # there the first step is the library's
    found = generate(session, sources, options)
    width = options.width
    assert beams.count(1) == 1
    assert set(beams) == {1, width}
    monkeypatch.setattr(session, "fewer_beams", False)
    beams.clear()
    expected = generate(session, sources, options)
    assert set(beams) == {width}
    near = rounding_from_session(session, sources, 10, stretch=options.repetition_penalty)
    for ours, theirs in zip(found, expected, strict=True):
        assert [(one.tokens, one.alignments) for one in ours] == [(one.tokens, one.alignments) for one in theirs]
        assert [one.score for one in ours] == near.scores(theirs, options)


@pytest.mark.parametrize("rows", [2, 3])
def test_sources_that_begin_later_join_beams_that_differ(session: Any, rows: int, monkeypatch: Any) -> None:
    options, sources = SearchOptions(beam=3, max_length=10), sources_of(7, seed=2)
    found = dict(translate_many(session, sources, options, rows))
    monkeypatch.setattr(session, "fewer_beams", False)
    expected = [generate(session, [source], options)[0] for source in sources]
    assert [found[number][0].tokens for number in range(7)] == [nbest[0].tokens for nbest in expected]

"""Prompts: read in one call or by steps, of one length or several, they leave a decode in the same state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.rounding import tensor_error
from support.whisper_models import audio_config, features

from seq2engine.errors import RequestError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.encoder_inputs import encoder_inputs, listed_sources
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.session import Session
from seq2engine.runtime.steps.tree_cache import TreeStep
from seq2engine.runtime.text.continuous_batching import translate_many

CONFIG = audio_config()
SOURCES = features(5, CONFIG.mels)
# One token, a few, more than one call takes, none beside the start token, a few again.
PROMPTS = [[1, 9], [5, 6, 7, 1, 9], [*range(3, 45), 1], [1], [8, 1, 7]]


@pytest.fixture(scope="module", params=["static", "growing"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp(request.param) / "bundle"
    return onnx_from_model(random_model(CONFIG, 4), folder, ("fp32",), request.param)


def fed_by_steps(session: Session) -> Session:
    session.prefills = False
    return session


def fed_at_once(session: Session) -> Session:
    assert session.prefills
    return session


@pytest.mark.each_value
@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_a_prompt_is_what_a_forced_beginning_is(bundle: Bundle, backend: str, beam: int) -> None:
    """Tokens that a search is forced to emit first leave the model in the same state."""
    options = SearchOptions(max_length=20, beam=beam, length_penalty=0.0)
    expected = []
    with open_session(bundle, backend) as session:
        for source, prompt in zip(SOURCES, PROMPTS, strict=True):
            start, *forced = prompt
            alone = SearchOptions(
                max_length=20 + len(forced), beam=beam, length_penalty=0.0, start=start, prefix=tuple(forced)
            )
            expected.append(generate(session, [source], alone)[0][0].tokens[len(forced) :])
    ways: list[Callable[[Session], Session]] = [fed_at_once, fed_by_steps]
    for way in ways:
        with open_session(bundle, backend) as session:
            found = generate(way(session), SOURCES, options, prompts=PROMPTS)
            assert [best.tokens for best, *_ in found] == expected
            fed = dict(translate_many(session, SOURCES, options, batch=2, prompts=PROMPTS))
            assert [fed[row][0].tokens for row in range(len(SOURCES))] == expected


@pytest.mark.each_value
@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_logits_inside_a_prompt_can_be_asked_for(bundle: Bundle, backend: str, beam: int) -> None:
    rows, asked = np.arange(5), [1, 3, 40, 0, 1]  # of the fourth, the last token: nothing is read of it yet
    found = []
    for way in (fed_at_once, fed_by_steps):
        with open_session(bundle, backend) as session:
            state = session.encode(*encoder_inputs(listed_sources(SOURCES, CONFIG), CONFIG))
            found.append(TreeStep(way(session), state, 5, beam, 20).feed(rows, PROMPTS, asked))
    with open_session(bundle, backend) as session:
        for row in (1, 2, 4):
            state = session.encode(*encoder_inputs(listed_sources(SOURCES[row : row + 1], CONFIG), CONFIG))
            step, fed = TreeStep(session, state, 1, 1, 50), np.zeros((1, 1), dtype=np.int64)
            for token in PROMPTS[row][: asked[row] + 1]:
                logits = step(np.array([[token]]), fed).logits[0, 0]
            for one in found:
                np.testing.assert_allclose(one[row], logits, rtol=0, atol=tensor_error(CONFIG, logits))
    assert [sorted(one) for one in found] == [[1, 2, 4], [1, 2, 4]]


@pytest.mark.parametrize("cache_form", ["static", "growing"])
@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_prompts_of_a_model_with_relative_positions(backend: str, cache_form: str, tmp_path: Path) -> None:
    config = dataclasses.replace(PRESETS["tiny"], positions="relative", max_distance=4, norm="pre", norm_kind="rms")
    bundle = onnx_from_model(random_model(config, 4), tmp_path / "bundle", ("fp32",), cache_form)
    texts = [[5, 17, 250, 9, 41], [77, 3], [12, 200, 31]]
    prompts, options = [[1, 9], [5, 6, 7, 1, 9], [1]], SearchOptions(max_length=12, beam=3, length_penalty=0.0)
    with open_session(bundle, backend) as session:
        expected = []
        for text, (start, *forced) in zip(texts, prompts, strict=True):
            alone = SearchOptions(12 + len(forced), beam=3, length_penalty=0.0, start=start, prefix=tuple(forced))
            expected.append(generate(session, [text], alone)[0][0].tokens[len(forced) :])
        found = generate(session, texts, options, prompts=prompts)
        assert [best.tokens for best, *_ in found] == expected


def test_a_bitwise_session_reads_prompts_by_steps(tmp_path: Path) -> None:
    bundle = onnx_from_model(random_model(CONFIG, 4), tmp_path / "bundle", ("fp32",))
    options = SearchOptions(max_length=12, beam=2)
    with open_session(bundle, deterministic=True) as session:
        together = generate(session, SOURCES, options, prompts=PROMPTS)
        alone = [generate(session, [SOURCES[row]], options, prompts=[PROMPTS[row]])[0] for row in range(5)]
        assert [[one.score for one in every] for every in together] == [[one.score for one in every] for every in alone]


def test_wrong_prompts_are_named(bundle: Bundle) -> None:
    options = SearchOptions(max_length=60)
    with open_session(bundle, "torch") as session:
        with pytest.raises(RequestError, match="2 prompts for 5 sources, expected one for each"):
            generate(session, SOURCES, options, prompts=PROMPTS[:2])
        wrong = [[], [60], [1] * 30, [1], [1]]
        with pytest.raises(RequestError) as refused:
            generate(session, SOURCES, options, prompts=wrong)
        for problem in (
            "0 has an empty prompt",
            "1 has a prompt with token 60",
            "2 has a prompt of 30 tokens, at most 21",
        ):
            assert f"source {problem}" in str(refused.value)
        with pytest.raises(RequestError, match="max length 80 after a prompt of 1 tokens, at most 79"):
            generate(session, SOURCES, SearchOptions(max_length=80, prompt=(7,)))
        with pytest.raises(RequestError, match="source_no_repeat_ngram asked for, but sources of audio have no tokens"):
            generate(session, SOURCES, SearchOptions(max_length=8, source_no_repeat_ngram=2))

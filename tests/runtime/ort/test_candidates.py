"""Candidates made in the graph against candidates made of its logits: the same tokens, whatever is asked for."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rounding import assert_same_outputs, rounding_from_session

from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.search.option_checks import BEAM_STYLES
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step import Hypothesis
from seq2engine.runtime.search.step_output import StepOutput
from seq2engine.runtime.session import Session
from seq2engine.runtime.text.continuous_batching import translate_many

CONFIG = dataclasses.replace(
    PRESETS["tiny"], source_vocab=211, target_vocab=211, tie_output=False, share_embeddings=False
)
SOURCES = [[5, 6, 7], [9], [40, 41, 42, 43, 44, 45], [13, 12]]
RULES: dict[str, dict[str, Any]] = {
    "none": {},
    "repetition": {"repetition_penalty": 1.3, "no_repeat_ngram": 2},
    "lists": {"banned": ((17,), (4, 5)), "first_banned": (48,), "min_length": 3},
    "allowed": {"allowed": tuple(range(0, 211, 3))},
    "forced": {"prefix": (7, 8)},  # a forced end would tie twins again, but for the rounding of their normalisers
}


@pytest.fixture(scope="module", params=["static", "growing"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Every token has a twin with the same row of the projection: ties at every step."""
    model = random_model(CONFIG, seed=3)
    with torch.no_grad():
        model.output.weight[101:201] = model.output.weight[1:101]
        model.output.weight *= 3  # peaky enough for beams to differ
    path = tmp_path_factory.mktemp("ties") / request.param
    return onnx_from_model(model, path, precisions=("fp32", "fp16"), cache_form=request.param)


@pytest.fixture(scope="module", params=["fp32", "fp16"])
def session(request: pytest.FixtureRequest, bundle: Bundle) -> Any:
    with open_session(bundle, precision=request.param, threads=1) as opened:
        yield opened


def by_logits(session: Session) -> Any:
    """The session's answers without what its graph has made of them."""
    step = session.step
    return mock.patch.object(session, "step", lambda *given: StepOutput(step(*given).logits))


def same(
    ours: list[list[Hypothesis]], theirs: list[list[Hypothesis]], session: Session, options: SearchOptions
) -> None:
    """The logits are the same bits; only their exponentials are summed up by another library."""
    near = rounding_from_session(session, SOURCES, options.max_length, stretch=options.repetition_penalty)
    assert_same_outputs(ours, theirs, near.of_normaliser(), options)


@pytest.mark.slow
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("beam_style", BEAM_STYLES)
def test_every_search_finds_the_same(session: Session, beam_style: str, rules: str) -> None:
    for beam in (1, 2, 4, 8):
        options = SearchOptions(max_length=7, beam=beam, nbest=beam, beam_style=beam_style, **RULES[rules])
        found = generate(session, SOURCES, options)
        with by_logits(session):
            same(found, generate(session, SOURCES, options), session, options)


def test_samples_are_the_same(session: Session) -> None:
    options = SearchOptions(max_length=7, sample=True, nbest=3, seed=1, top_k=20)
    found = generate(session, SOURCES, options)
    with by_logits(session):
        same(found, generate(session, SOURCES, options), session, options)


@pytest.mark.each_value
@settings(max_examples=15, deadline=None)
@given(
    sources=st.lists(st.lists(st.integers(3, 210), min_size=1, max_size=8), min_size=1, max_size=9),
    beam=st.integers(1, 5),
    length=st.integers(1, 8),
    batch=st.integers(1, 4),
)
def test_continuous_batching_reads_its_own_rows(
    session: Session, sources: list[list[int]], beam: int, length: int, batch: int
) -> None:
    options = SearchOptions(max_length=length, beam=beam)
    found = sorted(translate_many(session, sources, options, batch))
    with by_logits(session):
        again = sorted(translate_many(session, sources, options, batch))
    same([hypotheses for _, hypotheses in found], [hypotheses for _, hypotheses in again], session, options)


def test_where_no_rule_asks_for_them_no_logits_are_read(session: Session) -> None:
    with mock.patch.object(StepOutput, "logits", property(lambda answer: pytest.fail("somebody reads the logits"))):
        generate(session, SOURCES, SearchOptions(max_length=4, beam=4))

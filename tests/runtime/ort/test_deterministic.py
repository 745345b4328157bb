"""Deterministic sessions: outputs are bitwise batch-invariant, in every precision."""

from __future__ import annotations

import dataclasses
from functools import cache
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seq2engine.errors import RequestError, SessionError
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.encoder_inputs import padded
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.parity.options import ParityOptions
from seq2engine.runtime.parity.run import parity_of
from seq2engine.runtime.search import step as step_module
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step_output import StepOutput
from seq2engine.runtime.text.continuous_batching import translate_many

LENGTH, POOL = 40, 8
CONFIG = dataclasses.replace(
    PRESETS["tiny"],
    d_model=32,
    d_ff=48,
    source_vocab=40,
    target_vocab=40,
    max_source=30,  # of which only 24 can be had in steps of 8
    max_target=LENGTH,
    positions="learned",
    norm="pre",
)
SOURCES = [
    np.random.default_rng(length).integers(3, CONFIG.source_vocab, length).tolist()
    for length in (1, 3, 5, 7, 9, 12, 17, 24)
]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return onnx_from_model(random_model(CONFIG, 3), tmp_path_factory.mktemp("b") / "b", precisions=("fp32", "fp16"))


def options(beam):
    return SearchOptions(max_length=LENGTH, beam=beam, nbest=beam)


def check_batch_invariance(session):
    """Every source gets what it gets alone, in all sorts of batches."""
    alone = cache(lambda place, beam: generate(session, [SOURCES[place]], options(beam))[0])

    @settings(max_examples=12, deadline=None, derandomize=True, database=None)
    @given(
        places=st.lists(st.integers(0, POOL - 1), min_size=1, max_size=9),
        beam=st.sampled_from([1, 2, 4]),
        fed=st.sampled_from([0, 0, 1, 3]),
        stays=st.booleans(),
    )
    def holds(places, beam, fed, stays):
        sources = [SOURCES[place] for place in places]
        leave = (lambda done: None) if stays else step_module.staying_rows
        with mock.patch.object(step_module, "staying_rows", leave):
            if fed:
                results = dict(translate_many(session, sources, options(beam), fed))
            else:
                results = dict(enumerate(generate(session, sources, options(beam))))
        for number, place in enumerate(places):
            assert results[number] == alone(place, beam), f"source {place}"

    holds()


@pytest.mark.each_value
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_another_batch_changes_no_bit(bundle, precision, threads):
    with open_session(bundle, precision=precision, threads=threads, deterministic=True) as session:
        check_batch_invariance(session)


def test_one_bit_that_depends_on_the_batch_is_seen(bundle, monkeypatch):
    """On any CPU: a step that raises one logit to the next number if it has more rows than one."""
    with open_session(bundle, precision="fp32", threads=1, deterministic=True) as session:
        step = session.step

        def moved(state, tokens, *rest):
            logits = step(state, tokens, *rest).logits.copy()
            if len(tokens) > 1:
                best = logits.argmax(axis=-1)[..., None]
                np.put_along_axis(
                    logits, best, np.nextafter(logits.max(axis=-1, keepdims=True), np.float32(np.inf)), -1
                )
            return StepOutput(logits)

        monkeypatch.setattr(session, "step", moved)
        with pytest.raises(AssertionError, match="source"):
            check_batch_invariance(session)


def test_without_it_shapes_are_those_of_the_batch(bundle):
    """Whether bits then differ is up to the CPU's kernels (with AVX-512 they do); shapes are what they go by."""
    with open_session(bundle, precision="fp16", threads=1) as session:
        widths = [
            session.encode(*padded(sources, CONFIG.pad_id))["source_mask"].shape[1]
            for sources in ([SOURCES[1]], [SOURCES[1], SOURCES[4]])
        ]
    assert widths == [3, 9]


def test_what_it_costs_is_padding_to_eight(bundle):
    with open_session(bundle, deterministic=True) as session:
        state = session.encode(*padded([[5] * 3, [6] * 9], CONFIG.pad_id))
        assert state["source_mask"].shape == (2, 16)
        assert session.tensor(state, "encoder_states").shape == (2, 9, CONFIG.d_model)  # as it was asked for
        with pytest.raises(RequestError, match="source 0 has 25 tokens, at most 24"):
            generate(session, [[5] * 25], options(1))


def test_parity_holds_of_it(bundle):
    assert parity_of(bundle, options=ParityOptions(count=4, max_length=8, threads=1, deterministic=True))


def test_only_where_it_can_be_kept(bundle, tmp_path):
    with pytest.raises(
        SessionError, match="deterministic is an option of onnxruntime, not of torch; leave --deterministic out"
    ):
        open_session(bundle, "torch", deterministic=True)
    growing = onnx_from_model(random_model(CONFIG), tmp_path / "growing", ("fp32",), cache_form="growing")
    with pytest.raises(SessionError, match=r"with a growing cache, .* --cache-form static"):
        open_session(growing, deterministic=True)
    short = onnx_from_model(random_model(dataclasses.replace(CONFIG, max_source=7)), tmp_path / "short", ("fp32",))
    with pytest.raises(SessionError, match=r"pads sources to 8 tokens, and this model takes 7; leave --determ"):
        open_session(short, deterministic=True)

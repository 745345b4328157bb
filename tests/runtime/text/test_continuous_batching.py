"""Continuous batching: the outputs of decoding alone, from a batch that stays full."""

from __future__ import annotations

import dataclasses
import threading
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stand_in_engines import BEAMS, MODEL, copied, exported, put_engines, session_over
from support.workers import workers_for_few_rows

from seq2engine.errors import RequestError
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.encoder_inputs import CALL, padded
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.parallel import workers_for
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step_output import StepOutput
from seq2engine.runtime.text.continuous_batching import translate_many
from seq2engine.runtime.torch_session import TorchSession

CONFIG = dataclasses.replace(
    PRESETS["tiny"],
    d_model=32,
    d_ff=48,
    source_vocab=40,
    target_vocab=40,
    max_source=20,
    max_target=24,
    positions="learned",
    norm="pre",
)
FORMS, BACKENDS = ("static", "growing"), ("torch", "onnxruntime")
RULES = {"min_length": 3, "no_repeat_ngram": 2, "source_no_repeat_ngram": 2, "repetition_penalty": 1.2}


def sources_of(count, seed, longest=CONFIG.max_source):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, CONFIG.source_vocab, length).tolist() for length in rng.integers(1, longest + 1, count)]


def tokens_of(results):
    return [[found.tokens for found in nbest] for nbest in results]


def fed(session, sources, options, batch, window=16):
    """The results in the order of the sources, each of which must come exactly once."""
    results = list(translate_many(session, sources, options, batch, window))
    assert sorted(number for number, _ in results) == list(range(len(sources)))
    return [found for _, found in sorted(results, key=lambda pair: pair[0])]


@pytest.fixture(scope="module")
def sessions(tmp_path_factory):
    model = random_model(CONFIG, 3)
    bundles = {
        form: onnx_from_model(model, tmp_path_factory.mktemp(form) / "b", ("fp32",), cache_form=form) for form in FORMS
    }
    return {(form, name): open_session(bundles[form], name, threads=1) for form in FORMS for name in BACKENDS}


@pytest.fixture(scope="module")
def session(sessions):
    return sessions["static", "onnxruntime"]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_fed_source_gets_what_it_gets_alone(sessions, form, backend):
    session = sessions[form, backend]

    @settings(max_examples=8, deadline=None, derandomize=True, database=None)
    @given(
        count=st.integers(1, 24),
        batch=st.integers(1, 9),
        window=st.sampled_from([0, 2, 16]),
        beam=st.sampled_from([1, 3]),
        rules=st.sampled_from([{}, RULES]),
        seed=st.integers(0, 1000),
    )
    def holds(count, batch, window, beam, rules, seed):
        sources = sources_of(count, seed)
        options = SearchOptions(max_length=16, beam=beam, nbest=beam, **rules)
        alone = [generate(session, [source], options)[0] for source in sources]
        assert tokens_of(fed(session, sources, options, batch, window)) == tokens_of(alone)

    holds()


@pytest.mark.parametrize("form", FORMS)
def test_an_engine_is_fed_within_its_limits(tmp_path, form):
    """At most 4 sources, a cache of fixed length, and memory that is written in place."""
    sources = sources_of(11, 5, longest=16)
    options = SearchOptions(max_length=12, beam=3)
    folder = put_engines(copied(exported(tmp_path)[form], tmp_path / "run7"), BEAMS)
    with session_over(folder) as session:
        found = fed(session, sources, options, batch=32)
    reference = TorchSession(MODEL)
    assert tokens_of(found) == tokens_of(generate(reference, [source], options)[0] for source in sources)


def test_the_batch_stays_full_and_the_encoder_is_called_for_several(session):
    sources, options = sources_of(60, 2), SearchOptions(max_length=24)
    lengths = [len(generate(session, [source], options)[0][0].tokens) for source in sources]
    fixed = sum(max(lengths[start : start + 16]) for start in range(0, len(lengths), 16))
    with (
        mock.patch.object(session, "step", wraps=session.step) as step,
        mock.patch.object(session, "encode", wraps=session.encode) as encode,
    ):
        fed(session, sources, options, batch=16, window=0)
    assert step.call_count <= sum(lengths) / 16 + 2 * max(lengths)  # full rows, but for the last ones
    assert step.call_count < fixed
    calls = [call.args[1] for call in encode.call_args_list]  # their masks
    assert sum(mask.size + CALL for mask in calls) < 1.1 * sum(map(len, sources)) + CALL * (2 + (60 - 16) / 2)


def test_sources_are_taken_as_there_is_room(session):
    taken = []
    results = translate_many(
        session, (taken.append(1) or source for source in sources_of(50, 4)), None, batch=4, window=0
    )
    assert not taken
    next(results)
    assert 4 <= len(taken) < 50


def test_a_row_holds_its_new_source_at_any_width(sessions):
    """Cross keys of the new source behind a mask; those of the others are unchanged."""
    old, new = [[5, 6, 7], [8, 9], [10]], [[11, 12, 13, 14, 15]]
    for session in sessions.values():
        for width in (5, 8):
            state = session.encode(*padded(old, CONFIG.pad_id))
            before = session.tensor(state, "cross_k.0")
            newcomers = session.encode(*padded(new, CONFIG.pad_id))
            session.replace(state, np.array([1]), newcomers, width)
            found = session.tensor(state, "cross_k.0")
            assert found.shape[2] == width
            assert session.tensor(state, "source_mask").sum(axis=1).tolist() == [3, 5, 1]
            assert np.array_equal(found[1, :, :5], session.tensor(newcomers, "cross_k.0")[0])
            assert np.array_equal(found[[0, 2], :, :3], before[[0, 2]])
            session.replace(state, np.array([0, 1]), session.encode(*padded([[4], [5]], CONFIG.pad_id)), 1)
            assert session.tensor(state, "source_mask").tolist() == [[True]] * 3


def test_no_source_no_result(session):
    assert list(translate_many(session, [])) == []


@pytest.mark.parametrize(
    ("sources", "options", "batch", "message"),
    [
        ([[3]], {}, 0, "batch 0 and window 16, expected at least 1 and 0"),
        ([[3]], {"max_length": 25}, 4, "max length 25, at most 24"),
        ([[3]], {"forced_bos": 40}, 4, "token 40 asked for, but the vocabulary has 0 to 39"),
    ],
)
def test_what_no_source_could_be_decoded_with_is_refused_at_once(session, sources, options, batch, message):
    with pytest.raises(RequestError, match=message):
        translate_many(session, sources, SearchOptions(**{"max_length": 8, **options}), batch)


def test_a_source_that_cannot_be_decoded_is_named_by_its_number(session):
    with pytest.raises(RequestError, match="source 7 has token 40"):
        list(translate_many(session, [*sources_of(7, 1), [40]], None, batch=2))


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A session that decodes a large batch with two workers."""
    bundle = onnx_from_model(random_model(CONFIG, 3), tmp_path_factory.mktemp("wide") / "b", ("fp32",))
    with pytest.MonkeyPatch.context() as patch:
        workers_for_few_rows(patch)
        with open_session(bundle, threads=2) as opened:
            assert len(workers_for(opened, 64, 64)) == 2
            yield opened


@pytest.mark.each_value
@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("window", [0, 2])
def test_two_workers_share_the_sources(wide, session, beam, window):
    sources, options = sources_of(150, 9), SearchOptions(max_length=16, beam=beam, nbest=beam)
    assert tokens_of(fed(wide, sources, options, 64, window)) == tokens_of(generate(session, sources, options))


def test_workers_end_with_what_they_yield(wide):
    before = threading.active_count()
    results = translate_many(wide, sources_of(300, 1), None, batch=64)
    next(results)
    assert threading.active_count() > before
    results.close()
    assert threading.active_count() == before
    with pytest.raises(RequestError, match="source 200 has token 40"):
        list(translate_many(wide, [*sources_of(200, 1), [40]], None, batch=64, window=0))
    assert threading.active_count() == before


def test_a_source_that_is_not_finite_is_named_by_its_number(session):
    step = session.step

    def broken(state, tokens, position, write_index, self_mask):
        answer = step(state, tokens, position, write_index, self_mask)
        wrong = session.tensor(state, "source_mask").sum(axis=1) == 13
        answer.logits[wrong] = np.nan
        return StepOutput(answer.logits)

    sources = [[3] * (13 if number == 37 else 5) for number in range(50)]
    with (
        mock.patch.object(session, "step", broken),
        pytest.raises(RequestError, match="source 37: the model's logits are not finite"),
    ):
        list(translate_many(session, sources, SearchOptions(max_length=6), batch=8))

"""Greedy search some tokens ahead of the host: no output changes by it, and the host waits once for some tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, reject, settings
from hypothesis import strategies as st
from support.stand_in_engines import (
    FOUR_BEAMS,
    MODEL,
    ONE_BEAM,
    SOURCES,
    THREE_BEAMS,
    copied,
    put_engines,
    session_over,
)

from seq2engine.errors import RequestError
from seq2engine.export.artifact.profiles import Range
from seq2engine.runtime.generate import generate
from seq2engine.runtime.requests import check_request
from seq2engine.runtime.search.option_checks import problems_of
from seq2engine.runtime.search.option_fields import OptionFields
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step import Emitted
from seq2engine.runtime.session import RunAhead
from seq2engine.runtime.text.continuous_batching import translate_many
from seq2engine.runtime.torch_session import TorchSession
from seq2engine.runtime.trt.session import TrtSession

LONG = dataclasses.replace(FOUR_BEAMS, batch=Range(1, 4, 8), target=Range(1, 20, 30))
FORMS = {"range of beams": LONG, "three beams": dataclasses.replace(THREE_BEAMS, target=Range(1, 20, 30))}


@pytest.fixture(scope="module")
def sessions(bundles: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, TrtSession]]:
    bundle = copied(bundles["static"], tmp_path_factory.mktemp("ahead") / "run7")
    opened = {
        name: session_over(put_engines(bundle, ranges, name=name, flavour="tensorrt")) for name, ranges in FORMS.items()
    }
    yield opened
    for session in opened.values():
        session.close()


def ahead_of(session: TrtSession, tokens: int) -> RunAhead | None:
    """As many tokens for one wait; none at all for 1."""
    own = session.passport.reductions["next_greedy"].candidates
    return None if tokens == 1 else RunAhead(tokens, own, session.ahead_memory[0].length)


TOKEN = st.integers(3, 255)
LARGEST = 64.0  # more than any logit of the model


@st.composite
def searches(draw: st.DrawFn) -> dict[str, Any]:
    """Options of greedy search that a device serves."""
    longest = draw(st.integers(1, 30))
    return {
        "max_length": longest,
        "min_length": draw(st.integers(0, longest)),
        "forced_bos": draw(st.none() | TOKEN),
        "forced_eos": draw(st.none() | st.just(MODEL.config.end_id)),
        "banned": tuple((token,) for token in draw(st.lists(TOKEN | st.just(MODEL.config.end_id), max_size=3))),
        "first_banned": tuple(draw(st.lists(TOKEN, max_size=2, unique=True))),
        "ignore_eos": draw(st.booleans()),
        "scores": draw(st.booleans()),
    }


def outputs(found: list[Any]) -> list[tuple[Any, ...]]:
    return [(one.tokens, len(one.log_probs)) for row in found for one in row]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), options=searches(), form=st.sampled_from(sorted(FORMS)), tokens=st.integers(2, 9))
def test_nothing_that_is_decoded_changes(
    data: st.DataObject, options: dict[str, Any], form: str, tokens: int, sessions: dict[str, TrtSession]
) -> None:
    session = sessions[form]
    assert session.limits.batch is not None
    most = session.limits.batch
    sources = data.draw(st.lists(st.lists(TOKEN, min_size=1, max_size=9), min_size=1, max_size=most))
    prefix = st.lists(TOKEN, max_size=min(3, options["max_length"]))
    prefixes = data.draw(st.none() | st.lists(prefix, min_size=len(sources), max_size=len(sources)))
    assume(not problems_of(OptionFields(**options)))
    search = SearchOptions(**options)
    try:
        check_request(session.limits, session.config, sources, search, prefixes=prefixes)
    except RequestError:
        reject()
    found = {}
    for count in (1, tokens):
        session.ahead = ahead_of(session, count)
        found[count] = generate(session, sources, search, prefixes=prefixes)
    assert outputs(found[tokens]) == outputs(found[1])
    for one, other in zip(*([one for row in rows for one in row] for rows in found.values()), strict=True):
        # In fp64 of the same numbers, by another way: an exp, a product, a log and two differences.
        near = 5 * np.finfo(np.float64).eps * (1 + np.abs(one.log_probs).max(initial=0.0) + LARGEST)
        np.testing.assert_allclose(one.log_probs, other.log_probs, rtol=0, atol=near)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), tokens=st.integers(2, 9), batch=st.integers(1, 4), longest=st.integers(1, 16))
def test_continuous_batching_changes_rows_between_two_waits(
    data: st.DataObject, tokens: int, batch: int, longest: int, sessions: dict[str, TrtSession]
) -> None:
    session, options = sessions["range of beams"], SearchOptions(max_length=longest)
    sources = data.draw(st.lists(st.lists(TOKEN, min_size=1, max_size=9), min_size=1, max_size=10))
    prefixes = data.draw(
        st.none() | st.lists(st.lists(TOKEN, max_size=1), min_size=len(sources), max_size=len(sources))
    )
    session.ahead = ahead_of(session, tokens)
    found = dict(translate_many(session, sources, options, batch=batch, prefixes=prefixes))
    session.ahead = None
    for number, source in enumerate(sources):
        alone = generate(session, [source], options, prefixes=None if prefixes is None else [prefixes[number]])
        assert found[number][0].tokens == alone[0][0].tokens


def test_the_host_waits_once_for_eight_tokens_and_reads_little(sessions: dict[str, TrtSession]) -> None:
    session = sessions["range of beams"]
    session.ahead = ahead_of(session, 8)
    device: Any = session.device
    for scores, record in ((True, 8 + 3 * 4), (False, 8 + 4)):
        state = (device.waits, device.received, device.allocations)
        steps: list[Emitted] = []
        options = SearchOptions(max_length=24, ignore_eos=True, scores=scores)
        generate(session, SOURCES, options, on_step=steps.append)
        assert len(steps) == 24
        assert device.waits - state[0] == 1 + 3  # the encoder's, and three times eight tokens
        assert device.received - state[1] == len(SOURCES) * 24 * record  # the token and what its score is made of
        assert device.allocations == state[2] or scores  # the first decode takes the memory of its state


def test_what_was_sent_is_not_sent_again(sessions: dict[str, TrtSession]) -> None:
    session = sessions["range of beams"]
    session.ahead = ahead_of(session, 8)
    device: Any = session.device
    sent: list[int] = []
    generate(
        session, SOURCES, SearchOptions(max_length=24, ignore_eos=True), on_step=lambda _: sent.append(device.sent)
    )
    assert len(set(sent)) == 1  # all before the first token


def test_sources_leave_at_the_next_wait(sessions: dict[str, TrtSession]) -> None:
    session = sessions["range of beams"]
    session.ahead = ahead_of(session, 4)
    moves: list[int] = []
    select, own = session.select, type(session).select
    session.select = lambda state, rows, slots: (moves.append(len(rows)), own(session, state, rows, slots))  # type: ignore
    try:
        found = generate(session, SOURCES, SearchOptions(max_length=30))
    finally:
        session.select = select  # type: ignore[method-assign]
    with TorchSession(MODEL) as reference:
        assert outputs(found) == outputs(generate(reference, SOURCES, SearchOptions(max_length=30)))
    assert moves  # one of them ends long before the others


def test_logits_of_steps_ahead_must_be_asked_for(sessions: dict[str, TrtSession]) -> None:
    session = sessions["range of beams"]
    session.ahead = ahead_of(session, 8)
    shapes: list[tuple[int, ...]] = []

    def read(emitted: Emitted) -> None:
        shapes.append(emitted.answer.logits.shape)

    with pytest.raises(RequestError, match=r"logits of these steps were not kept; decode with: .*logits=True"):
        generate(session, SOURCES, SearchOptions(max_length=3), read)
    generate(session, SOURCES, SearchOptions(max_length=3), read, logits=True)
    assert shapes == [(3, 1, MODEL.config.target_vocab)] * 3


def test_an_engine_with_few_slots_or_another_search_goes_step_by_step(bundles: dict[str, Path], tmp_path: Path) -> None:
    bundle = copied(bundles["static"], tmp_path / "run7")
    with session_over(put_engines(bundle, ONE_BEAM, slots=10, name="short")) as session:
        device: Any = session.device
        waits, steps = device.waits, []
        with pytest.raises(RequestError, match="cache slots are live"):
            generate(session, SOURCES[:1], SearchOptions(max_length=12, ignore_eos=True), on_step=steps.append)
        assert device.waits - waits == 1 + len(steps) == 11
    with session_over(put_engines(bundle, ONE_BEAM, name="usual")) as session:
        device = session.device
        for options in ({"no_repeat_ngram": 2}, {"allowed": tuple(range(3, 99))}, {"sample": True, "seed": 3}):
            waits, steps = device.waits, []
            generate(
                session, SOURCES[:1], SearchOptions(max_length=6, ignore_eos=True, **options), on_step=steps.append
            )
            assert device.waits - waits == 1 + len(steps) == 7


def test_one_token_per_wait_can_be_asked_for(bundles: dict[str, Path], tmp_path: Path) -> None:
    folder = put_engines(copied(bundles["static"], tmp_path / "run7"))
    with session_over(folder) as session:
        assert session.ahead == RunAhead(8, 8, 12)
    with session_over(folder, tokens_per_wait=1) as session:
        assert session.ahead is None

"""Greedy steps in one call of a session on the CPU: what is bound, what is kept, and plans that do not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.lively_models import CONFIG, LONGEST, VOCAB, lively_bundle, lively_sources

from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.ort_forms.screened_argmax import WANTED
from seq2engine.runtime.encoder_inputs import encoder_inputs
from seq2engine.runtime.generate import special_of
from seq2engine.runtime.kernels.library import library
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.ort.binding import OrtState
from seq2engine.runtime.ort.graphs import GraphError, model_from_bundle
from seq2engine.runtime.ort.host_chain import AHEAD, KEPT_ROWS, MOST_CANDIDATES
from seq2engine.runtime.ort.session import OrtSession, OrtSettings
from seq2engine.runtime.search.ahead.greedy_plan import GreedyPlan, greedy_plan
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.session import RunAhead, StepForm

pytestmark = pytest.mark.skipif(library() is None, reason="the kernel library is not built here, or needs AVX2")
SLOTS = 32
SCORED, UNSCORED = StepForm(best=2), StepForm(candidates=1)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return lively_bundle(tmp_path_factory.mktemp("lively") / "bundle", ["fp32"])


@pytest.fixture
def session(bundle: Bundle) -> Iterator[OrtSession]:
    with open_session(bundle, threads=1) as opened:
        assert isinstance(opened, OrtSession)
        yield opened


def state_of(session: OrtSession, batch: int, form: StepForm = SCORED, seed: int = 0, slots: int = SLOTS) -> OrtState:
    state = session.encode(*encoder_inputs(lively_sources(batch, seed), session.config))
    session.reserve(state, slots, form)
    return state


def plan_of(batch: int, **options: Any) -> GreedyPlan:
    asked = SearchOptions(max_length=SLOTS, **options)
    return greedy_plan(asked, special_of(CONFIG, asked), (), batch, VOCAB, LONGEST)


def first(batch: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full((batch, 1), CONFIG.start_id), np.zeros(batch, dtype=np.int64)


def test_what_a_session_says_of_it(session: OrtSession) -> None:
    assert session.ahead == RunAhead(AHEAD, MOST_CANDIDATES, LONGEST, undisturbed=True)


@pytest.mark.parametrize("batch", [1, 5])
def test_chooses_what_steps_show_to_be_the_best(session: OrtSession, batch: int) -> None:
    count = 8
    plan = plan_of(batch, ignore_eos=True)
    found = session.choose_alone(state_of(session, batch), *first(batch), plan, count)
    state, (tokens, position) = state_of(session, batch, StepForm()), first(batch)
    steps = found.tokens.shape[1]
    assert 0 < steps <= count
    for step in range(steps):
        mask = np.broadcast_to(np.arange(SLOTS) <= step, (batch, 1, SLOTS)).copy()
        output = session.step(state, tokens, position + step, position + step, mask)
        tokens = output.logits.argmax(axis=-1)
        assert np.array_equal(found.tokens[:, step], tokens[:, 0])
        assert np.array_equal(found.top_logits[:, step], output.logits.max(axis=-1)[:, 0])
        log_probs = np.take_along_axis(output.logits[:, 0].astype(np.float64), tokens, axis=1) - output.normaliser
        assert np.array_equal(found.log_probs[:, [step]], log_probs)


def test_a_binding_is_kept_for_small_batches(session: OrtSession) -> None:
    kept = []
    for batch in (2, 2, KEPT_ROWS, KEPT_ROWS + 1, KEPT_ROWS + 1):
        session.choose_alone(state_of(session, batch), *first(batch), plan_of(batch), 3)
        kept.append(session.host_chain)
    assert kept[0] is kept[1]
    assert kept[2] is not None
    assert kept[2] is not kept[1]
    assert kept[3] is kept[4] is None


@pytest.mark.parametrize("change", ["slots", "form", "batch"])
def test_another_shape_is_bound_anew(session: OrtSession, change: str) -> None:
    session.choose_alone(state_of(session, 2), *first(2), plan_of(2), 3)
    before = session.host_chain
    batch = 3 if change == "batch" else 2
    form = UNSCORED if change == "form" else SCORED
    state = state_of(session, batch, form, slots=40 if change == "slots" else SLOTS)
    session.choose_alone(state, *first(batch), plan_of(batch), 3)
    assert session.host_chain is not before


def test_the_candidates_of_a_step_are_enough_for_the_bans(session: OrtSession) -> None:
    """One more than are banned at once: negative where sums of probabilities are over the whole vocabulary."""
    for form, sign in ((SCORED, -1), (UNSCORED, 1)):
        for options, most in (({}, 1), ({"banned": ((9,), (11,)), "first_banned": (3,), "min_length": 4}, 5)):
            session.choose_alone(state_of(session, 2, form), *first(2), plan_of(2, **options), 3)
            assert session.host_chain is not None
            assert session.host_chain.fixed[WANTED.name] == [sign * most], options


def test_what_is_bound_is_held(session: OrtSession) -> None:
    """ONNX Runtime 1.24 reads the memory of arrays that it does not hold; and a plan's targets are copied where the
    decode is shorter than its model's longest."""
    session.choose_alone(state_of(session, 2), *first(2), plan_of(2), 3)
    chain = session.host_chain
    assert chain is not None
    assert chain.fixed["target"].shape == (2, SLOTS)
    assert {*chain.fixed, *chain.values} >= {"target", "limit", "banned", "end", "steps", "tokens", "position"}


def test_another_plan_of_the_same_state(session: OrtSession) -> None:
    """The rest of a batch, whose plan is another as sources left; and rules that differ."""
    state = state_of(session, 2)
    free = session.choose_alone(state, *first(2), plan_of(2), 4).tokens
    banned = tuple((token,) for token in sorted({int(token) for token in free[:, 0]}))
    state = state_of(session, 2)
    other = session.choose_alone(state, *first(2), plan_of(2, banned=banned), 4).tokens
    assert not {int(token) for token in other.ravel()} & {token for (token,) in banned}
    again = session.choose_alone(state_of(session, 2), *first(2), plan_of(2), 4).tokens
    assert np.array_equal(again, free)


def with_target(plan: GreedyPlan, value: int) -> GreedyPlan:
    target = plan.target.copy()
    target[1, 2] = value
    return dataclasses.replace(plan, target=target)


MISFITS: dict[str, Any] = {
    "limit 0": lambda plan: dataclasses.replace(plan, limit=np.array([SLOTS, 0])),
    "limits below 0": lambda plan: dataclasses.replace(plan, limit=np.array([SLOTS, -3])),
    "a target out of the vocabulary": lambda plan: with_target(plan, VOCAB),
    "a row of bans that is not there": lambda plan: with_target(plan, -9),
    "another batch": lambda plan: plan.of(np.array([0])),
    "bans of a smaller vocabulary": lambda plan: dataclasses.replace(plan, banned=plan.banned[:, :2].copy()),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_plan_that_does_not_fit_is_an_error(session: OrtSession, name: str) -> None:
    plan = plan_of(2)
    expected = session.choose_alone(state_of(session, 2), *first(2), plan, 6).tokens
    state = state_of(session, 2)
    with pytest.raises(GraphError, match="the plan does not fit") as failed:
        session.choose_alone(state, *first(2), MISFITS[name](plan), 6)
    assert failed.value.node == "decoder_step"
    assert np.array_equal(session.choose_alone(state, *first(2), plan, 6).tokens, expected)


def test_a_cache_that_is_too_small_is_an_error(session: OrtSession) -> None:
    state = state_of(session, 2, slots=8)
    plan = plan_of(2, ignore_eos=True)
    with pytest.raises(GraphError, match="the plan does not fit"):
        session.choose_alone(state, *first(2), plan, 9)
    found = session.choose_alone(state, *first(2), plan, 8)
    with pytest.raises(GraphError, match="the plan does not fit"):
        session.choose_alone(state, found.tokens[:, -1:], np.full(2, 8), plan, 1)


def test_an_error_inside_names_the_node(session: OrtSession) -> None:
    tokens, position = first(2)
    tokens[1] = VOCAB + 7
    with pytest.raises(GraphError, match="a token or a position is not in its table") as failed:
        session.choose_alone(state_of(session, 2), tokens, position, plan_of(2), 6)
    assert failed.value.node.startswith("target_embedding")


def test_graphs_of_a_profile_have_a_node_for_each_operator(bundle: Bundle, tmp_path: Path) -> None:

    settings = OrtSettings(threads=1, profiled=tmp_path / "profile")
    with OrtSession(model_from_bundle(bundle, "fp32"), settings) as profiled:
        assert not profiled.form.program
        assert profiled.ahead is None

"""Many steps of greedy search in one call: the bits of a call for each, and plans that do not fit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_sessions import open_model
from support.step_programs import VOCAB, Arrays, Plan, by_steps, first_inputs, open_plan, planned, step_program

from seq2engine.export.kernel_forms.program import CHOSEN

pytestmark = pytest.mark.usefixtures("vectors")
SLOTS, LONGEST = 24, 20
MISFIT = "the plan does not fit"
Refused = ort.capi.onnxruntime_pybind11_state.InvalidArgument


@pytest.fixture(scope="module")
def session(vectors: int) -> ort.InferenceSession:
    return open_model(step_program())


@pytest.fixture(scope="module")
def two_threads(vectors: int) -> ort.InferenceSession:
    return open_model(step_program(), threads=2)


def check_same(found: Arrays, expected: Arrays) -> None:
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name, strict=True)


@st.composite
def plans(draw: Callable, batch: int) -> Plan:
    """Rules of every kind: forced tokens, banned ones, sources of several lengths, an end that comes or does not."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    target = rng.choice([-1, -1, -1, -1, -2, -3, -4, 7, 11], (batch, LONGEST))
    limit = rng.integers(1, LONGEST + 1, batch) if draw(st.booleans()) else np.full(batch, LONGEST)
    banned = np.zeros((4, VOCAB), dtype=bool)
    banned[:, rng.choice(VOCAB, draw(st.integers(0, 2)))] = True
    banned[2:, rng.choice(VOCAB, 2)] = True
    return Plan(target, limit, banned, draw(st.sampled_from([-1, 7, 11, *rng.choice(VOCAB, 3).tolist()])))


@given(st.data(), st.integers(1, 20), st.integers(1, LONGEST), st.sampled_from([-5, 5, 1, -VOCAB]), st.integers(0, 99))
@settings(max_examples=40)
def test_steps_of_one_call_are_those_of_many(session, data, batch, steps, wanted, seed):
    inputs, plan = first_inputs(batch, SLOTS, seed, wanted), data.draw(plans(batch))
    check_same(planned(session, inputs, plan, steps), by_steps(session, inputs, plan, steps))


@pytest.mark.parametrize("batch", [1, 9, 40])
def test_threads_change_no_bit(session, two_threads, batch):
    inputs, plan = first_inputs(batch, SLOTS), open_plan(batch, LONGEST)
    found = planned(two_threads, inputs, plan, LONGEST)
    assert found["ran"] == [LONGEST]
    check_same(found, by_steps(session, inputs, plan, LONGEST))


@pytest.mark.parametrize("parts", [(1, 19), (7, 7, 6), (1,) * 20])
def test_calls_continue_one_another(session, parts):
    batch = 9
    inputs, plan = first_inputs(batch, SLOTS), open_plan(batch, LONGEST)
    whole = planned(session, inputs, plan, LONGEST)
    assert len(np.unique(whole["chosen"])) > 5, "a decode that is worth comparing"
    state, found = dict(inputs), []
    for steps in parts:
        one = planned(session, state, plan, steps)
        found.append(one["chosen"])
        state |= {name.removeprefix("new_"): array for name, array in one.items() if name.startswith("new_")}
        state |= {"tokens": one["chosen"][:, -1:], "position": state["position"] + steps}
    assert np.array_equal(np.concatenate(found, axis=1), whole["chosen"])
    check_same({name: one[name] for name in one if name.startswith("new_")}, {k: whole[k] for k in one if "new_" in k})


def test_caches_need_not_be_written_in_place(session):
    inputs, plan = first_inputs(3, SLOTS), open_plan(3, LONGEST)
    names = [*(tensor.name for tensor in CHOSEN), "new_self_k.0", "new_self_v.1"]
    before = {name: array.copy() for name, array in inputs.items()}
    found = dict(zip(names, session.run(names, {**inputs, **plan.inputs(LONGEST)}), strict=True))
    expected = planned(session, inputs, plan, LONGEST)
    check_same(found, {name: expected[name] for name in names})
    check_same(inputs, before)  # inputs are not written to


def test_a_cache_is_filled_to_its_end(session):
    """The next position has no slot: a call for another step must be given a larger cache."""
    inputs, plan = first_inputs(3, 8), open_plan(3, LONGEST)
    found = planned(session, inputs, plan, 8)
    assert found["ran"] == [8]
    check_same(found, by_steps(session, inputs, plan, 8))


@pytest.mark.parametrize("batch", [1, 8, 17])
def test_ends_when_all_sources_are_done(session, two_threads, batch):
    """Source i ends at its step i + 1, and the others' steps are what they are without it."""
    plan, inputs = open_plan(batch, LONGEST), first_inputs(batch, SLOTS)
    whole = planned(session, inputs, plan, LONGEST)
    limits = np.arange(batch) + 1
    plan = Plan(plan.target, limits, plan.banned, plan.end)
    for one in (session, two_threads):
        found = planned(one, inputs, plan, LONGEST)
        assert found["ran"] == [batch]
        check_same(found, by_steps(session, inputs, plan, LONGEST))
        for row, limit in enumerate(limits):
            assert np.array_equal(found["chosen"][row, :limit], whole["chosen"][row, :limit])


def test_a_source_that_is_done_has_end_tokens_and_zeros(session):
    batch, end = 17, 7
    plan = open_plan(batch, LONGEST, end)
    plan.target[3, 1] = end  # one of 17: the others run on
    found = planned(session, first_inputs(batch, SLOTS), plan, 6)
    assert (found["chosen"][3, 1:] == end).all()
    assert not found["top_logits"][3, 2:].any()
    assert (found["exp_sums"][3, 2:] == 1).all()


def test_a_source_that_was_done_before_the_call_stays_done(session):
    batch, end = 17, 7
    plan, inputs = open_plan(batch, LONGEST, end), first_inputs(batch, SLOTS)
    inputs["tokens"][:] = 1
    inputs["tokens"][5] = end
    inputs["position"][:] = 2
    found = planned(session, inputs, plan, 3)
    assert (found["chosen"][5] == end).all()
    inputs["position"][:] = 0  # where it is no end token, but what a source is fed first
    assert np.isfinite(planned(session, inputs, plan, 1)["top_logits"][5]).all()
    assert planned(session, inputs, plan, 1)["top_logits"][5] != 0


def test_sources_that_were_done_before_the_call_are_left_out(session):
    batch, end = 17, 7
    plan, inputs = open_plan(batch, LONGEST, end), first_inputs(batch, SLOTS)
    inputs["tokens"][:], inputs["position"][:] = 1, 2
    inputs["tokens"][[5, 6]] = end
    plan.target[8, 4] = end
    found = planned(session, inputs, plan, 10)
    assert found["ran"] == [10]
    check_same(found, by_steps(session, inputs, plan, 10))


def test_sources_that_are_all_done_before_the_call_are_refused(session):
    plan, inputs = open_plan(3, LONGEST, 7), first_inputs(3, SLOTS)
    inputs["tokens"][:], inputs["position"][:] = 7, 2
    with pytest.raises(RuntimeError, match=MISFIT):
        planned(session, inputs, plan, 5)


@pytest.mark.parametrize("wanted", [-3, 3])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_no_number_ends_the_call(session, wrong, wanted):
    inputs = first_inputs(5, SLOTS, wanted=wanted)
    inputs["cross_v.1"][2] = wrong
    found = planned(session, inputs, open_plan(5, LONGEST), LONGEST)
    assert found["ran"] == [1]
    assert np.flatnonzero(~np.isfinite(found["top_logits"]).all(axis=1)).tolist() == [2]


def test_no_steps_are_one_as_the_inputs_say(session):
    inputs, plan = first_inputs(3, SLOTS), open_plan(3, LONGEST)
    outputs = ["logits", "best_tokens", "new_self_k.0"]
    expected = session.run(outputs, inputs)
    for steps in (0, -1, -(2**62)):
        for array, wanted in zip(session.run(outputs, {**inputs, **plan.inputs(steps)}), expected, strict=True):
            np.testing.assert_array_equal(array, wanted)


def changed(name: str, array: object) -> Callable[[Arrays], None]:
    return lambda inputs: inputs.__setitem__(name, np.asarray(array))


MISFITS: dict[str, Callable[[Arrays], None]] = {
    "no token for a source": changed("limit", [20, 0, 20]),
    "a negative limit": changed("limit", [20, -5, 20]),
    "a limit after all targets": changed("limit", [20, 21, 20]),
    "a limit of another batch": changed("limit", [20, 20]),
    "a target out of the vocabulary": lambda inputs: inputs["target"].__setitem__((1, 2), VOCAB),
    "a target far out of the vocabulary": lambda inputs: inputs["target"].__setitem__((1, 2), 2**62),
    "a row of bans that is not there": lambda inputs: inputs["target"].__setitem__((2, 19), -5),
    "a row of bans far from there": lambda inputs: inputs["target"].__setitem__((2, 19), -(2**63)),
    "targets of another batch": changed("target", np.full((2, 20), -1)),
    "no targets": changed("target", np.zeros((3, 0), np.int64)),
    "targets of one axis": changed("target", np.full(60, -1)),
    "bans of one axis": changed("banned", np.zeros(4 * VOCAB, bool)),
    "bans of a smaller vocabulary": changed("banned", np.zeros((4, 2), bool)),
    "no bans": changed("banned", np.zeros((0, VOCAB), bool)),
    "no end": changed("end", np.zeros(0, np.int64)),
    "two ends": changed("end", [1, 2]),
    "a position at the limit": changed("position", [0, 20, 0]),
    "a negative position": changed("position", [0, -1, 0]),
    "positions of another batch": changed("position", [0, 0]),
    "more steps than slots": changed("steps", [SLOTS + 1]),
    "endless steps": changed("steps", [2**62]),
    "a cache that is full": changed("position", [0, 0, 10]),
    "two beams": changed("tokens", np.ones((3, 2), np.int64)),
    "masks of two beams": changed("self_mask", np.ones((3, 2, SLOTS), bool)),
    "masks of one axis less": changed("self_mask", np.ones((3, SLOTS), bool)),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_plan_that_does_not_fit_is_refused(session, name):
    inputs = {**first_inputs(3, SLOTS), **open_plan(3, 20).inputs(15)}
    session.run(["chosen"], inputs)
    MISFITS[name](inputs)
    with pytest.raises(Refused, match=f"{MISFIT}|Invalid rank|invalid dimensions"):  # by us, or by ONNX Runtime before
        session.run(["chosen"], inputs)


def test_a_mask_of_another_length_than_the_cache_is_refused(session):
    inputs = first_inputs(3, SLOTS) | {"self_mask": np.ones((3, 1, SLOTS + 8), bool)}
    with pytest.raises(Refused, match="SelfAttention"):
        session.run(["chosen"], {**inputs, **open_plan(3, 20).inputs(15)})


def test_a_call_after_a_refused_one(session):
    inputs, plan = first_inputs(3, SLOTS), open_plan(3, LONGEST)
    expected = planned(session, inputs, plan, 5)
    for _ in range(3):
        with pytest.raises(RuntimeError, match=MISFIT):  # of a binding ONNX Runtime raises no other kind
            planned(session, inputs, plan, SLOTS + 1)
        check_same(planned(session, inputs, plan, 5), expected)


def test_an_empty_batch_is_no_crash(session):
    inputs = {**first_inputs(0, SLOTS), **open_plan(0, LONGEST).inputs(3)}
    try:
        found = session.run(["chosen"], inputs)
    except Refused:
        return
    assert found[0].shape == (0, 3)

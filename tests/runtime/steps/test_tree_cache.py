"""The tree cache: the mask is what a beam has seen, whatever was switched, compacted or dropped."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seq2engine.benchmarks.timed_decode import CountedSession
from seq2engine.errors import RequestError
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.search.step_output import StepOutput
from seq2engine.runtime.session import Limits
from seq2engine.runtime.steps import tree_cache
from seq2engine.runtime.steps.tree_cache import COMPACTION_CALLS, LEAST_NUMBERS, TreeStep, rounded, slack
from seq2engine.runtime.threads import row_work


class PathSession:
    """A session whose cache holds the tokens themselves, and whose logits are those a beam can see, in order."""

    keeps_mask = False

    def __init__(self, cache_form="static", slots=None, seen=64, deterministic=False, fewer_beams=False):
        self.cache_form, self.seen, self.deterministic = cache_form, seen, deterministic
        self.fewer_beams, self.beams = fewer_beams, []
        self.config = PRESETS["tiny"]
        self.limits = Limits(None, None, 64, 64, slots)

    def reserve(self, state, slots, form):
        state["self_k.0"] = np.full((len(state["source_mask"]), slots), -1)

    def step(self, state, tokens, position, write_index, self_mask):
        cache = state["self_k.0"]
        self.beams.append(tokens.shape[1])
        if self.cache_form == "growing":
            cache = state["self_k.0"] = np.concatenate((cache, tokens), axis=1)
        else:
            for b, k in np.ndindex(*tokens.shape):
                cache[b, write_index[b] + k] = tokens[b, k]
        assert self_mask.shape == (*tokens.shape, cache.shape[1])
        logits = np.full((*tokens.shape, self.seen), -1)
        for b, k in np.ndindex(*tokens.shape):
            path = cache[b][self_mask[b, k]]
            logits[b, k, : len(path)] = path
        return StepOutput(logits)

    def select(self, state, rows, slots):
        if rows is not None:
            state.update({name: array[rows] for name, array in state.items()})
        if slots is not None:
            state["self_k.0"] = np.take_along_axis(state["self_k.0"], slots, axis=1)


class MaskKeepingSession(PathSession):
    """Makes every mask from the one before, where parents are announced; the given one is not used then."""

    keeps_mask = True

    def __init__(self, **options):
        super().__init__(**options)
        self.kept, self.parents, self.followed = None, None, 0

    def descend(self, state, parents):
        self.parents = parents

    def step(self, state, tokens, position, write_index, self_mask):
        parents, self.parents = self.parents, None
        if parents is None:
            self.kept = self_mask.copy()
        else:
            rows = np.arange(len(parents))[:, None]
            self.kept = self.kept[rows, np.maximum(parents, 0)] & (parents >= 0)[..., None]
            own = np.arange(parents.shape[1])
            self.kept[rows, own, write_index[:, None] + own] = True
            self.followed += 1
            np.testing.assert_array_equal(self.kept, self_mask)
        return super().step(state, tokens, position, write_index, self.kept)


def make(batch, beams, steps, keeps_mask=False, first_step=1, **options):
    session = (MaskKeepingSession if keeps_mask else PathSession)(**options)
    state = {"source_mask": np.ones((batch, 1), dtype=bool)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_cache, "FIRST_STEP", first_step)
        return TreeStep(session, state, batch, beams, steps, alike=options.get("fewer_beams", False))


def make_counted(batch, beams, steps):
    session = CountedSession(PathSession())
    step = TreeStep(session, {"source_mask": np.ones((batch, 1), dtype=bool)}, batch, beams, steps)
    return step, session.counts


def seen(logits):
    return [[[int(t) for t in path if t >= 0] for path in source] for source in logits]


@settings(max_examples=60, deadline=None)
@given(
    form=st.sampled_from(["static", "growing", "deterministic", "kept mask", "first alike"]),
    batch=st.integers(1, 4),
    beams=st.integers(1, 5),
    steps=st.integers(1, 40),
    peaky=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_beam_sees_its_own_path_and_nothing_else(form, batch, beams, steps, peaky, seed):
    """Random beam switches and departures, against paths kept as plain lists."""
    rng = np.random.default_rng(seed)
    kinds = {
        "deterministic": {"deterministic": True},
        "kept mask": {"keeps_mask": True},
        "first alike": {"fewer_beams": True},
    }
    kind = kinds.get(form, {"cache_form": form})
    step = make(batch, beams, steps, **kind)
    paths = [[[] for _ in range(beams)] for _ in range(batch)]
    for t in range(steps):
        tokens = rng.integers(0, 1000, (len(paths), beams))
        if form == "first alike" and not t:
            tokens = np.repeat(tokens[:, :1], beams, axis=1)
        # Peaky: all beams follow one parent, so that whole branches die and compaction has something to do.
        parents = rng.integers(0, 1 if peaky else beams, (len(paths), beams))
        logits = step(tokens, parents).logits
        paths = [
            [(source[p] if t else []) + [int(token)] for p, token in zip(ps, ts, strict=True)]
            for source, ps, ts in zip(paths, parents, tokens, strict=True)
        ]
        assert seen(logits) == paths
        if len(paths) > 1 and rng.random() < 0.1:
            rows = np.flatnonzero(rng.random(len(paths)) < 0.7)
            if len(rows):
                step.keep(rows)
                paths = [paths[row] for row in rows]


@pytest.mark.parametrize(
    ("batch", "beams", "kind", "first"),
    [
        (2, 3, {}, 1),
        (2, 1, {}, 1),
        (1, 3, {}, 3),  # it would read as many weights
        (2, 3, {"cache_form": "growing"}, 3),
        (2, 3, {"deterministic": True}, 3),  # bits must not depend on who begins together
    ],
)
def test_beams_that_are_alike_take_one_row_in_their_first_step(batch, beams, kind, first):
    step = make(batch, beams, 8, fewer_beams=True, **kind)
    for _ in range(3):
        step(np.full((batch, beams), 5), np.zeros((batch, beams), dtype=np.int64))
    assert step.session.beams == [first, beams, beams]


def test_few_rows_of_a_small_model_are_not_worth_another_shape():
    saved = 2 * 2 * row_work(PRESETS["tiny"])  # two sources of three beams
    for least, first in ((saved, 1), (saved + 1, 3)):
        step = make(2, 3, 8, fewer_beams=True, first_step=least)
        step(np.full((2, 3), 5), np.zeros((2, 3), dtype=np.int64))
        assert step.session.beams == [first]


def test_greedy_never_needs_more_than_its_length():
    step, counts = make_counted(2, 1, 50)
    for t in range(50):
        step(np.full((2, 1), t), np.zeros((2, 1), dtype=np.int64))
    assert counts.most_slots == 56  # rounded up


def test_peaky_beams_share_their_prefix():
    """All beams follow one parent: of K slots a step only one stays alive, so the cache stays near greedy's."""
    beams, steps = 4, 60
    step, counts = make_counted(1, beams, steps)
    for t in range(steps):
        step(np.full((1, beams), t), np.zeros((1, beams), dtype=np.int64))
    assert counts.compactions > 0
    assert counts.most_live <= steps + beams
    assert counts.most_slots <= steps + slack(beams, steps, COMPACTION_CALLS // LEAST_NUMBERS)


def test_divergent_beams_take_all_slots_and_no_more():
    """Beams that never share anything need K times the slots: the worst case must fit exactly."""
    beams, steps = 3, 30
    step, counts = make_counted(1, beams, steps)
    own = np.arange(beams)[None]
    for t in range(steps):
        step(np.full((1, beams), t), own)
    assert counts.most_slots == rounded(beams * steps)


def test_a_fixed_cache_that_is_too_short_names_the_build():
    step = make(1, 2, 16, slots=8)
    own = np.arange(2)[None]
    for t in range(4):
        step(np.full((1, 2), t), own)
    with pytest.raises(RequestError, match=r"8 cache slots are live .* --slots 32"):
        step(np.full((1, 2), 9), own)


def test_switching_beams_moves_nothing_in_the_cache():
    step = make(1, 3, 8)
    step(np.array([[1, 2, 3]]), np.zeros((1, 3), dtype=np.int64))
    before = step.state["self_k.0"].copy()
    address = step.state["self_k.0"].ctypes.data
    step(np.array([[4, 5, 6]]), np.array([[2, 2, 0]]))
    assert step.state["self_k.0"].ctypes.data == address
    assert (step.state["self_k.0"][:, :3] == before[:, :3]).all()


@pytest.mark.parametrize("form", ["static", "growing", "kept mask"])
def test_rows_that_restart_see_nothing_of_what_was_before(form):
    step = make(2, 2, 8, keeps_mask=True) if form == "kept mask" else make(2, 2, 8, cache_form=form)
    own = np.tile(np.arange(2), (2, 1))
    step(np.array([[1, 2], [3, 4]]), own)
    step.restart(np.array([1]))
    assert seen(step(np.array([[5, 6], [7, 8]]), own).logits) == [[[1, 5], [2, 6]], [[7], [8]]]
    assert step.position.tolist() == [2, 1]
    assert form != "kept mask" or step.session.followed == 1


def test_a_kept_mask_is_sent_whole_only_after_it_moved():
    """First step, a departure, a compaction: all other steps follow from the one before."""
    step = make(3, 2, 40, keeps_mask=True, slots=32)
    for number in range(30):
        followed = step.session.followed
        step(np.full((len(step.position), 2), number), np.zeros((len(step.position), 2), dtype=np.int64))
        if number == 3:
            step.keep(np.array([0, 2]))
        assert step.session.followed - followed == (number not in (0, 4, 16, 24, 28))  # full: 16 steps, then 8, 4

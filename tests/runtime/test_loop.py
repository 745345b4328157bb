"""What the loop around the session costs a step, counted, not timed: with a small model every call matters."""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np
import pytest

from seq2engine.model.presets import PRESETS
from seq2engine.runtime.search.beam import beam_search
from seq2engine.runtime.search.greedy import greedy_search
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step import Special
from seq2engine.runtime.search.step_output import Candidates, Reduced, StepOutput
from seq2engine.runtime.session import Limits
from seq2engine.runtime.steps.tree_cache import TreeStep

STEPS = range(2, 7)  # after the first, and before a cache of four beams is compacted


class TellingSession:
    """A session that always answers the same, as one does whose graph reduces its logits."""

    cache_form, deterministic, keeps_mask = "static", False, False
    config, limits = PRESETS["tiny"], Limits(None, None, 64, 64)

    def __init__(self, batch, beams):
        logits = np.random.default_rng(0).normal(size=(batch, beams, 16)).astype(np.float32)
        tokens = np.argsort(-logits, axis=-1, kind="stable")[..., : beams + 1]
        best = np.take_along_axis(logits, tokens, axis=-1)
        total = np.exp(logits - best[..., :1]).sum(axis=-1)
        self.answer = logits, Reduced(Candidates(tokens, best), total)

    def reserve(self, state, slots, form):
        pass

    def select(self, state, rows, slots):
        pass

    def step(self, state, tokens, position, write_index, self_mask):
        return StepOutput(*self.answer)


def calls_of_a_step(search, batch, beams):
    """Functions, of Python and of C, that our code calls in one step at most; those of the session are among them.

    What numpy calls in turn is its own affair, and another number with every version of it.
    """
    tree = TreeStep(TellingSession(batch, beams), {}, batch, beams, 16)
    steps = search(tree, batch, Special(start=1, end=-1), SearchOptions(max_length=16, beam=beams))
    counts = Counter()

    def count(frame, event, arg):
        caller = frame.f_back if event == "call" else frame  # a function of C has no frame of its own
        if event.endswith("call") and caller.f_globals.get("__name__", "").startswith("seq2engine."):
            counts[number] += 1

    for number in range(STEPS.stop):
        if number in STEPS:
            sys.setprofile(count)
        try:
            next(steps)
        finally:
            sys.setprofile(None)
    return max(counts.values())


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(("search", "beams", "most"), [(greedy_search, 1, 23), (beam_search, 4, 40)])
def test_a_step_of_the_loop_is_few_calls(search, beams, most, batch):
    assert calls_of_a_step(search, batch, beams) <= most

"""Slots of a cache that move: the same as numpy's, in new memory and in the old."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from seq2engine.runtime.ort.binding import OVER_ALLOCATION, gathered_slots
from seq2engine.runtime.ort.memory import OWN_PAGES, finite


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    batch=st.integers(1, 5),
    before=st.integers(1, 9),
    after=st.integers(1, 40),
    large=st.booleans(),
)
def test_every_source_has_its_slots(seed, batch, before, after, large):
    rng = np.random.default_rng(seed)
    width = -(-OWN_PAGES // (4 * batch * before * 2)) if large else 3
    cache = finite((batch, 2, before, width), "float32", OVER_ALLOCATION)
    cache[...] = rng.integers(0, 1000, (batch, 2, before, 1)) + np.arange(width) % 7
    slots = rng.integers(0, before, (batch, after))
    wanted = np.take_along_axis(cache, slots[:, None, :, None], axis=2)
    where = cache.__array_interface__["data"]
    found = gathered_slots(cache, slots)
    assert np.array_equal(found, wanted)
    assert found.flags.c_contiguous
    if large and after <= OVER_ALLOCATION * before:
        assert found.__array_interface__["data"] == where, "there was room"

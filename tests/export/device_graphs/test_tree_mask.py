"""The tree cache's mask on the device is that of runtime/steps/tree_cache.py."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.device_graphs import OrtGraph, launches_of

from seq2engine.export.device_graphs.tree_mask import tree_mask

SLOTS = 24


@cache
def graph(positions):
    return OrtGraph(tree_mask(SLOTS, positions))


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10_000), batch=st.integers(1, 4), beams=st.integers(1, 5), positions=st.booleans())
def test_steps_inherit_ancestors_and_add_their_own_slots(seed, batch, beams, positions):
    rng = np.random.default_rng(seed)
    mask = np.zeros((batch, beams, SLOTS), dtype=bool)
    written = np.zeros((batch, SLOTS), dtype=np.int64)
    kept = {"self_mask": mask.copy(), "slot_position": written.copy()}
    used = rng.integers(0, 3, batch)
    position = rng.integers(0, 9, batch)
    for _ in range(4):
        parents = rng.integers(0, beams, (batch, beams))
        parents[rng.random(batch) < 0.2] = -1
        begins = parents[:, 0] < 0
        used[begins] = position[begins] = 0
        mask = np.where(begins[:, None, None], False, np.take_along_axis(mask, parents[..., None].clip(0), axis=1))
        for row, beam in np.ndindex(batch, beams):
            if used[row] + beam < SLOTS:
                mask[row, beam, used[row] + beam] = True
                written[row, used[row] + beam] = position[row]
        found = graph(positions)(**kept, parents=parents, write_index=used, beam=np.arange(beams), position=position)
        np.testing.assert_array_equal(found["new_self_mask"], mask)
        kept["self_mask"] = found["new_self_mask"]
        if positions:
            attended = mask.any(axis=1)
            np.testing.assert_array_equal(found["new_slot_position"][attended], written[attended])
            kept["slot_position"] = found["new_slot_position"]
        used += beams
        position += 1


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("beams", [(1, 1, 1), (4, 4, 4), (1, 4, 4)])
def test_tensorrt_launches_one_kernel(beams, positions):
    sizes = [{"B": batch, "K": k} for batch, k in zip((1, 8, 32), beams, strict=True)]
    assert launches_of(tree_mask(1024, positions), *sizes) == 1

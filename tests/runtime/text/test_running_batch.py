"""Rows of a running batch: free places are taken by the last rows, so that few of them move."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seq2engine.runtime.text.running_batch import closed_up


@pytest.mark.parametrize(
    ("free", "rows"), [(".x..x.", [0, 5, 2, 3]), ("......", [0, 1, 2, 3, 4, 5]), ("xx..", [2, 3]), ("..xx", [0, 1])]
)
def test_the_last_rows_take_free_places(free, rows):
    assert closed_up(np.array([letter == "x" for letter in free])).tolist() == rows


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_every_row_in_use_stays_and_no_other(free):
    found = closed_up(np.array(free)).tolist()
    assert sorted(found) == [place for place, one in enumerate(free) if not one]
    moved = [old for new, old in enumerate(found) if new != old]
    assert all(old >= len(found) for old in moved)  # none is overwritten before it has moved

"""Batches: every place once, with little padding, or with as much as a test needs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from seq2engine.runtime.text.batching import batches_by_length, corpus_batches, mixed_batches

LENGTHS = st.lists(st.integers(0, 9), max_size=40)


@given(LENGTHS, st.integers(1, 6))
def test_batches_are_neighbours_in_length(lengths, most):
    batches = batches_by_length(lengths, most)
    assert sorted(place for batch in batches for place in batch) == list(range(len(lengths)))
    assert all(len(batch) <= most for batch in batches)
    assert len(batches) == -(-len(lengths) // most)
    ranges = sorted((lengths[batch[0]], lengths[batch[-1]]) for batch in batches)
    assert all(longest <= shortest for (_, longest), (shortest, _) in pairwise(ranges))


def test_batches_reach_over_the_whole_list():
    batches = mixed_batches(10, 4)
    assert batches == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    assert mixed_batches(3, 8) == [[0, 1, 2]]


def test_of_many_one_batch_is_mixed_and_the_rest_are_of_like_lengths():
    lengths = np.random.default_rng(0).integers(1, 30, size=203).tolist()
    first, *rest = corpus_batches(lengths, 16)
    assert sorted(row for rows in (first, *rest) for row in rows) == list(range(203))
    assert max(map(len, rest)) == 16
    assert max(lengths[row] for row in first) - min(lengths[row] for row in first) > 20
    assert max(np.ptp([lengths[row] for row in rows]) for rows in rest) < 6
    assert corpus_batches(lengths[:40], 16) == mixed_batches(40, 16)

"""Which sources are encoded together: those that take the fewest tokens, padding included."""

from __future__ import annotations

from itertools import pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

from seq2engine.runtime.encoder_inputs import groups_by_padding


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=7), call=st.integers(0, 40))
def test_no_other_groups_take_fewer_tokens(lengths, call):
    def tokens(groups):
        return sum(call + len(group) * max(lengths[place] for place in group) for group in groups)

    found = groups_by_padding(lengths, call)
    assert sorted(place for group in found for place in group) == list(range(len(lengths)))
    assert all(max(lengths[i] for i in b) <= min(lengths[i] for i in a) for a, b in pairwise(found))
    ranked = sorted(range(len(lengths)), key=lambda place: lengths[place])
    for cuts in product([False, True], repeat=len(lengths) - 1):  # a best grouping cuts the ranks somewhere
        groups = [[ranked[0]]]
        for place, cut in zip(ranked[1:], cuts, strict=True):
            groups = [*groups, [place]] if cut else [*groups[:-1], [*groups[-1], place]]
        assert tokens(found) <= tokens(groups)

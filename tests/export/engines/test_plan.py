"""Plans for any lengths: nothing falls between profiles, linked shapes agree, and no other choice wastes less."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seq2engine.errors import RequestError
from seq2engine.export.artifact.profiles import Range, check_profiles, shapes_from_ranges
from seq2engine.export.contract import graph_specs
from seq2engine.export.engines import plan as planning
from seq2engine.export.engines.plan import buckets_of, cost_of, edges_from_buckets, histogram_text, plan_from_lengths
from seq2engine.model.config import ModelConfig
from seq2engine.model.presets import PRESETS

CONFIG = PRESETS["tiny"]  # sources and outputs of up to 64
requests = st.lists(st.tuples(st.integers(1, 64), st.integers(1, 64)), min_size=1, max_size=30)
forms = st.sampled_from(["static", "growing"])
counts, beams = st.integers(1, 5), st.sampled_from([1, 4])
quick = settings(deadline=None, max_examples=60)


@quick
@given(requests, counts, beams, forms)
def test_every_request_up_to_the_longest_fits_a_profile(lengths, count, beam, form):
    plan = plan_from_lengths(lengths, CONFIG, count, beam=beam, cache_form=form)
    widest = plan.profiles[-1].ranges
    assert widest.source.max >= max(s for s, _ in lengths)
    assert widest.target.max >= max(t for _, t in lengths)
    for source, target in itertools.product((1, 7, 8, 9, widest.source.max), (1, 9, widest.target.max)):
        if source <= widest.source.max and target <= widest.target.max:
            number = plan.profile_of(source, target)
            assert number is not None
            narrower = [p.ranges for p in plan.profiles[:number]]
            assert not any(source in r.source and target in r.target for r in narrower)
    for source, target in lengths:  # and it is served by the first whose source fits, as the padding was counted
        number = next(i for i, p in enumerate(plan.profiles) if source in p.ranges.source)
        assert plan.profile_of(source, target) == number
    assert plan.profile_of(widest.source.max + 1, 1) is None
    assert sum(p.requests for p in plan.profiles) == len(lengths)


@quick
@given(requests, counts, beams, forms)
def test_a_plan_can_be_built_and_linked_shapes_agree(lengths, count, beam, form):
    plan = plan_from_lengths(lengths, CONFIG, count, beam=beam, cache_form=form)
    profiles = check_profiles([p.ranges for p in plan.profiles], CONFIG)
    assert profiles[0] == plan.profiles[-1].ranges  # the widest
    for ranges in profiles:
        for kind in range(3):
            sizes = {}
            for spec in graph_specs(CONFIG, "fp16", form).values():
                shapes = shapes_from_ranges(spec, ranges, form, plan.slots)
                for tensor in spec.inputs:
                    for axis, size in zip(tensor.axes, shapes[tensor.name][kind], strict=True):
                        if isinstance(axis, str):
                            assert sizes.setdefault(axis, size) == size


@quick
@given(requests, counts, beams, forms)
def test_no_other_edges_waste_less(lengths, count, beam, form):
    buckets = buckets_of(lengths, CONFIG, form)
    last = len(buckets) - 1

    def cost(ends):
        starts = [0, *(end + 1 for end in ends[:-1])]
        return sum(cost_of(buckets, start, end, beam) for start, end in zip(starts, ends, strict=True))

    choices = [
        [*inner, last]
        for number in range(min(count, len(buckets)))
        for inner in itertools.combinations(range(last), number)
    ]
    best = min(cost(ends) for ends in choices)
    found = edges_from_buckets(buckets, count, beam)
    assert cost(found) == best
    assert len(found) == min(len(ends) for ends in choices if cost(ends) == best)
    assert plan_from_lengths(lengths, CONFIG, count, beam=beam, cache_form=form).padding == best


@quick
@given(requests, counts, beams, forms)
def test_more_profiles_are_never_worse(lengths, count, beam, form):
    plans = [plan_from_lengths(lengths, CONFIG, number, beam=beam, cache_form=form) for number in (1, count, count + 1)]
    paddings = [plan.padding for plan in plans]
    assert paddings == sorted(paddings, reverse=True)
    assert {plan.one_profile_padding for plan in plans} == {plans[0].padding}
    assert {plan.real for plan in plans} == {sum(s + beam * t for s, t in lengths)}


def test_a_plan_worked_out_by_hand():
    """Sources of 8 and 64: one profile pads each short one by 56 source and 16 - 8 = 8 output slots of two beams."""
    lengths = [(8, 8)] * 3 + [(64, 16)]
    plan = plan_from_lengths(lengths, CONFIG, 2, Range(1, 2, 4), beam=2, cache_form="growing", weight_bytes=1000)
    assert [p.ranges.source for p in plan.profiles] == [Range(1, 8, 8), Range(1, 64, 64)]
    assert [p.ranges.target for p in plan.profiles] == [Range(1, 8, 8), Range(1, 16, 16)]
    assert [(p.requests, p.real, p.padding) for p in plan.profiles] == [(3, 72, 0), (1, 96, 0)]
    assert (plan.padding, plan.one_profile_padding) == (0, 3 * (56 + 2 * 8))
    assert (plan.waste, plan.one_profile_waste) == (0, 216 / (216 + 168))
    assert plan.slots == 32
    # tiny: 2 layers, d_model 64. 4 sources x 2 bytes x (64 x (4 x 64 + 64) + two caches x 32 slots x 4 x 64)
    assert plan.profiles[1].state_bytes == 4 * 2 * (64 * 320 + 2 * 32 * 256)
    assert plan.engine_bytes == 1000 + 2 * 4 * planning.PROFILE_BYTES  # two profiles of four layers
    options = " ".join(plan.build_options())
    assert options == "--batch 1:2:4 --beam 2 --source-length 1:8:8 1:64:64 --max-length 1:8:8 1:16:16"


def test_a_static_cache_has_one_length():
    plan = plan_from_lengths([(8, 8), (64, 16)], CONFIG, 2, cache_form="static")
    assert [p.ranges.target.max for p in plan.profiles] == [16, 16]
    assert len(plan.profiles) == 2


def test_useless_profiles_are_not_made():
    assert len(plan_from_lengths([(5, 5), (6, 5)], CONFIG, 4).profiles) == 1


def test_lengths_are_rounded_up_but_not_beyond_the_model():
    short = ModelConfig(max_source=20, max_target=10)
    ranges = plan_from_lengths([(17, 9)], short).profiles[0].ranges
    assert (ranges.source.max, ranges.target.max) == (20, 10)


def test_requests_beyond_the_model_are_counted():
    assert plan_from_lengths([(5, 5), (65, 5), (5, 65), (0, 5)], CONFIG).left_out == 3


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([(65, 1)], {}, "none of 1 requests fits the model, which takes 1 to 64 source and 1 to 64 output tokens"),
        ([], {}, "no requests to plan for, expected a line for each"),
        ([(1, 1)], {"profiles": 0}, "0 profiles and 1 beams, expected at least 1 of each"),
        ([(1, 1)], {"beam": 0}, "3 profiles and 0 beams"),
    ],
)
def test_what_cannot_be_planned(lengths, options, message):
    with pytest.raises(RequestError, match=message):
        plan_from_lengths(lengths, CONFIG, **options)


def test_the_histogram_shows_counts_and_edges():
    assert histogram_text([1, 8, 9, 24], [8, 24], width=2).split("\n") == [
        "    1 to     8         2  ██  < profile ends at 8",
        "    9 to    16         1  █",
        "   17 to    24         1  █  < profile ends at 24",
    ]


@pytest.mark.parametrize("columns", [80, 60, 40])
def test_the_histogram_keeps_to_the_terminal(columns):
    """Also where the longest bar is the one that profiles end in; only in a narrow one are words cut."""
    lengths = [*[8] * 1000, *[30] * 990, 200, 250]
    edges = [5, 8, 32, 256]
    text = histogram_text(lengths, edges, columns=columns)
    assert max(map(len, text.splitlines())) <= columns
    if columns == 80:
        assert "< profile ends at 5, 8" in text
        assert "< profile ends at 256" in text
    bars = [line.count("█") for line in text.splitlines()]
    assert bars[0] == max(bars) >= 8
    assert max(map(len, histogram_text(lengths, edges).splitlines())) > 80

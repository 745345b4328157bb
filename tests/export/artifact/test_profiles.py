"""From ranges to shapes, for any ranges: hypothesis searches for counterexamples."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seq2engine.errors import BuildError
from seq2engine.export.artifact.profiles import (
    FLAGS,
    Range,
    ShapeRanges,
    check_ranges,
    range_from_text,
    shapes_from_ranges,
    sizes_from_ranges,
)
from seq2engine.export.contract import graph_specs
from seq2engine.model.presets import PRESETS

TINY = PRESETS["tiny"]  # sources and targets of up to 64
forms = st.sampled_from(["static", "growing"])


def rising(most):
    return st.lists(st.integers(1, most), min_size=3, max_size=3).map(lambda numbers: Range(*sorted(numbers)))


valid = st.builds(
    ShapeRanges, batch=rising(256), beam=rising(16), source=rising(TINY.max_source), target=rising(TINY.max_target)
)


def all_shapes(ranges, cache_form):
    """Shapes of every input of both graphs, with the contract's axes: (axes, least, usual, most)."""
    for spec in graph_specs(TINY, "fp16", cache_form).values():
        shapes = shapes_from_ranges(spec, ranges, cache_form, ranges.slots)
        assert list(shapes) == [tensor.name for tensor in spec.inputs]
        for tensor in spec.inputs:
            yield tensor.axes, *shapes[tensor.name]


@settings(deadline=None)  # a busy machine is not a failure
@given(valid, forms)
def test_valid_ranges_pass_and_every_shape_rises_from_least_to_most(ranges, cache_form):
    check_ranges(ranges, TINY)
    for axes, least, usual, most in all_shapes(ranges, cache_form):
        assert len(axes) == len(least) == len(usual) == len(most)
        for axis, low, mid, high in zip(axes, least, usual, most, strict=True):
            assert low <= mid <= high
            if isinstance(axis, int):
                assert low == mid == high == axis


@settings(deadline=None)  # a busy machine is not a failure
@given(valid, forms)
def test_a_letter_has_one_size_across_all_inputs(ranges, cache_form):
    for kind in range(3):
        sizes = {}
        for axes, *shapes in all_shapes(ranges, cache_form):
            for axis, size in zip(axes, shapes[kind], strict=True):
                if isinstance(axis, str):
                    assert sizes.setdefault(axis, size) == size
        wanted = ("min", "opt", "max")[kind]
        for letter, name in (("B", "batch"), ("K", "beam"), ("S", "source")):
            assert sizes[letter] == getattr(getattr(ranges, name), wanted)


@settings(deadline=None)  # a busy machine is not a failure
@given(valid)
def test_a_static_cache_has_one_length_that_always_suffices(ranges):
    sizes = sizes_from_ranges(ranges, "static", ranges.slots)
    assert {size["L"] for size in sizes} == {size["M"] for size in sizes} == {ranges.beam.max * ranges.target.max}


@settings(deadline=None)  # a busy machine is not a failure
@given(valid)
def test_a_growing_cache_starts_empty_and_holds_every_step_but_the_last(ranges):
    least, usual, most = sizes_from_ranges(ranges, "growing", ranges.slots)
    assert least["L"] == 0
    assert most["L"] == ranges.beam.max * (ranges.target.max - 1)
    for sizes in (least, usual, most):
        assert sizes["M"] == sizes["L"] + sizes["K"]


def test_asked_slots_are_the_static_cache_and_do_not_touch_the_growing_one():
    ranges = ShapeRanges(Range(1, 2, 4), Range(4, 4, 4), Range(1, 8, 32), Range(1, 8, 32))
    assert [sizes["L"] for sizes in sizes_from_ranges(ranges, "static", 48)] == [48, 48, 48]
    assert [sizes["L"] for sizes in sizes_from_ranges(ranges, "growing", 48)] == [0, 28, 124]


def test_every_problem_is_listed_at_once():
    ranges = ShapeRanges(batch=Range(8, 4, 2), beam=Range(0, 1, 1), source=Range(1, 8, 65), target=Range(1, 100, 99))
    with pytest.raises(BuildError) as error:
        check_ranges(ranges, TINY)
    assert str(error.value) == (
        "shape ranges: batch 8:4:2 must rise from at least 1; beam 0:1:1 must rise from at least 1; "
        "max length 1:100:99 must rise from at least 1; source length 1:8:65 exceeds the model's maximum of 64; "
        "max length 1:100:99 exceeds the model's maximum of 64"
    )


@settings(deadline=None)  # a busy machine is not a failure
@given(valid, st.sampled_from(["batch", "beam", "source", "target"]), st.integers(0, 2), st.integers(-3, 70))
def test_a_range_that_does_not_rise_is_refused_and_named(ranges, name, which, number):
    numbers = list(dataclasses.astuple(getattr(ranges, name)))
    numbers[which] = number
    changed = dataclasses.replace(ranges, **{name: Range(*numbers)})
    too_long = name in ("source", "target") and numbers[2] > 64
    if 1 <= numbers[0] <= numbers[1] <= numbers[2] and not too_long:
        check_ranges(changed, TINY)
    else:
        message = FLAGS[name].replace("-", " ")
        with pytest.raises(BuildError, match=f"shape ranges: {message} {changed.__dict__[name]} "):
            check_ranges(changed, TINY)


@pytest.mark.parametrize(("text", "expected"), [("8", Range(8, 8, 8)), ("1:8:64", Range(1, 8, 64))])
def test_a_range_is_read_from_text_and_written_the_same(text, expected):
    assert range_from_text(text, "batch") == expected
    assert range_from_text(str(expected), "batch") == expected


@pytest.mark.parametrize("text", ["", "many", "1:8", "1:2:3:4", "1::64", "1:8:64.0", ":"])
def test_text_that_is_no_range_is_refused_with_the_form_to_write(text):
    with pytest.raises(BuildError) as error:
        range_from_text(text, "batch")
    assert str(error.value) == (f"--batch {text!r} is not a range; write one number, or min:opt:max such as 1:8:64")


def test_a_range_knows_what_lies_in_it():
    wide, one = Range(2, 3, 5), Range(4, 4, 4)
    assert [number for number in range(8) if number in wide] == [2, 3, 4, 5]
    assert 3.0 not in wide  # a length is a whole number
    assert one.fixed
    assert not wide.fixed

"""Which cases of a long proof run in every `make test`."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from support.fast_cases import covering, mark_combinations_as_slow, named_rest_slow, rest_slow


def test_every_value_of_every_parameter_is_covered():
    cases = [frozenset(enumerate(case)) for case in itertools.product("abc", "xy", range(5))]
    chosen = covering(cases)
    assert frozenset().union(*(cases[number] for number in chosen)) == frozenset().union(*cases)
    assert len(chosen) == 5
    assert covering([]) == set()


def test_all_but_the_named_are_slow():
    first, second = rest_slow(["a", "b"], ["a"])
    assert first == "a"
    assert second.values == ("b",)
    assert [mark.name for mark in second.marks] == ["slow"]
    assert [(case.id, case.values, len(case.marks)) for case in named_rest_slow({"x": 1, "y": 2}, ["y"])] == [
        ("x", (1,), 1),
        ("y", (2,), 0),
    ]


def test_a_name_that_is_none_is_an_error():
    with pytest.raises(AssertionError, match=r"fast cases that are none: \['c'\]"):
        rest_slow(["a", "b"], ["c"])
    with pytest.raises(AssertionError, match=r"fast cases that are none: \['c'\]"):
        named_rest_slow({"a": 1}, ["c"])


def case_of(test, marks=("each_value",), **params):
    marks = list(marks)
    return SimpleNamespace(
        nodeid=f"test_x.py::{test}[{params}]",
        callspec=SimpleNamespace(params=params),
        get_closest_marker=lambda name: name if name in marks else None,
        add_marker=lambda mark: marks.append(mark.name),
    )


def is_fast(item):
    return item.get_closest_marker("slow") is None


def test_combinations_are_slow_in_the_tests_that_are_marked():
    grid = list(itertools.product([{}, {"beam": 4}], range(3)))
    marked = [case_of("test_a", a=a, b=b) for a, b in grid]
    others = [case_of("test_b", marks=(), a=a, b=b) for a, b in grid]
    slow = [case_of("test_a", marks=("each_value", "slow"), a=9, b=0)]
    mark_combinations_as_slow([*marked, *others, *slow])
    fast = [item.callspec.params for item in marked if is_fast(item)]
    assert len(fast) == 3
    assert {len(case["a"]) for case in fast} == {0, 1}
    assert {case["b"] for case in fast} == {0, 1, 2}
    assert all(is_fast(item) for item in others)

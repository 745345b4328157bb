"""Long proofs over many cases: a few of them run in every `make test`, the others in `make test-slow`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import pytest


def rest_slow(values: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """Values to parametrise with: those of `fast` as they are, all others marked as slow."""
    values = list(values)
    check_known(fast, values)
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]


def named_rest_slow(cases: Mapping[str, Any], fast: Collection[str]) -> list[Any]:
    """The same for cases by name, which is their id: those that `fast` names run always."""
    check_known(fast, cases)
    return [pytest.param(case, id=name, marks=() if name in fast else pytest.mark.slow) for name, case in cases.items()]


def check_known(fast: Collection[Any], values: Collection[Any]) -> None:
    unknown = [value for value in fast if value not in values]
    assert not unknown, f"fast cases that are none: {unknown}"


def mark_combinations_as_slow(items: Sequence[Any]) -> None:
    """Of each test with the mark `each_value`: all cases but a few in which every value occurs are slow."""
    marked = [item for item in items if item.get_closest_marker("each_value") and not item.get_closest_marker("slow")]
    for _, group in groupby(sorted(marked, key=function_of), key=function_of):
        cases = list(group)
        needed = covering([values_of(case) for case in cases])
        for number, case in enumerate(cases):
            if number not in needed:
                case.add_marker(pytest.mark.slow)


def function_of(item: Any) -> str:
    """The test that an item is a case of."""
    return item.nodeid.partition("[")[0]


def values_of(item: Any) -> frozenset[tuple[str, str]]:
    """Its parameters and their values, as text: some values cannot be hashed."""
    return frozenset((name, repr(value)) for name, value in item.callspec.params.items())


def covering(cases: Sequence[frozenset[Any]]) -> set[int]:
    """Numbers of cases that have all elements of all cases: always the first one that adds the most."""
    missing, chosen = frozenset[Any]().union(*cases), set[int]()
    while missing:
        best = max(range(len(cases)), key=lambda number: len(cases[number] & missing))
        chosen.add(best)
        missing -= cases[best]
    return chosen

"""Parameters of a long proof: a few cases run in every `make test`, the others in `make test-slow`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest


def rest_slow(values: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """Values to parametrise with: those of `fast` as they are, all others marked as slow."""
    values = list(values)
    unknown = [value for value in fast if value not in values]
    assert not unknown, f"fast cases that are none: {unknown}"
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]


def named_rest_slow(cases: Mapping[str, Any], fast: Collection[str]) -> list[Any]:
    """The same for cases by name, which is their id: those that `fast` names run always."""
    unknown = [name for name in fast if name not in cases]
    assert not unknown, f"fast cases that are none: {unknown}"
    return [
        pytest.param(case, id=name, marks=() if name in fast else pytest.mark.slow) for name, case in cases.items()
    ]

"""Whole rows or columns of a tensor that are wrong: shifted, in another order, with another sign, scaled, zeros."""

from __future__ import annotations

import numpy as np

AXES = ("row", "column")
FURTHEST = 64  # maximum shift of a table, in rows or columns
FEW = 0.25  # share of rows or columns that are named individually; beyond it the tensor is


def line_fault(ours: np.ndarray, theirs: np.ndarray, wrong: np.ndarray, what: str) -> tuple[str, str] | None:
    for axis in range(min(ours.ndim, 2)):
        word = AXES[axis] if ours.ndim > 1 else "number"
        right, found = np.moveaxis(ours, axis, 0), np.moveaxis(theirs, axis, 0)
        right, found = right.reshape(len(right), -1), found.reshape(len(found), -1)
        places = np.flatnonzero(np.moveaxis(wrong, axis, 0).reshape(len(right), -1).any(axis=1))
        for hypothesis in (shifted, reordered):
            if named := hypothesis(right, found, places, word, what):
                return named
    for axis in range(min(ours.ndim, 2) if ours.ndim > 1 else 0):
        right, found = np.moveaxis(ours, axis, 0), np.moveaxis(theirs, axis, 0)
        right, found = right.reshape(len(right), -1), found.reshape(len(found), -1)
        places = np.flatnonzero(np.moveaxis(wrong, axis, 0).reshape(len(right), -1).any(axis=1))
        if len(places) <= max(1, FEW * len(right)):
            return few_lines(right, found, places, AXES[axis], what)
    return None


def shifted(right: np.ndarray, found: np.ndarray, places: np.ndarray, word: str, what: str) -> tuple[str, str] | None:
    """From one line on, every line is the one some places before or after."""
    first, count = int(places[0]), len(right)
    for by in (by for size in range(1, min(FURTHEST, count - 1) + 1) for by in (size, -size)):
        if first + by < 0:
            continue
        ours, theirs = right[first + by :], found[first : count - max(by, 0)]
        length = min(len(ours), len(theirs))
        if length >= 2 and np.array_equal(ours[:length], theirs[:length]) and not constant(ours[:length]):
            rest = found[first + length :]
            if first == 0 and len(rest) == abs(by) and np.array_equal(np.roll(right, -by, axis=0), found):
                return "shift", f"the {word}s of the {what} are rotated by {by:+d}"
            since = "everywhere" if first == 0 else f"from {word} {first} on"
            return "shift", f"{since}, a {word} of the {what} is the one at {by:+d}"
    return None


def constant(lines: np.ndarray) -> bool:
    return bool((lines == lines[0]).all())


def reordered(right: np.ndarray, found: np.ndarray, places: np.ndarray, word: str, what: str) -> tuple[str, str] | None:
    """The same lines in another order."""
    if len(places) < 2:
        return None
    known: dict[bytes, int] = {}
    for place in places:
        known.setdefault(right[place].tobytes(), int(place))
    order = [known.get(found[place].tobytes(), -1) for place in places]
    if sorted(order) != sorted(set(places.tolist())):
        return None
    if len(places) == 2:
        return "permutation", f"{word}s {places[0]} and {places[1]} of the {what} have changed places"
    first = f"{word} {order[0]} stands where {word} {places[0]} belongs"
    return "permutation", f"{len(places)} of {len(right)} {word}s of the {what} are in another order: {first}"


def few_lines(right: np.ndarray, found: np.ndarray, places: np.ndarray, word: str, what: str) -> tuple[str, str]:
    """What the few wrong rows or columns have in common; else the first of them."""
    ours, theirs = right[places].astype(np.float64), found[places].astype(np.float64)
    named = f"{word} {places[0]}" if len(places) == 1 else f"{len(places)} {word}s, {word} {places[0]} first,"
    has, does = ("has its sign", "is") if len(places) == 1 else ("have their sign", "are")
    if np.array_equal(theirs, -ours):
        return "sign", f"{named} of the {what} {has} changed"
    if not theirs.any():
        return "weight", f"{named} of the {what} {does} all zeros"
    same = np.flatnonzero((right == found[places[0]]).all(axis=1))
    if len(places) == 1 and len(same):
        return "weight", f"{named} of the {what} holds what {word} {int(same[0])} holds"
    factor = float((ours * theirs).sum() / np.square(ours).sum()) if ours.any() else 0.0
    if factor and np.allclose(factor * ours, theirs, rtol=2.0**-10, atol=1e-12):
        return "weight", f"{named} of the {what} {does} {factor:.6g} times what it should be"
    return "weight", f"{named} of the {what} differs" if len(places) == 1 else f"{named} of the {what} differ"

"""How a stored tensor differs from the expected one: each possible cause is applied to the right numbers and
compared with those found. Names are not considered; specific causes come before general ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from .lines import line_fault
from .rounding import rounding_fault

Fault = tuple[str, str]  # the cause, and what is wrong in words
PARTS = {"qkv": ("q", "k", "v"), "kv": ("k", "v")}
AXES = ("row", "column")


@dataclass(frozen=True)
class Case:
    """The right numbers, those found, both as the reference has them ([out, in]), and what they may have been mistaken
    for: `others` of the same shape, by name. `heads` of the model; `module` it belongs to."""

    ours: np.ndarray
    theirs: np.ndarray
    what: str = "weight"
    module: str = ""
    heads: int = 0
    others: Mapping[str, Callable[[], np.ndarray]] = field(default_factory=dict)

    @cached_property
    def wrong(self) -> np.ndarray:
        return ~same_numbers(self.ours, self.theirs)


def same_numbers(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where two arrays of one shape are equal; not a number is equal to itself."""
    return (a == b) | ((a != a) & (b != b))


def alike(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and (np.array_equal(a, b) or bool(same_numbers(a, b).all()))


def weight_fault(case: Case) -> Fault:
    """The cause and how a stored tensor differs from the model's."""
    ours, theirs = case.ours, case.theirs
    if ours.shape != theirs.shape:
        return "weight", f"the {case.what} has the shape {list(theirs.shape)}, expected {list(ours.shape)}"
    wrong = case.wrong
    if not wrong.any():
        return difference(case)
    if wrong.sum() == 1 and ours.ndim:
        at = tuple(np.argwhere(wrong)[0])
        exact = f"{float(theirs[at]):.6g}, expected {float(ours[at]):.6g}"
        if np.isfinite(theirs[at]) and theirs[at] == -ours[at]:
            return "sign", f"{case.what} {list(map(int, at))} has its sign changed: {exact}"
        return "weight", f"{case.what} {list(map(int, at))} is {exact}"
    for hypothesis in HYPOTHESES:
        if found := hypothesis(case):
            return found
    return difference(case)


def whole(case: Case) -> Fault | None:
    """The whole tensor: zeros, sign changed, transposed, multiplied, shifted by one element."""
    ours, theirs, what = case.ours, case.theirs, case.what
    if not ours.ndim:
        return "constant", f"it is {float(theirs):.6g}, expected {float(ours):.6g}"
    if not theirs.any():
        return "weight", f"the {what} is all zeros"
    if not np.issubdtype(ours.dtype, np.unsignedinteger) and alike(theirs, -ours):
        return "sign", f"the {what} has its sign changed"
    if ours.ndim == 2 and ours.shape[0] == ours.shape[1] and alike(theirs, ours.T):
        return "transposition", f"the {what} is stored transposed"
    if ours.ndim == 2 and alike(theirs.ravel(), ours.T.ravel()):
        return "transposition", f"the {what} holds the numbers of the transposed one in its own shape"
    return None


def mistaken(case: Case) -> Fault | None:
    """Another tensor of the model."""
    for name, read in case.others.items():
        if alike(case.theirs, read()):
            return "swapped tensors", f"it holds what {name} should hold"
    return None


def scaled(case: Case) -> Fault | None:
    """Everything times one factor, up to the rounding of the product."""
    ours, theirs = as_real(case.ours), as_real(case.theirs)
    total = float(np.square(ours).sum())
    if not total or not np.isfinite(theirs).all() or np.issubdtype(case.ours.dtype, np.integer):
        return None
    factor = float((ours * theirs).sum()) / total
    step = np.spacing(np.abs(case.theirs).astype(np.float32)) if case.theirs.dtype == np.float32 else 2.0**-7
    allowed = 2 * step if isinstance(step, np.ndarray) else step * np.abs(theirs)
    if abs(factor) > 1e-6 and bool((np.abs(factor * ours - theirs) <= allowed + 1e-6 * np.abs(theirs)).all()):
        return "wrong scale", f"the {case.what} is {factor:.6g} times what it should be"
    return None


def parts_moved(case: Case) -> Fault | None:
    """Parts of a joined product (q|k|v, k|v) or halves that changed places."""
    last = case.module.rpartition(".")[2]
    for axis, size in enumerate(case.ours.shape[:2]):
        for count in (3, 2):
            if size % count or size < 2 * count:
                continue
            ours = np.split(case.ours, count, axis=axis)
            for order in list(itertools.permutations(range(count)))[1:]:
                if alike(case.theirs, np.concatenate([ours[place] for place in order], axis=axis)):
                    named = PARTS.get(last, ()) if len(PARTS.get(last, ())) == count and axis == 0 else ()
                    words = "|".join(named[place] if named else str(place) for place in order)
                    right = "|".join(named or map(str, range(count)))
                    kind = f"{AXES[axis]}s of the {case.what}"
                    return "permutation", f"the {kind} are in the order {words}, expected {right}"
    return None


def heads_moved(case: Case) -> Fault | None:
    """Heads that changed places, or a width that was cut as [E, H]."""
    if case.heads < 2 or case.ours.ndim > 2:
        return None
    for axis, size in enumerate(case.ours.shape):
        for parts in (1, 2, 3):
            if size % (parts * case.heads) or size == parts * case.heads:
                continue
            ours = np.moveaxis(case.ours, axis, 0).reshape(parts, case.heads, size // parts // case.heads, -1)
            theirs = np.moveaxis(case.theirs, axis, 0).reshape(ours.shape)
            if alike(theirs.reshape(parts, -1), ours.swapaxes(1, 2).reshape(parts, -1)):
                return "head order", f"the {case.what} is cut as [width, heads], expected [heads, width]"
            blocks = ours.reshape(parts * case.heads, -1)
            places = {block.tobytes(): place for place, block in enumerate(blocks)}
            order = [places.get(block.tobytes(), -1) for block in theirs.reshape(blocks.shape)]
            if sorted(order) == list(range(len(order))):
                at = next(place for place, now in enumerate(order) if now != place)
                moved = sum(now != place for place, now in enumerate(order))
                return (
                    "head order",
                    f"{moved} of {len(order)} heads of the {case.what} are in other places: head {order[at]} stands "
                    f"where head {at} belongs",
                )
    return None


def elsewhere(case: Case) -> Fault | None:
    if np.array_equal(np.sort(case.theirs, axis=None), np.sort(case.ours, axis=None)):
        return "permutation", f"the {case.what} holds the right numbers in other places"
    return None


def stale(case: Case) -> Fault | None:
    """Numbers that correlate with the right ones, though almost none is equal: weights of another training step."""
    ours, theirs = as_real(case.ours).ravel(), as_real(case.theirs).ravel()
    if case.wrong.mean() < 0.9 or ours.size < 8 or not np.isfinite(theirs).all() or not ours.std() or not theirs.std():
        return None
    alikeness = float(np.corrcoef(ours, theirs)[0, 1])
    away = float(np.linalg.norm(theirs - ours) / np.linalg.norm(ours))
    share = f"{int(case.wrong.sum())} of {ours.size} numbers of the {case.what} differ"
    if alikeness > 0.5:
        text = f"{share}, by {away:.2g} of their size, correlation {alikeness:.3f}: as of another training step"
        return "stale weights", text
    return "stale weights", f"{share}, correlation {alikeness:.3f}: it is of another model"


def difference(case: Case) -> Fault:
    if lost := int((case.wrong & ~np.isfinite(as_real(case.theirs))).sum()):  # a mask of -inf may be the model's own
        return "weight", f"{lost} of {case.theirs.size} numbers of the {case.what} are not finite"
    return "weight", f"{int(case.wrong.sum())} of {case.ours.size} numbers of the {case.what} differ"


def as_real(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)


def lines(case: Case) -> Fault | None:
    return line_fault(case.ours, case.theirs, case.wrong, case.what)


def rounded(case: Case) -> Fault | None:
    return rounding_fault(case.ours, case.theirs, case.what)


HYPOTHESES: tuple[Callable[[Case], Fault | None], ...] = (
    whole,
    mistaken,
    rounded,
    parts_moved,
    heads_moved,
    lines,
    scaled,
    elsewhere,
    stale,
)

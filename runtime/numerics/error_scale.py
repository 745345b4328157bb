"""The unit of errors: a scale for every element, computed from the oracle alone.

    scale of an element = max(|element|, scale of its row, least normal number of the type)
    scale of a row      = upper quartile of the magnitudes in it that are not zero

So an outlier may err by its own last digits without enlarging the budget of other elements, and underflow is allowed.
Only logits that a search could choose count: the others, masked tokens among them, are raised to one low value. Oracle,
PyTorch and candidate are divided by the same scales.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from seq2engine.export.contract import PRECISIONS, QUANTISED

EPSILON = {  # unit in the last place of a 1.0, in the type that a precision computes in
    "fp32": 2.0**-23,
    "fp16": 2.0**-10,
    "bf16": 2.0**-7,
    **dict.fromkeys(QUANTISED, 2.0**-10),
}
LEAST = {  # the least normal number: below it a type has a fixed spacing of LEAST * EPSILON
    name: 2.0**-14 if PRECISIONS[name] == "float16" else 2.0**-126 for name in PRECISIONS
}
QUARTILE = 0.75  # up to a quarter of a row may be outliers, up to three quarters zeros
UPPER = 64  # the best logits of a row: its scale, its spread and PyTorch's error are those of these
REACH = 149 * math.log(2.0)  # nats below the best within which a logit counts: below, its probability is 0 in fp32

BLOCK = 1 << 18  # elements processed at once: a dozen arrays of this size fit the processor's cache

Arrays = tuple[np.ndarray, ...]


def row_blocks(logits: np.ndarray) -> Iterator[slice]:
    """Rows [rows, V] in blocks: new arrays of a whole batch would cost more in page faults than in arithmetic."""
    rows = max(1, BLOCK // max(1, logits.shape[1]))
    return (slice(first, first + rows) for first in range(0, len(logits), rows))


def row_scales(tensor: np.ndarray) -> np.ndarray:
    """[rows, ...] -> [rows]. A row of zeros takes the median scale of the others."""
    sizes = np.abs(tensor.reshape(len(tensor), -1).astype(np.float64))
    sizes[~np.isfinite(sizes)] = 0.0
    sizes.sort(axis=1)
    width = sizes.shape[1]
    empty = np.count_nonzero(sizes == 0.0, axis=1)
    places = empty + np.floor(QUARTILE * (width - empty)).astype(np.int64)
    scales = np.take_along_axis(sizes, np.minimum(places, width - 1)[:, None], axis=1)[:, 0]
    if (some := scales[scales > 0.0]).size:
        scales[scales == 0.0] = np.median(some)
    return scales


def normalised(oracle: np.ndarray, others: Sequence[np.ndarray], precision: str) -> Arrays:
    """Arrays [rows, ...] -> the same in fp64, the oracle first, each element in units of its scale."""
    exact = oracle.astype(np.float64)
    scales = row_scales(exact).reshape(-1, *[1] * (exact.ndim - 1))
    return divided(exact, others, scales, precision)


def normalised_logits(oracle: np.ndarray, others: Sequence[np.ndarray], precision: str) -> Arrays:
    """Logits [rows, V] -> the values [N] within reach in any of the arrays, each in units of its scale."""
    exact = oracle.astype(np.float64)
    return within_reach(exact, others, row_scales(upper_logits(exact)), least_logits(exact), precision)


def within_reach(
    exact: np.ndarray, others: Sequence[np.ndarray], scales: np.ndarray, lowest: np.ndarray, precision: str
) -> Arrays:
    """The same for some columns [rows, C] of the logits, with the scales and the lowest values [rows] of whole rows."""
    floor = lowest[:, None]
    raised = [np.maximum(array.astype(np.float64), floor) for array in (exact, *others)]  # NaN stays NaN
    arrays = divided(raised[0], raised[1:], scales[:, None], precision)
    counts = np.logical_or.reduce([array != floor for array in raised])
    return tuple(array[counts] for array in arrays)


def divided(exact: np.ndarray, others: Sequence[np.ndarray], scales: np.ndarray, precision: str) -> Arrays:
    sizes = np.abs(exact)
    sizes[~np.isfinite(sizes)] = 0.0
    units = np.maximum(np.maximum(sizes, scales), LEAST[precision])
    with np.errstate(over="ignore"):
        return tuple(array.astype(np.float64) / units for array in (exact, *others))


def errors_of(exact: np.ndarray, given: np.ndarray) -> np.ndarray:
    """Absolute errors; equal infinities agree, any other value that is not finite has an infinite error."""
    with np.errstate(invalid="ignore"):
        errors = np.abs(given - exact)
    errors[given == exact] = 0.0
    errors[~np.isfinite(errors)] = np.inf
    return errors


def least_logits(exact: np.ndarray) -> np.ndarray:
    """Logits [rows, V] -> the bound [rows] above which a logit could be chosen."""
    return exact.max(axis=1) - REACH


def upper_places(exact: np.ndarray) -> np.ndarray:
    """Logits [rows, V] -> the columns [rows, U] of the best of them, in no order."""
    width = exact.shape[1]
    return np.argpartition(exact, width - min(UPPER, width), axis=1)[:, -min(UPPER, width) :]


def upper_logits(exact: np.ndarray) -> np.ndarray:
    """Logits [rows, V] -> the best of them, [rows, U]; 0 where one is out of reach."""
    upper = np.take_along_axis(exact, upper_places(exact), axis=1)
    return np.where(upper > least_logits(exact)[:, None], upper, 0.0)


def upper_spread(exact: np.ndarray) -> np.ndarray:
    """Logits [rows, V] -> the range [rows] of the best of them that are within reach."""
    upper = np.take_along_axis(exact, upper_places(exact), axis=1)
    best = upper.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return np.where(upper > best - REACH, best - upper, 0.0).max(axis=1)


def error_spread(exact: np.ndarray, rounded: np.ndarray) -> np.ndarray:
    """Logits [rows, V] of the oracle and of PyTorch -> the range [rows] of PyTorch's errors in the best of them.

    It is the largest margin between two tokens whose order those errors could swap: an error common to all logits
    swaps nothing. NaN where PyTorch's logits are not finite.
    """
    places = upper_places(exact)
    upper = np.take_along_axis(exact, places, axis=1)
    with np.errstate(invalid="ignore"):
        errors = np.take_along_axis(rounded, places, axis=1).astype(np.float64) - upper
        of_best = np.take_along_axis(errors, upper.argmax(axis=1)[:, None], axis=1)
        spread = np.ptp(np.where(upper > upper.max(axis=1, keepdims=True) - REACH, errors, of_best), axis=1)
    return np.where(np.isfinite(spread), spread, np.nan)

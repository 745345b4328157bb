"""Comparing: what makes two runs of a model the same. Results are data with a truth value and a reason.

Nothing here runs a model. Every budget is taken from the error that PyTorch itself makes at the same precision, on the
same inputs, against the same model in fp64 (the oracle):

    |candidate - oracle|   against   |PyTorch - oracle|      at the median, at nine tenths and at the worst element,
                                                             each element in units of its own scale (error_scale.py)
    the oracle's margin    against   PyTorch's error there   where two decodes choose differently
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from seq2engine.export.contract import PRECISIONS

from .error_scale import EPSILON, errors_of, normalised, normalised_logits, row_blocks, row_scales, upper_logits


@dataclass(frozen=True)
class Factors:
    """How many times PyTorch's own error a candidate may make: at the median and at nine tenths, and at the worst."""

    median: float
    worst: float


# Per precision, because what PyTorch's error is taken from is PyTorch at that precision. docs/LOG.md has the table that
# they rest on (every preset, position scheme and norm). The worst element has more room because a ratio of two maxima
# is a ratio of two single draws.
MEDIAN_FACTOR, WORST_FACTOR = 4.0, 16.0
FACTORS = dict.fromkeys(PRECISIONS, Factors(MEDIAN_FACTOR, WORST_FACTOR))
# Where decodes part, the candidate may likewise err four times as much as PyTorch. Of 1300 decodes of good exports that
# parted in fp16, one in a hundred did so by more than 1.2 times PyTorch's error, the widest by 2.6 times.
DIVERGENCE_FACTOR = MEDIAN_FACTOR

LOWEST, PER_OCTAVE, BINS = -96, 16, 16 * 144  # errors from 2^-96 to 2^48 in bins of 1/16 octave (4 %)


class ErrorTally:
    """Errors of one tensor in units of each element's scale, counted over any number of batches in constant memory.

    The worst error is exact; the median and nine tenths are those of a histogram, good to 2 %.
    """

    def __init__(self, precision: str) -> None:
        self.precision = precision
        self.counts = np.zeros((2, BINS), dtype=np.int64)  # of the reference and of the candidate
        self.worst = np.zeros(2)
        self.wrong = np.zeros(2)  # sums of squared errors
        self.along = np.zeros(2)  # sums of products with the oracle
        self.own = np.zeros(2)  # sums of squares
        self.squares = 0.0
        self.elements = 0
        self.rows = 0
        self.logs = 0.0  # sum of the logarithms of the rows' scales
        self.scaled_rows = 0  # rows that have a scale

    def add(
        self, oracle: np.ndarray, reference: np.ndarray, candidate: np.ndarray, counts: np.ndarray | None = None
    ) -> None:
        """Three arrays of one shape; the first axis counts rows (positions, sources) that err independently.

        `counts` says which elements do; those that do not must be zeros.
        """
        if oracle.size:
            arrays = normalised(oracle, (reference, candidate), self.precision)
            self.count(row_scales(oracle), arrays if counts is None else tuple(array[counts] for array in arrays))

    def add_logits(self, oracle: np.ndarray, reference: np.ndarray, candidate: np.ndarray) -> None:
        """Logits [rows, V]: those that a search could choose."""
        for rows in row_blocks(oracle):
            exact = oracle[rows]
            arrays = normalised_logits(exact, (reference[rows], candidate[rows]), self.precision)
            self.count(row_scales(upper_logits(exact)), arrays)

    def count(self, scales: np.ndarray, arrays: tuple[np.ndarray, ...]) -> None:
        exact, *others = arrays
        for which, values in enumerate(others):
            errors = errors_of(exact, values)
            self.worst[which] = max(self.worst[which], float(errors.max(initial=0.0)))
            self.counts[which] += np.bincount(bins_of(errors).ravel(), minlength=BINS)
            with np.errstate(invalid="ignore", over="ignore"):  # what is not finite makes sums that are not
                self.wrong[which] += float(np.square(errors).sum())
                self.along[which] += float((values * exact).sum())
                self.own[which] += float(np.square(values).sum())
        self.squares += float(np.square(exact).sum())
        self.elements += exact.size
        self.rows += len(scales)
        self.logs += float(np.log(scales[scales > 0.0]).sum())
        self.scaled_rows += int(np.count_nonzero(scales))

    def merge(self, other: ErrorTally) -> None:
        """Adds what another has counted."""
        names = ("counts", "wrong", "along", "own", "squares", "elements", "rows", "logs", "scaled_rows")
        for name in names:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.worst = np.maximum(self.worst, other.worst)

    def quantile(self, which: int, tenths: int) -> float:
        place = int(np.searchsorted(np.cumsum(self.counts[which]), (tenths * self.elements + 5) // 10))
        if place == 0:
            return 0.0
        middle = 2.0 ** ((place - 0.5) / PER_OCTAVE + LOWEST)
        return float(self.worst[which]) if place == BINS - 1 else min(middle, float(self.worst[which]))

    def errors(self, which: int) -> Errors:
        with np.errstate(invalid="ignore", divide="ignore"):
            relative = float(np.sqrt(self.wrong[which] / self.squares)) if self.wrong[which] else 0.0
            cosine = float(self.along[which] / np.sqrt(self.own[which] * self.squares)) if self.wrong[which] else 1.0
        middle, most = self.quantile(which, 5), self.quantile(which, 9)
        return Errors(middle, float(self.worst[which]), relative, cosine, most)

    def result(self, level: str, tensor: str, step: int | None = None) -> TensorResult:
        return TensorResult(
            level=level,
            tensor=tensor,
            step=step,
            elements=self.elements,
            scale=math.exp(self.logs / self.scaled_rows) if self.scaled_rows else 0.0,
            floor=EPSILON[self.precision],
            reference=self.errors(0),
            candidate=self.errors(1),
            allowed=FACTORS[self.precision],
        )


def bins_of(errors: np.ndarray) -> np.ndarray:
    """The bin of every error; exact zeros and what is below all bins go to the first, infinity to the last."""
    with np.errstate(divide="ignore"):
        places = np.ceil((np.log2(errors) - LOWEST) * PER_OCTAVE)
    return np.clip(places, 0, BINS - 1).astype(np.int64)


@dataclass(frozen=True)
class Errors:
    """Against the oracle, in units of each element's scale: the median and the largest error, the L2 norm of the errors
    over that of the oracle, the cosine between the two, and `most`, the error that nine of ten elements keep below.
    """

    median: float
    worst: float
    relative: float = 0.0
    cosine: float = 1.0
    most: float = 0.0


@dataclass(frozen=True)
class TensorResult:
    """One tensor of all sources (of one step where `step` is given): both errors against the oracle, and a verdict.

    `scale` is the geometric mean of the scales of the oracle's rows. Errors are in units of each element's own scale,
    and `floor` is one unit in the last place of that, the least budget there is: where PyTorch happens to be exact (an
    embedding) another order of the same sums still may round once.
    """

    level: str
    tensor: str
    step: int | None
    elements: int
    scale: float
    floor: float
    reference: Errors
    candidate: Errors
    allowed: Factors = FACTORS["fp32"]

    @property
    def name(self) -> str:
        return self.tensor if self.step is None else f"{self.tensor}, step {self.step}"

    @property
    def median_ratio(self) -> float:
        return ratio(self.candidate.median, self.reference.median, self.floor / self.allowed.median)

    @property
    def most_ratio(self) -> float:
        return ratio(self.candidate.most, self.reference.most, self.floor / self.allowed.median)

    @property
    def worst_ratio(self) -> float:
        return ratio(self.candidate.worst, self.reference.worst, self.floor / self.allowed.worst)

    @property
    def reason(self) -> str:
        if not math.isfinite(self.reference.worst):
            return f"{self.name}: PyTorch itself is not finite at this precision, which leaves nothing to compare with"
        if not math.isfinite(self.candidate.worst):
            return f"{self.name}: not finite"
        if self.median_ratio > self.allowed.median:
            much = times(self.median_ratio)
            return f"{self.name}: {much} PyTorch's own error at the median, allowed {self.allowed.median:g}x"
        if self.most_ratio > self.allowed.median:
            much = times(self.most_ratio)
            return f"{self.name}: {much} PyTorch's own error at nine tenths, allowed {self.allowed.median:g}x"
        if self.worst_ratio > self.allowed.worst:
            much = times(self.worst_ratio)
            return f"{self.name}: {much} PyTorch's own error at the worst element, allowed {self.allowed.worst:g}x"
        return ""

    @property
    def strain(self) -> float:
        """The share of its budget the tensor uses: above 1 it fails."""
        usual = max(self.median_ratio, self.most_ratio)
        return max(usual / self.allowed.median, self.worst_ratio / self.allowed.worst)

    def __bool__(self) -> bool:
        return not self.reason


def ratio(candidate: float, reference: float, least: float) -> float:
    """How many times the reference's error the candidate makes; the reference's counts as `least` where it is less."""
    against = max(reference, least)
    if math.isnan(candidate) or math.isinf(candidate):
        return math.inf
    return candidate / against if against else (math.inf if candidate else 0.0)


def times(value: float) -> str:
    """1.04x, 12x, 3e+05x."""
    return f"{value:.2f}x" if value < 10 else f"{value:.0f}x" if value < 1e4 else f"{value:.0e}x"


@dataclass(frozen=True)
class Divergence:
    """A source that two decodes end differently, and whether PyTorch's own error explains it.

    `margin` and `budget` are of `parted`: "tokens" (greedy: of the two tokens at `step`), "scores" (beam: of the two
    outputs), "beams" (of prefixes that one search kept and the other dropped, where they first did so) or "stop" (of
    the hypothesis that let one search stop and the prefix that kept the other going).
    The verdict is `tie` (the margin is within the error that PyTorch itself makes there), `drift` (it is within the
    budget, so the precision explains it) or `bug`. `top_two` is what the oracle puts between its two best tokens at
    `step`.
    """

    source: int
    step: int
    verdict: str
    parted: str
    margin: float
    budget: float
    reference: tuple[int, ...]
    candidate: tuple[int, ...]
    top_two: float = math.nan

    def budgets(self, margin: float) -> float:
        """A margin in units of the budget."""
        return ratio(margin, self.budget, 0.0)


@dataclass(frozen=True)
class DecodeResult:
    """All sources decoded by PyTorch and by the candidate. `failure` says why there is nothing to compare."""

    search: str
    sources: int
    divergences: tuple[Divergence, ...] = ()
    failure: str = ""

    @property
    def equal(self) -> int:
        return 0 if self.failure else self.sources - len(self.divergences)

    @property
    def summary(self) -> str:
        return f"{self.search}: {self.equal} of {self.sources} equal"

    @property
    def differing(self) -> tuple[Divergence, ...]:
        """Those that rounding does not explain, the clearest first."""
        found = [divergence for divergence in self.divergences if divergence.verdict == "bug"]
        return tuple(sorted(found, key=lambda d: -d.budgets(d.margin)))

    @property
    def reason(self) -> str:
        if self.failure:
            return f"{self.search}: {self.failure}"
        if not self.differing:
            return ""
        worst = self.differing[0]
        return (
            f"{self.search}: {len(self.differing)} of {self.sources} sources differ, clearest source {worst.source} "
            f"from step {worst.step} by a margin of {worst.margin:.2g}, where rounding explains {worst.budget:.2g}"
        )

    def __bool__(self) -> bool:
        return not self.reason


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

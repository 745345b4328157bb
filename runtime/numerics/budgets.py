"""Error budgets: how far a backend may be from the model, in tensors and decodes. A result is true or has a reason.

Nothing here runs a model. The budget is PyTorch's own error at the same precision on the same inputs,
times a factor; errors are against the same model in fp64 (the oracle):

    |candidate - oracle|   against   |PyTorch - oracle|      median, 90th percentile and maximum over the elements, each
                                                             in units of its own scale (error_scale.py)
    the oracle's margin    against   PyTorch's error there   where two decodes choose differently
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

from seq2engine.export.contract import PRECISIONS

from .error_scale import EPSILON, errors_of, normalised, normalised_logits, row_blocks, row_scales, upper_logits


@dataclass(frozen=True)
class Factors:
    """How many times PyTorch's own error is allowed: for the median and the 90th percentile, and for the maximum."""

    median: float
    worst: float


# By precision, as the reference is PyTorch at that precision. docs/LOG.md has the measurements behind the factors (all
# presets, position schemes and norms). The maximum has a larger factor, because a ratio of two maxima is noisy.
MEDIAN_FACTOR, WORST_FACTOR = 4.0, 16.0
FACTORS = dict.fromkeys(PRECISIONS, Factors(MEDIAN_FACTOR, WORST_FACTOR))
# Where decodes diverge, the candidate may likewise err four times as much as PyTorch. Of 1300 divergent fp16 decodes of
# correct exports, one in a hundred had a margin above 1.2 times PyTorch's error; the largest was 2.6 times.
DIVERGENCE_FACTOR = MEDIAN_FACTOR

# Fewer different rows, or numbers in them, have quantiles that vary as maxima do, and are allowed as much. A model
# without absolute positions that repeats a token has the same row again and again. Of n normal errors the median varies
# by 1.17 / sqrt(n) of itself: the ratio of two medians of 64 by a fifth. A single step with fewer rows is not judged.
FEWEST_ROWS, FEWEST_NUMBERS = 8, 64

LOWEST, PER_OCTAVE, BINS = -96, 16, 16 * 144  # errors from 2^-96 to 2^48 in bins of 1/16 octave (4 %)


class ErrorTally:
    """Errors of one tensor in units of each element's scale, over any number of batches in constant memory.

    The maximum is exact; the median and the 90th percentile come from a histogram and are good to 2 %.
    """

    def __init__(self, precision: str) -> None:
        self.precision = precision
        self.counts = np.zeros((2, BINS), dtype=np.int64)  # of the reference and of the candidate
        self.worst = np.zeros(2)
        self.squared_errors = np.zeros(2)  # sums
        self.products = np.zeros(2)  # sums of products with the oracle
        self.own = np.zeros(2)  # sums of squares
        self.squares = 0.0
        self.elements = 0
        self.rows = 0
        self.logs = 0.0  # sum of the logarithms of the rows' scales
        self.scaled_rows = 0  # rows that have a scale
        self.different: set[bytes] = set()  # hashes of different rows of the oracle, until they are enough
        self.width = 0  # numbers of a row

    def add(
        self, oracle: np.ndarray, reference: np.ndarray, candidate: np.ndarray, counts: np.ndarray | None = None
    ) -> None:
        """Three arrays of one shape; the first axis is rows (positions, sources), each with its own scale.

        `counts` selects the elements that count; all others must be zeros.
        """
        if oracle.size:
            self.note_rows(oracle)
            arrays = normalised(oracle, (reference, candidate), self.precision)
            self.count(row_scales(oracle), arrays if counts is None else tuple(array[counts] for array in arrays))

    def add_logits(self, oracle: np.ndarray, reference: np.ndarray, candidate: np.ndarray) -> None:
        """Logits [rows, V]: those that a search could choose."""
        self.note_rows(oracle)
        for rows in row_blocks(oracle):
            exact = oracle[rows]
            arrays = normalised_logits(exact, (reference[rows], candidate[rows]), self.precision)
            self.count(row_scales(upper_logits(exact)), arrays)

    def note_rows(self, oracle: np.ndarray) -> None:
        """Counts the different rows, no further than it matters."""
        for row in oracle:
            if self.has_enough:
                return
            self.width = row.size
            self.different.add(sha256(row.tobytes()).digest())

    @property
    def has_enough(self) -> bool:
        """Whether there are enough different rows and numbers for their median and 90th percentile."""
        rows = len(self.different)
        return rows >= FEWEST_ROWS and rows * self.width >= FEWEST_NUMBERS

    def count(self, scales: np.ndarray, arrays: tuple[np.ndarray, ...]) -> None:
        exact, *others = arrays
        for which, values in enumerate(others):
            errors = errors_of(exact, values)
            self.worst[which] = max(self.worst[which], float(errors.max(initial=0.0)))
            self.counts[which] += np.bincount(bins_of(errors).ravel(), minlength=BINS)
            with np.errstate(invalid="ignore", over="ignore"):  # values that are not finite make sums that are not
                self.squared_errors[which] += float(np.square(errors).sum())
                self.products[which] += float((values * exact).sum())
                self.own[which] += float(np.square(values).sum())
        self.squares += float(np.square(exact).sum())
        self.elements += exact.size
        self.rows += len(scales)
        self.logs += float(np.log(scales[scales > 0.0]).sum())
        self.scaled_rows += int(np.count_nonzero(scales))

    def merge(self, other: ErrorTally) -> None:
        """Adds the counts of another tally."""
        names = ("counts", "squared_errors", "products", "own", "squares", "elements", "rows", "logs", "scaled_rows")
        for name in names:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.worst = np.maximum(self.worst, other.worst)
        self.different |= other.different
        self.width = max(self.width, other.width)

    def quantile(self, which: int, tenths: int) -> float:
        place = int(np.searchsorted(np.cumsum(self.counts[which]), (tenths * self.elements + 5) // 10))
        if place == 0:
            return 0.0
        middle = 2.0 ** ((place - 0.5) / PER_OCTAVE + LOWEST)
        return float(self.worst[which]) if place == BINS - 1 else min(middle, float(self.worst[which]))

    def errors(self, which: int) -> Errors:
        with np.errstate(invalid="ignore", divide="ignore"):
            relative = float(np.sqrt(self.squared_errors[which] / self.squares)) if self.squared_errors[which] else 0.0
            cosine = (
                float(self.products[which] / np.sqrt(self.own[which] * self.squares))
                if self.squared_errors[which]
                else 1.0
            )
        middle, most = self.quantile(which, 5), self.quantile(which, 9)
        return Errors(middle, float(self.worst[which]), relative, cosine, most)

    def result(self, level: str, tensor: str, step: int | None = None) -> TensorResult:
        allowed = FACTORS[self.precision]
        return TensorResult(
            level=level,
            tensor=tensor,
            step=step,
            elements=self.elements,
            scale=math.exp(self.logs / self.scaled_rows) if self.scaled_rows else 0.0,
            floor=EPSILON[self.precision],
            reference=self.errors(0),
            candidate=self.errors(1),
            allowed=allowed if self.has_enough else Factors(allowed.worst, allowed.worst),
        )


def bins_of(errors: np.ndarray) -> np.ndarray:
    """The bin of every error; zeros and errors below all bins go to the first, infinity to the last."""
    with np.errstate(divide="ignore"):
        places = np.ceil((np.log2(errors) - LOWEST) * PER_OCTAVE)
    return np.clip(places, 0, BINS - 1).astype(np.int64)


@dataclass(frozen=True)
class Errors:
    """Errors against the oracle in units of each element's scale: median, maximum and 90th percentile (`most`); the L2
    norm of the errors over that of the oracle (`relative`), and the cosine similarity.
    """

    median: float
    worst: float
    relative: float = 0.0
    cosine: float = 1.0
    most: float = 0.0


@dataclass(frozen=True)
class TensorResult:
    """One tensor of all sources (of one step where `step` is given): both errors against the oracle, and a verdict.

    `scale` is the geometric mean of the scales of the oracle's rows. Errors are in units of each element's own scale.
    `floor`, one unit in the last place, is the smallest budget: where PyTorch happens to be exact (an embedding),
    another order of the same sums may still round once.
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
            return f"{self.name}: PyTorch's own values are not finite at this precision: there is no budget"
        if not math.isfinite(self.candidate.worst):
            return f"{self.name}: not finite"
        if self.median_ratio > self.allowed.median:
            much = times(self.median_ratio)
            return f"{self.name}: {much} PyTorch's own error at the median, allowed {self.allowed.median:g}x"
        if self.most_ratio > self.allowed.median:
            much = times(self.most_ratio)
            return f"{self.name}: {much} PyTorch's own error at the 90th percentile, allowed {self.allowed.median:g}x"
        if self.worst_ratio > self.allowed.worst:
            much = times(self.worst_ratio)
            return f"{self.name}: {much} PyTorch's own error at the maximum, allowed {self.allowed.worst:g}x"
        return ""

    @property
    def strain(self) -> float:
        """The share of the budget that is used: above 1 the tensor fails."""
        usual = max(self.median_ratio, self.most_ratio)
        return max(usual / self.allowed.median, self.worst_ratio / self.allowed.worst)

    def __bool__(self) -> bool:
        return not self.reason


def ratio(candidate: float, reference: float, least: float) -> float:
    """The candidate's error over the reference's, which counts as `least` if it is smaller."""
    against = max(reference, least)
    if math.isnan(candidate) or math.isinf(candidate):
        return math.inf
    return candidate / against if against else (math.inf if candidate else 0.0)


def times(value: float) -> str:
    """1.04x, 12x, 3e+05x."""
    return f"{value:.2f}x" if value < 10 else f"{value:.0f}x" if value < 1e4 else f"{value:.0e}x"


@dataclass(frozen=True)
class Divergence:
    """A source with two different outputs, and whether PyTorch's own error explains the difference.

    `kind` is what `margin` and `budget` compare: "tokens" (greedy: the two tokens at `step`), "scores" (beam: the
    two outputs), "beams" (prefixes that one search kept and the other dropped, at the first such step) or "stop" (the
    hypothesis at which one search stopped and the prefix with which the other went on).
    The verdict is `tie` (the margin is within PyTorch's own error there), `drift` (it is within the budget, so the
    precision explains it) or `bug`. `top_two` is the oracle's margin between its two best tokens at `step`.
    """

    source: int
    step: int
    verdict: str
    kind: str
    margin: float
    budget: float
    reference: tuple[int, ...]
    candidate: tuple[int, ...]
    top_two: float = math.nan

    def budgets(self, margin: float) -> float:
        """A margin in units of the budget."""
        return ratio(margin, self.budget, 0.0)


@dataclass(frozen=True)
class ScoreResult:
    """Scores of outputs with equal tokens: the pair that uses most of its budget, and how far apart any two are.

    A score is the sum of the tokens' log-probabilities, in beam search divided by length ** length_penalty. So its
    budget is the sum of the errors that PyTorch makes in each of them, divided likewise, times the factor that holds
    for choices between tokens.
    """

    compared: int
    source: int
    difference: float
    budget: float
    largest: float

    @property
    def reason(self) -> str:
        if self.difference <= self.budget:
            return ""
        return (
            f"equal tokens, but the score of source {self.source} differs by {self.difference:.2g}, "
            f"budget {self.budget:.2g}"
        )

    def __bool__(self) -> bool:
        return not self.reason


@dataclass(frozen=True)
class DecodeResult:
    """All sources decoded by the baseline and by the candidate. `failure`: why there is nothing to compare."""

    search: str
    sources: int
    divergences: tuple[Divergence, ...] = ()
    failure: str = ""
    scores: ScoreResult | None = None  # None: no two outputs have equal tokens and a score

    @property
    def equal(self) -> int:
        return 0 if self.failure else self.sources - len(self.divergences)

    @property
    def summary(self) -> str:
        return f"{self.search}: {self.equal} of {self.sources} equal"

    @property
    def differing(self) -> tuple[Divergence, ...]:
        """The divergences that rounding does not explain, largest margin in budgets first."""
        found = [divergence for divergence in self.divergences if divergence.verdict == "bug"]
        return tuple(sorted(found, key=lambda d: -d.budgets(d.margin)))

    @property
    def reason(self) -> str:
        if self.failure:
            return f"{self.search}: {self.failure}"
        if not self.differing:
            return f"{self.search}: {self.scores.reason}" if self.scores is not None and not self.scores else ""
        worst = self.differing[0]
        return (
            f"{self.search}: {len(self.differing)} of {self.sources} outputs differ beyond rounding, worst source "
            f"{worst.source} at step {worst.step}, margin {worst.margin:.2g}, budget {worst.budget:.2g}"
        )

    def __bool__(self) -> bool:
        return not self.reason


def finite(value: Any) -> Any:
    """Nested values for JSON, which has no infinity and no NaN: they become None."""
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""By how much rounding may set an operator's numbers in fp32 apart from exact ones: worst cases, no guesses.

n operations one after the other err by gamma(n) of what they add up (Higham, Accuracy and Stability, 3.1), in whatever
order. Errors of inputs go through an operation by its slope. Nothing here is probable: it is proven, so it never fails,
but for words, whose roundings are chance by construction (`word_sum_error`).
"""

from __future__ import annotations

import math

import numpy as np

from support import kernel_ops
from support.kernel_ops import normalised
from support.rounding import EXP, FP32, LAMBDA

WORD = 258 * 127  # of packing.c: the largest step of a word
HOPELESS = 50.0  # an error of a logit with which a sum may be anything
SHARE = 2.0**-10  # of candidates.c: tokens that have as much of a sum are exact
DEPTH, BLOCK = 512, 256  # of kernels.h and candidates.c: inputs and tokens that are summed before they meet others
SLOPE = 1.13  # the steepest of an activation function: that of Gelu
LEAST_POWER = np.exp(-87.0)  # exponents end there: what is less comes out as this
GELU_TERMS = 11  # of the polynomial; the magnitudes of its terms are less than twice its value


ERFC = np.vectorize(math.erfc, otypes=[np.float64])


def activated(x: np.ndarray, activation: str) -> np.ndarray:
    """To the last bits of fp64 wherever x lies: 1 + erf(x) has none left where x is far below 0, and e^-x no number."""
    if activation == "gelu":
        return 0.5 * x * ERFC(-x / math.sqrt(2))
    return x * np.exp(-np.logaddexp(0, -x)) if activation == "silu" else kernel_ops.activated(x, activation)


def gamma(roundings: float) -> float:
    return roundings * FP32 / (1 - roundings * FP32)


def product_error(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Of x @ weight, x perhaps a product itself."""
    depth = len(weight)
    return gamma(depth + depth // DEPTH + 2) * (np.abs(x.astype(np.float64)) @ np.abs(weight.astype(np.float64)))


def int8_error(product: np.ndarray) -> np.ndarray:
    """The sum is exact; it becomes a float, and is multiplied by the product of two scales, and by a third."""
    return gamma(4) * np.abs(product)


def activation_error(x: np.ndarray, error: np.ndarray, activation: str) -> np.ndarray:
    """Of activation(x), where x errs by `error`."""
    y = np.abs(activated(x, activation))
    if activation == "gelu":
        rest = np.abs(np.maximum(x, 0) - activated(x, "gelu"))  # |x| times the share of the other side
        own = gamma(1) * y + gamma(EXP + 7 * GELU_TERMS) * rest + 5 * FP32 * np.square(x) / 2 * rest
        return SLOPE * error + own + np.abs(x) * LEAST_POWER
    if activation == "silu":
        return SLOPE * error + gamma(EXP + 2) * y + np.abs(x) * LEAST_POWER
    return error


def added_error(x: np.ndarray, error: np.ndarray, addend: np.ndarray) -> np.ndarray:
    return error + FP32 * (np.abs(x + addend) + error)


def norm_error(
    x: np.ndarray, error: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, epsilon: float, rms: int
) -> np.ndarray:
    """Of a normalised row. The root of a variance errs by no more than the variance, relatively."""
    width = x.shape[-1]
    mean_error = 0.0 if rms else (error + gamma(width + 1) * (np.abs(x) + error)).mean(axis=-1, keepdims=True)
    centred = x if rms else x - x.mean(axis=-1, keepdims=True)
    off = error + mean_error + FP32 * (np.abs(centred) + error + mean_error)
    variance = np.square(centred).mean(axis=-1, keepdims=True) + epsilon
    wrong = (2 * np.abs(centred) * off + np.square(off)).mean(axis=-1, keepdims=True) / variance + gamma(width + 6)
    factor = 1 / np.sqrt(variance)
    scaled = np.abs(weight) * factor * (off + (np.abs(centred) + off) * (wrong + gamma(3)))
    largest = np.abs(weight) * np.sqrt(width) * (1 + gamma(width + 9))  # that a normalised number can be
    scaled = np.where(wrong < 0.5, scaled, 2 * largest)  # where the variance is all rounding, nothing better is known
    return scaled + gamma(1) * (np.abs(normalised(x, weight, bias, epsilon, rms)) + scaled)


def attention_error(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, seen: np.ndarray):
    """Of the weights and the context of one query q [E] over k, v [S,E], of which `seen` count -> their errors."""
    k, v = k[seen].astype(np.float64), v[seen].astype(np.float64)
    scores = scale * (k @ q)
    off = gamma(len(q) + 2) * np.abs(scale) * (np.abs(k) @ np.abs(q.astype(np.float64)))
    below = scores.max() - scores
    powers = np.exp(-below)
    relative = np.expm1(off + off.max() + FP32 * (below + off + off.max())) + gamma(EXP)
    total = powers.sum()
    of_sum = (powers * relative).sum() / total + gamma(len(scores) + 1) + len(scores) * LEAST_POWER
    weights = powers / total
    error = weights * (relative + 2 * of_sum + gamma(2)) + LEAST_POWER
    return error, error @ np.abs(v) + gamma(len(scores)) * ((weights + error) @ np.abs(v))


def exp_sum_error(logits: np.ndarray) -> np.ndarray:
    """Of the sum of e^(logit - best) over rows of given logits. An exponent is a difference, times a constant that is
    rounded; each block's sum is scaled to the best logit so far."""
    below = logits.max(axis=-1, keepdims=True).astype(np.float64) - logits
    powers = np.exp(-below)
    blocks = logits.shape[-1] // BLOCK + 1
    relative = 3 * FP32 * np.where(np.isfinite(below), below, 0) + gamma(EXP)
    scaled = gamma(logits.shape[-1] + blocks * (EXP + 2)) + FP32 * np.ptp(np.where(np.isfinite(logits), logits, 0))
    return (powers * relative).sum(axis=-1) + scaled * powers.sum(axis=-1) + logits.shape[-1] * LEAST_POWER


def word_sum_error(x: np.ndarray, table: np.ndarray, logits: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Of the sum of e^(logit - best) over rows x, whose logits by a table [V,D] in float err by no more than `error`,
    where tokens with less than SHARE of it are multiplied by words: steps of each token's scale, up or down by chance.

    A number of the table then errs by a chance of mean 0 within one step, apart from all others, whatever the table is.
    Their part of a sum is the sum of share * x * step * chance, so by Hoeffding's inequality it is more than

        LAMBDA / 2 * |x| * sqrt(sum of (share * scale)^2)

    with a chance of 2 exp(-LAMBDA^2 / 2), and so is a logit's error with a share of 1. e^error is more than 1 + error
    by its square at most, where errors are below 1. Floats err as they do in a product by floats, and in four further
    operations: a number divided by its scale, the chance added to that, the scale itself, times the scale.
    """
    x, exact = np.abs(x.astype(np.float64)), np.exp(logits - logits.max(axis=-1, keepdims=True))
    total = exact.sum(axis=-1, keepdims=True)
    scale = np.maximum(np.abs(table).max(axis=1).astype(np.float64) / WORD, np.finfo(np.float32).tiny)
    length = np.sqrt(np.square(x).sum(axis=-1, keepdims=True))
    rough = error + gamma(5) * (x @ (np.abs(table.T.astype(np.float64)) + scale))
    single = np.minimum(HOPELESS, LAMBDA / 2 * length * scale + rough)  # of one token
    shares = np.where(exact / total < SHARE * np.exp(2 * single.max(axis=-1, keepdims=True)), exact / total, 0)
    together = LAMBDA / 2 * length[..., 0] * np.sqrt(np.square(shares * scale).sum(axis=-1))
    of_words = together + (shares * (rough + np.square(single) * np.exp(single))).sum(axis=-1)
    of_floats = (exact * np.expm1(error + error.max(axis=-1, keepdims=True))).sum(axis=-1)
    return of_floats + exp_sum_error(logits) + of_words * total[..., 0] * np.exp(error.max(axis=-1))

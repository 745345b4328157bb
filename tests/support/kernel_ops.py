"""The operators of the kernel library in numpy, as the ONNX reference evaluator runs them.

    evaluator = ReferenceEvaluator(model, new_ops=OPS)

Sums are in fp64 and rounded to fp32 once, so their own error is nothing beside that of a computation in fp32. Rows are
rounded to int8 in fp32, operation by operation as ort_forms/int8_matmul.py has it: there every bit counts.
"""

from __future__ import annotations

import math

import numpy as np
from onnx.reference.op_run import OpRun

DOMAIN = "seq2engine"
MASKED = -65504.0
SIGNED = (127, 128)  # steps above zero and below it: scales are largest magnitudes
ERF = np.vectorize(math.erf, otypes=[np.float64])


def activated(x: np.ndarray, activation: str) -> np.ndarray:
    return {
        "": lambda: x,
        "relu": lambda: np.maximum(x, 0),
        "gelu": lambda: 0.5 * x * (1 + ERF(x / math.sqrt(2))),
        "silu": lambda: x / (1 + np.exp(-x)),
    }[activation]()


def normalised(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, epsilon: float, rms: int) -> np.ndarray:
    centred = x if rms else x - x.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + epsilon) * weight
    return scaled if bias is None else scaled + bias


def rounded_rows(x: np.ndarray, above: int, zero: int, least: float) -> tuple[np.ndarray, np.ndarray]:
    """Rows of x as integers (less their zero point), and the scale of each; a row of zeros has zeros."""
    largest = np.abs(x).max(axis=-1, keepdims=True) if (above, zero) == SIGNED else x.max(axis=-1, keepdims=True)
    scale = np.maximum(largest, np.float32(least)) if (above, zero) != SIGNED else largest
    unit = np.divide(x, scale, out=np.zeros_like(x), where=scale != 0)
    integers = np.clip(np.rint(unit / np.float32(1 / above)) + zero, 0, 255).astype(np.int64) - zero
    return integers, scale


def int8_product(
    x: np.ndarray, weight: np.ndarray, scale: np.ndarray, above: int, zero: int, least: float
) -> np.ndarray:
    integers, rows = rounded_rows(x, above, zero, least)
    sums = integers @ weight.astype(np.int64)
    return sums.astype(np.float64) * (np.float64(np.float32(1 / above)) * scale.astype(np.float64)) * rows


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def heads_of(x: np.ndarray, heads: int) -> np.ndarray:
    """[B, K, HE] -> [B, H, K, E]"""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2).astype(np.float64)


def merged(x: np.ndarray) -> np.ndarray:
    """[B, H, K, E] -> [B, K, HE]"""
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1).astype(np.float32)


class Linear(OpRun):
    op_domain = DOMAIN

    def product(self, x: np.ndarray, weight: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
        assert scale is None
        return x.astype(np.float64) @ weight.astype(np.float64)

    def _run(self, x, weight, scale=None, bias=None, smoothing=None, residual=None, *norms, **_):
        norm_weight, norm_bias, input_weight, input_bias = (*norms, *[None] * (4 - len(norms)))
        if input_weight is not None:
            x = normalised(x.astype(np.float64), input_weight, input_bias, self.input_epsilon, self.input_rms)
            x = x.astype(np.float32)
        y = self.product(x if smoothing is None else x * smoothing, weight, scale)
        y = activated(y if bias is None else y + bias, self.activation)
        if residual is not None:
            assert residual.shape == y.shape
            y = y + residual
        if norm_weight is not None:
            y = normalised(y, norm_weight, norm_bias, self.epsilon, self.rms)
        return (y.astype(np.float32),)


class LinearInt8(Linear):
    def product(self, x: np.ndarray, weight: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
        assert scale is not None
        return int8_product(x, weight, scale, self.above, self.zero, self.least)


class SelfAttention(OpRun):
    op_domain = DOMAIN

    def _run(self, qkv, self_k, self_v, write_index, self_mask, **_):
        q, k, v = np.split(heads_of(qkv, 3 * self.heads), 3, axis=1)
        caches = [self_k.copy(), self_v.copy()]
        for cache, new in zip(caches, (k, v), strict=True):
            for source, start in enumerate(write_index):
                cache[source, :, start : start + new.shape[2]] = new[source]
        scores = np.float64(np.float32(self.scale)) * q @ caches[0].astype(np.float64).swapaxes(-1, -2)
        weights = softmax(np.where(self_mask[:, None], scores, MASKED))
        return (merged(weights @ caches[1]), *caches)


class CrossAttention(OpRun):
    op_domain = DOMAIN

    def _run(self, q, k, v, source_mask=None, **_):
        keys = k if self.transposed else k.swapaxes(-1, -2)  # [B, H, E, S]
        scores = np.float64(np.float32(self.scale)) * heads_of(q, self.heads) @ keys.astype(np.float64)
        if source_mask is not None:
            scores = np.where(source_mask[:, None, None], scores, MASKED)
        weights = softmax(scores)
        return merged(weights @ v), weights.astype(np.float32)


class EncoderAttention(OpRun):
    op_domain = DOMAIN

    def _run(self, qkv, source_mask=None, **_):
        q, k, v = np.split(heads_of(qkv, 3 * self.heads), 3, axis=1)
        scores = np.float64(np.float32(self.scale)) * q @ k.swapaxes(-1, -2)
        if source_mask is not None:
            scores = np.where(source_mask[:, None, None], scores, MASKED)
        return (merged(softmax(scores) @ v),)


class Candidates(OpRun):
    op_domain = DOMAIN

    def product(self, x: np.ndarray, table: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
        assert scale is None
        return x.astype(np.float64) @ table.astype(np.float64)

    def _run(self, x, table, scale=None, bias=None, wanted=None, smoothing=None, **_):
        x = x if smoothing is None else x * smoothing
        logits = self.product(x, table.T if self.by_rows else table, scale)
        logits = (logits if bias is None else logits + bias).astype(np.float32)
        (asked,) = wanted.tolist()
        count = abs(asked) or min(x.shape[1] + 1, logits.shape[-1])
        tokens = np.argsort(-logits, axis=-1, kind="stable")[..., :count]
        best = np.take_along_axis(logits, tokens, axis=-1)
        summed = best if asked > 0 else logits
        exp_sum = np.exp(summed.astype(np.float64) - best[..., :1]).sum(axis=-1).astype(np.float32)
        return best if asked else logits, exp_sum, best, tokens


class CandidatesInt8(Candidates):
    def product(self, x: np.ndarray, table: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
        assert scale is not None
        return int8_product(x, table, scale, self.above, self.zero, self.least)


class Embedding(OpRun):
    op_domain = DOMAIN

    def _run(self, tokens, table, scale=None, positions=None, place=None, **_):
        """In fp32, operation by operation: every bit counts."""
        rows = table[tokens].astype(np.float32)
        rows = rows if scale is None else rows * scale[tokens][..., None]
        rows = rows * np.float32(self.factor)
        if place is not None:
            rows = rows + positions[place[:, None] if place.ndim == 1 else place]
        elif positions is not None:
            rows = rows + positions[np.arange(tokens.shape[1])]
        return (rows,)


class EmbeddingInt8(Embedding):
    pass


class SourceHeads(OpRun):
    op_domain = DOMAIN

    def _run(self, kv, **_):
        cut = kv.reshape(*kv.shape[:2], 2, self.heads, kv.shape[2] // (2 * self.heads))  # [B, S, 2, H, E]
        keys, values = np.moveaxis(cut, 2, 0).swapaxes(2, 3)  # [B, H, S, E]
        return np.ascontiguousarray(keys.swapaxes(2, 3) if self.transposed else keys), np.ascontiguousarray(values)


OPS = [
    *(Linear, LinearInt8, SelfAttention, CrossAttention, EncoderAttention),
    *(Candidates, CandidatesInt8, Embedding, EmbeddingInt8, SourceHeads),
]

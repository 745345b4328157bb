"""The output of a decoder step: logits, and what searches derive from them, computed once and only on demand.

Shapes: B sources, K beams, V vocab, C candidates of a beam.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from seq2engine.errors import RequestError

BLOCK = 64  # columns per block of `top_columns`; of 32 to 512 the fastest, with 128, for vocabularies of 8k to 64k
ROWS = 4  # logits summed at once by `log_sum_exp`: as many as fit a core's cache


@dataclass(frozen=True)
class Shortlist:
    """The only tokens that have logits, ascending, of a vocabulary of that size; one column for each."""

    tokens: tuple[int, ...]
    vocab: int

    @cached_property
    def ids(self) -> np.ndarray:
        return np.array(self.tokens, dtype=np.int64)  # [W]

    def columns_of(self, tokens: np.ndarray) -> np.ndarray:
        """Column of each token; any column for a token that is not in the list."""
        return np.minimum(np.searchsorted(self.ids, tokens), len(self.ids) - 1)

    def spread(self, logits: np.ndarray) -> np.ndarray:
        """Logits [B,K,W] of the shortlist -> [B,K,V], with -inf for all other tokens."""
        whole = np.full((*logits.shape[:-1], self.vocab), -np.inf, dtype=logits.dtype)
        whole[..., self.ids] = logits
        return whole


@dataclass(frozen=True)
class Candidates:
    """Tokens and logits [B,K,C] of a beam's likeliest tokens: the larger logit first, then the lower token."""

    tokens: np.ndarray
    logits: np.ndarray


@dataclass(frozen=True)
class Reduced:
    """Logits that the graph has reduced: candidates, and the sum [B,K] of exp(logit - the best candidate's)."""

    candidates: Candidates
    exp_sum: np.ndarray


class Logits(Protocol):
    """An array, or one on a device that is copied to the host once an item of it is asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, index: Any) -> np.ndarray: ...


class NoLogits:
    """Logits that stayed on the device: a search that needs them must request them before the first step."""

    def __init__(self, rows: int):
        self.shape = (rows, 1, 0)

    def __getitem__(self, index: Any) -> np.ndarray:
        raise RequestError("the logits of these steps were not kept; decode with: generate(..., logits=True)")


class AlikeLogits:
    """Logits [B,1,W] of one beam as those [B,K,W] of K alike ones; read once an item of them is asked for."""

    def __init__(self, own: Logits, beams: int):
        self.own, self.shape = own, (own.shape[0], beams, own.shape[2])

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.broadcast_to(self.own[...], self.shape)[index]


@dataclass(frozen=True)
class StepOutput:
    """Logits of the next token of K beams of B sources, and what is derived from them; valid until the next step.

    With a `shortlist`, `raw` has only its columns, and candidates that the graph has `reduced` are column numbers; what
    the graph has not reduced is reduced here. `rows` selects sources if `raw` has others too. Logits are the
    model's `own` until a rule changes them.
    """

    raw: Logits
    reduced: Reduced | None = None
    shortlist: Shortlist | None = None
    rows: np.ndarray | None = None
    own: bool = True

    @cached_property
    def columns(self) -> np.ndarray:
        """[B,K,W]: the logits of the shortlist, or of all tokens."""
        return self.raw[...] if self.rows is None else self.raw[self.rows]

    @cached_property
    def logits(self) -> np.ndarray:
        """[B,K,V]."""
        return self.columns if self.shortlist is None else self.shortlist.spread(self.columns)

    @cached_property
    def normaliser(self) -> np.ndarray:
        """[B,K] in fp64: logit - normaliser is a log-probability; not finite where logits are not."""
        if self.reduced is None:
            return log_sum_exp(self.columns)
        best = self.reduced.candidates.logits[..., 0]
        return np.log(self.reduced.exp_sum.astype(np.float64)) + best.astype(np.float64)

    @cached_property
    def candidates(self) -> Candidates:
        """The best K+1 of every beam, or as many as there are.

        Of a source's 2K best continuations the first K may end, and the first K without an end token run on. So of one
        beam only its best K and its end token matter; the rest of the vocabulary is never ranked.
        """
        best = candidates_from(self.columns) if self.reduced is None else self.reduced.candidates
        return best if self.shortlist is None else Candidates(self.shortlist.ids[best.tokens], best.logits)

    @cached_property
    def best(self) -> Candidates:
        """The likeliest token of every beam, which is all that greedy search reads."""
        if self.reduced is not None:
            return self.candidates
        columns = self.columns.argmax(axis=-1)[..., None]  # of equal logits the first
        tokens = columns if self.shortlist is None else self.shortlist.ids[columns]
        return Candidates(tokens, np.take_along_axis(self.columns, columns, axis=-1))

    def logits_of(self, tokens: np.ndarray, beams: np.ndarray | None = None) -> np.ndarray:
        """Tokens [B,C] (of the shortlist, if there is one) that continue `beams` [B,C] -> their logits [B,C].

        Without `beams` token i continues beam i.
        """
        rows = np.arange(len(tokens)) if self.rows is None else self.rows
        places = tokens if self.shortlist is None else self.shortlist.columns_of(tokens)
        return self.raw[rows[:, None], np.arange(tokens.shape[1]) if beams is None else beams, places]

    def of_alike(self, beams: int) -> StepOutput:
        """The output of one beam [B,1,...] as that of so many alike ones, with as many candidates as they need."""
        assert self.rows is None
        every, needed = AlikeLogits(self.raw, beams), min(beams + 1, self.raw.shape[-1])
        if self.reduced is None:
            return StepOutput(every, shortlist=self.shortlist, own=self.own)
        best = self.reduced.candidates
        if best.tokens.shape[-1] < needed:
            best = candidates_from(self.columns, needed)
        found = (best.tokens[..., :needed], best.logits[..., :needed], self.reduced.exp_sum)
        tokens, logits, total = (np.repeat(array, beams, axis=1) for array in found)
        return StepOutput(every, Reduced(Candidates(tokens, logits), total), self.shortlist, own=self.own)

    def of(self, rows: np.ndarray) -> StepOutput:
        """The output for these sources only; copied on demand."""
        assert self.rows is None
        reduced = self.reduced
        if reduced is not None:
            best = Candidates(reduced.candidates.tokens[rows], reduced.candidates.logits[rows])
            reduced = Reduced(best, reduced.exp_sum[rows])
        return StepOutput(self.raw, reduced, self.shortlist, rows, self.own)


class NotFiniteError(RequestError):
    """Logits that are not finite; `source` is a number in the batch."""

    def __init__(self, source: int):
        super().__init__(
            f"source {source}: the model's logits are not finite, expected numbers; "
            "find the first bad layer with: seq2engine parity BUNDLE"
        )
        self.source = source


def finite(normaliser: np.ndarray, sources: np.ndarray) -> np.ndarray:
    """The normalisers [B,K]; raises for a source with one that is not finite (NaN, inf, no token possible)."""
    good = np.isfinite(normaliser)
    if np.count_nonzero(good) < good.size:
        raise NotFiniteError(int(sources[~good.all(axis=1)][0]))
    return normaliser


def candidates_from(logits: np.ndarray, count: int = 0) -> Candidates:
    """Logits [B,K,V] -> the best `count` (0: K+1) of every beam, or as many as there are."""
    batch, beams, vocab = logits.shape
    tokens = top_columns(logits.reshape(-1, vocab), min(count or beams + 1, vocab)).reshape(batch, beams, -1)
    return Candidates(tokens, np.take_along_axis(logits, tokens, axis=-1))


def log_sum_exp(logits: np.ndarray) -> np.ndarray:
    """[B,K,V] -> [B,K] in fp64; not finite where logits are NaN or +inf, or all are -inf."""
    flat = logits.reshape(-1, logits.shape[-1])
    top = np.empty(len(flat), dtype=np.float64)
    total = np.empty(len(flat), dtype=np.float64)
    with np.errstate(invalid="ignore"):
        for start in range(0, len(flat), ROWS):
            block = flat[start : start + ROWS]
            best = block.max(axis=-1, keepdims=True)  # NaN wins a maximum
            shifted = block - best
            # Summed in the logits' own type: numpy casts in chunks that straddle rows, so the last bit of a
            # source's score would depend on its place in the batch.
            top[start : start + ROWS] = best[:, 0]
            total[start : start + ROWS] = np.exp(shifted, out=shifted).sum(axis=-1)
        return (np.log(total) + top).reshape(logits.shape[:-1])


def top_columns(rows: np.ndarray, count: int) -> np.ndarray:
    """rows [R,V] -> columns [R,count] of the largest values of each row, larger first, then lower column first."""
    width = rows.shape[1]
    if width > 4 * count * BLOCK:
        # The best `count` values are in the `count` blocks with the largest maxima (of equals, the first ones), and
        # one pass of maxima is several times faster than a partition of the whole row.
        maxima = np.maximum.reduceat(rows, np.arange(0, width, BLOCK), axis=1)
        blocks = np.sort(top_columns(maxima, count), axis=1)
        columns = (blocks[..., None] * BLOCK + np.arange(BLOCK)).reshape(len(rows), -1)
        inside = columns < width  # the last block may be short; missing columns rank last
        values = np.where(inside, np.take_along_axis(rows, np.minimum(columns, width - 1), axis=1), -np.inf)
        return np.take_along_axis(columns, top_columns(values, count), axis=1)

    columns = np.sort(np.argpartition(rows, width - count, axis=1)[:, width - count :], axis=1)
    cut = np.take_along_axis(rows, columns, axis=1).min(axis=1, keepdims=True)
    tied = np.flatnonzero(np.count_nonzero(rows >= cut, axis=1) > count)
    if tied.size:  # a partition picks any of equal values, we the first ones
        columns[tied] = np.sort(np.argsort(-rows[tied], axis=1, kind="stable")[:, :count], axis=1)
    order = np.argsort(-np.take_along_axis(rows, columns, axis=1), axis=1, kind="stable")
    return np.take_along_axis(columns, order, axis=1)

"""The output table of a draft in fewer columns, chosen by the states that drafts have had.

    x [D] --MatMulNBits, table [V,D]--> rough logits
    becomes   x --MatMul [D,R]--> [R] --MatMulNBits, table [V,R]--> rough logits

Logits rank tokens, so of a state x only those directions count in which states vary and rows of the table differ. They
are few: 128 columns instead of 512 of OPUS-MT's table put the right token among the first 128, for each of 580 states
that were not used to find them. From the table alone they cannot be found: by its singular values it is two of three
(docs/LOG.md).

With C the mean of x x', G the mean of w w' over rows w less their mean, and S the square root of C: of all A and B
[D,R], A = S^-1 U and B = S U have the least mean square of x w - x A w B, where U are the first eigenvectors of S G S.
Columns of B are divided by the square root of their strength, and those of A multiplied: 4 bits then do not spend their
range on the first of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SHARES = (4, 2)  # parts of the columns that are tried: the first that finds enough is taken
REFINED = 128  # roughly best tokens that are multiplied again
FOUND = 0.995  # share of states that were not used to choose, whose best token is among those
HELD = 4  # one state in so many is one of them: the last ones, of other sentences than those before
RIDGE = 1e-3  # of the mean variance: directions that no state had yet
MULTIPLE = 16  # of which the number of columns is one
TOKENS = 2048  # whose logits are held at a time


@dataclass(frozen=True)
class NarrowTable:
    """`before` [D,R] takes a state to the columns of `table` [V,R]. Logits lack what is the same for all tokens."""

    before: np.ndarray
    table: np.ndarray


def narrow_table(table: np.ndarray, bias: np.ndarray | None, states: np.ndarray) -> NarrowTable | None:
    """The narrowest table [V,R] that finds the best tokens of states [N,D]; None where none finds enough of them."""
    width = table.shape[1]
    if not np.isfinite(states).all():
        return None
    chosen, held = np.split(states, [len(states) - len(states) // HELD])
    chosen = chosen.astype(np.float64)
    moment = chosen.T @ chosen / len(chosen)
    moment += RIDGE * np.trace(moment) / width * np.eye(width)
    mean = table.mean(axis=0, dtype=np.float64)
    rows = (table.T @ table).astype(np.float64) / len(table) - np.outer(mean, mean)
    sizes, axes = np.linalg.eigh(moment)
    root, inverse = (axes * np.sqrt(sizes)) @ axes.T, (axes / np.sqrt(sizes)) @ axes.T
    strengths, directions = np.linalg.eigh(root @ rows @ root)
    best = best_tokens(table, bias, held)
    for share in SHARES:
        count = width // share // MULTIPLE * MULTIPLE
        if not count or strengths[-count] <= 0:
            continue
        balance = strengths[: -count - 1 : -1] ** 0.25  # square roots of the columns' standard deviations
        first = directions[:, : -count - 1 : -1]
        after = (root @ first / balance).astype(np.float32)
        narrow = table @ after
        narrow -= mean.astype(np.float32) @ after
        made = NarrowTable((inverse @ first * balance).astype(np.float32), narrow)
        if share_found(made, bias, held, best) >= FOUND:
            return made
    return None


def best_tokens(table: np.ndarray, bias: np.ndarray | None, states: np.ndarray) -> np.ndarray:
    """The token with the largest logit for each state."""
    found, top = np.zeros(len(states), dtype=np.int64), np.full(len(states), -np.inf)
    for first in range(0, len(table), TOKENS):
        logits = logits_of(table, bias, states, first)
        place = logits.argmax(axis=1)
        value = logits[np.arange(len(states)), place]
        found, top = np.where(value > top, first + place, found), np.maximum(value, top)
    return found


def share_found(narrow: NarrowTable, bias: np.ndarray | None, states: np.ndarray, best: np.ndarray) -> float:
    """The share of states whose best token is among the REFINED of the narrow table."""
    reduced = states @ narrow.before
    known = (reduced * narrow.table[best]).sum(axis=1) + (0 if bias is None else bias[best])
    above = np.zeros(len(states), dtype=np.int64)
    for first in range(0, len(narrow.table), TOKENS):
        logits = logits_of(narrow.table, bias, reduced, first)
        here = np.flatnonzero((first <= best) & (best < first + TOKENS))
        logits[here, best[here] - first] = -np.inf  # a sum of another order may be above itself
        above += (logits > known[:, None]).sum(axis=1)
    return float((above < REFINED).mean())


def logits_of(table: np.ndarray, bias: np.ndarray | None, states: np.ndarray, first: int) -> np.ndarray:
    """Logits [N,TOKENS] of the tokens from `first` on."""
    part = slice(first, first + TOKENS)
    logits: np.ndarray = states @ table[part].T
    return logits if bias is None else logits + bias[part]

"""Constraints that need to know where a beam stands: in a trie, or among the phrases that it must say.

They are rules like the others (rules.py). A row that stands nowhere is left as it is: it is that of a source that has
ended, or of a beam whose score is -inf. Shapes: B sources, K beams, V vocab, U symbols of the phrases, R rows of some.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from .option_checks import barred_of, offset_of, room_of
from .options import SearchOptions
from .phrases import phrase_table


class Constraint(Protocol):
    def follow(self, tokens: np.ndarray, parents: np.ndarray, length: int) -> None:
        """`tokens` and `parents` [B,K] are what the step was given; the token to be chosen now is number `length`."""

    def limit(self, logits: np.ndarray, length: int) -> np.ndarray:
        """Logits [B,K,V], which may be written to, with what must not be said at -inf."""

    def keep(self, rows: np.ndarray) -> None:
        """From now on only these sources are searched."""


class TrieConstraint:
    """Only what the trie goes on with, of which only what can still come to an end before the maximum length."""

    def __init__(self, options: SearchOptions, end: int):
        assert options.trie is not None
        self.trie, self.end = options.trie, end
        self.offset, self.room = offset_of(options), room_of(options)
        self.least = self.trie.least(barred_of(options))
        self.nodes: np.ndarray = np.zeros((0, 0), dtype=np.int64)  # [B, K]; -1 is nowhere

    def follow(self, tokens: np.ndarray, parents: np.ndarray, length: int) -> None:
        if length == 1:
            self.nodes = np.zeros(tokens.shape, dtype=np.int64)
        elif length - 1 > self.offset:
            self.nodes = self.trie.after(np.take_along_axis(self.nodes, parents, axis=1), tokens)

    def limit(self, logits: np.ndarray, length: int) -> np.ndarray:
        rows = np.flatnonzero(self.nodes >= 0)
        nodes = self.nodes.ravel()[rows]
        which, edges = self.trie.children(nodes)
        open_ = self.least[edges + 1] <= self.room - length
        which, tokens = which[open_], self.trie.tokens_of(edges[open_])
        flat = logits.reshape(-1, logits.shape[-1])
        limited = np.full((len(rows), flat.shape[1]), -np.inf, dtype=flat.dtype)
        limited[which, tokens] = flat[rows[which], tokens]
        ends = self.trie.ends[nodes]
        limited[ends, self.end] = flat[rows[ends], self.end]
        flat[rows] = limited
        return logits

    def keep(self, rows: np.ndarray) -> None:
        self.nodes = self.nodes[rows]


class PhraseConstraint:
    """No end before all is said, and nothing that would leave too little room to say it.

    Greedy search is given a phrase to say where it would end without. Beam search keeps beams for them (banks.py).
    """

    def __init__(self, options: SearchOptions, end: int):
        self.table = phrase_table(options.phrases)
        self.end, self.room, self.alone = end, room_of(options), options.beam == 1
        self.symbols: np.ndarray | None = None  # [V]
        self.nodes: np.ndarray = np.zeros((0, 0), dtype=np.int64)  # [B, K]
        self.bits: np.ndarray = np.zeros((0, 0), dtype=np.int64)  # [B, K]

    def follow(self, tokens: np.ndarray, parents: np.ndarray, length: int) -> None:
        if length == 1:
            self.nodes = np.zeros(tokens.shape, dtype=np.int64)
            self.bits = np.zeros(tokens.shape, dtype=np.int64)
            return
        self.nodes, self.bits = self.after(
            np.take_along_axis(self.nodes, parents, axis=1),
            np.take_along_axis(self.bits, parents, axis=1),
            tokens,
        )

    def after(self, nodes: np.ndarray, bits: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """States and the tokens said there -> states."""
        alphabet = self.table.alphabet
        places = np.searchsorted(alphabet, tokens)
        known = alphabet[np.minimum(places, len(alphabet) - 1)] == tokens
        nodes = self.table.next[nodes, np.where(known, places + 1, 0)]
        return nodes, bits | self.table.said[nodes]

    def needed_next(self) -> np.ndarray:
        """Tokens that are missing after every symbol: [B, K, U+1]."""
        nodes = self.table.next[self.nodes]
        return self.table.needed(nodes, self.bits[..., None] | self.table.said[nodes])

    def needed_after(self, tokens: np.ndarray, beams: np.ndarray) -> np.ndarray:
        """Tokens that are missing after these candidates [B,C], each of one beam."""
        nodes, bits = (np.take_along_axis(state, beams, axis=1) for state in (self.nodes, self.bits))
        return self.table.needed(*self.after(nodes, bits, tokens))

    def limit(self, logits: np.ndarray, length: int) -> np.ndarray:
        now, after = self.table.needed(self.nodes, self.bits), self.needed_next()
        fits = after <= self.room - length  # [B, K, U+1]
        if self.alone:
            wants_to_end = (logits.argmax(axis=-1) == self.end) & (now > 0)
            fits &= ~wants_to_end[..., None] | (after < now[..., None])
        logits[now > 0, self.end] = -np.inf
        if self.symbols is None:
            self.symbols = self.table.symbols(logits.shape[-1])
        some = fits.any(axis=-1) & ~fits.all(axis=-1)
        logits[some] = np.where(fits[some][:, self.symbols], logits[some], -np.inf)
        return logits

    def keep(self, rows: np.ndarray) -> None:
        self.nodes, self.bits = self.nodes[rows], self.bits[rows]

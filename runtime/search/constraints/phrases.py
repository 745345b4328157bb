"""Phrases that every output must contain (constrained decoding): which of them each beam has, and what is missing.

    phrases 4 5 6 | 5 7      nodes "", 4, 45, 456, 5, 57      after 4 5 the token 7 leads to 57: progress carries over

PhraseTable           an automaton over the phrases
PhraseConstraint      the state of every beam in it, and the tokens that leave enough room for what is missing
banked_continuations  beams kept for phrases: dynamic beam allocation (Post & Vilar 2018)

A state is a node (the longest end of the output that begins a phrase) and a set of bits, the phrases that are complete.
`needed` bounds the tokens still missing: one phrase is finished, the others follow in full. The right token lowers it
by at least 1, so a beam that never needs more tokens than there is room for completes all phrases.

Shapes: B sources, K beams, V vocab, C candidates, N phrases, U different tokens in them, P nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

Tokens = tuple[int, ...]
MOST = 62  # phrases: their bits are one number


def contains(tokens: Tokens, part: Tokens) -> bool:
    return any(tokens[i : i + len(part)] == part for i in range(len(tokens) - len(part) + 1))


class PhraseTable:
    """Symbols number the tokens of the phrases from 1; symbol 0 is any other token."""

    def __init__(self, phrases: tuple[Tokens, ...]):
        wanted = sorted(set(phrases))
        # A phrase within another one needs no tracking of its own.
        self.phrases = [phrase for phrase in wanted if not any(phrase != w and contains(w, phrase) for w in wanted)]
        self.alphabet = np.array(sorted({token for phrase in self.phrases for token in phrase}), dtype=np.int64)
        beginnings = {phrase[:i] for phrase in self.phrases for i in range(len(phrase) + 1)} | {()}
        nodes = sorted(beginnings, key=lambda tokens: (len(tokens), tokens))
        number = {tokens: i for i, tokens in enumerate(nodes)}
        self.lengths = np.array([len(phrase) for phrase in self.phrases], dtype=np.int64)
        self.next = np.zeros((len(nodes), len(self.alphabet) + 1), dtype=np.int64)  # [P, U+1]
        self.complete = np.zeros(len(nodes), dtype=np.int64)  # [P] bits
        self.begun = np.zeros(
            (len(nodes), len(self.phrases)), dtype=np.int64
        )  # [P, N] tokens of it at the output's end
        for tokens, node in number.items():
            for symbol, token in enumerate(self.alphabet.tolist(), start=1):
                text = (*tokens, token)
                self.next[node, symbol] = next(number[text[i:]] for i in range(len(text) + 1) if text[i:] in number)
            for bit, phrase in enumerate(self.phrases):
                if tokens == phrase:
                    self.complete[node] = 1 << bit
                ends = (tokens[i:] for i in range(len(tokens) + 1))
                self.begun[node, bit] = next(len(e) for e in ends if len(e) < len(phrase) and phrase[: len(e)] == e)

    @property
    def total(self) -> int:
        return int(self.lengths.sum())

    def symbols(self, vocab: int) -> np.ndarray:
        """[V] the symbol of every token."""
        symbols = np.zeros(vocab, dtype=np.int64)
        symbols[self.alphabet] = np.arange(1, len(self.alphabet) + 1)
        return symbols

    def needed(self, nodes: np.ndarray, complete: np.ndarray) -> np.ndarray:
        """Tokens that are enough to complete all phrases, of states of any shape."""
        missing = ~(complete[..., None] >> np.arange(len(self.phrases))) & 1
        return (missing * self.lengths).sum(axis=-1) - (missing * self.begun[nodes]).max(axis=-1, initial=0)

    def needed_after(self, tokens: Sequence[int]) -> int:
        node, complete = 0, 0
        symbols = {token: symbol for symbol, token in enumerate(self.alphabet.tolist(), start=1)}
        for token in tokens:
            node = self.next[node, symbols.get(token, 0)]
            complete |= int(self.complete[node])
        return int(self.needed(np.array(node), np.array(complete)))


@lru_cache(maxsize=16)
def phrase_table(phrases: tuple[Tokens, ...]) -> PhraseTable:
    return PhraseTable(phrases)


class PhraseConstraint:
    """No end token before all phrases are complete, and no token that would leave too little room for them.

    `room` is how many tokens an output may have. With `greedy`, the next token of a phrase is forced where the output
    would end without it; beam search keeps beams for phrases instead.
    """

    def __init__(self, phrases: tuple[Tokens, ...], end: int, room: int, greedy: bool):
        self.table = phrase_table(phrases)
        self.end, self.room, self.greedy = end, room, greedy
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
        """States, and the tokens chosen there -> states."""
        alphabet = self.table.alphabet
        places = np.searchsorted(alphabet, tokens)
        known = alphabet[np.minimum(places, len(alphabet) - 1)] == tokens
        nodes = self.table.next[nodes, np.where(known, places + 1, 0)]
        return nodes, bits | self.table.complete[nodes]

    def needed_next(self) -> np.ndarray:
        """Tokens that are missing after every symbol: [B, K, U+1]."""
        nodes = self.table.next[self.nodes]
        return self.table.needed(nodes, self.bits[..., None] | self.table.complete[nodes])

    def needed_after(self, tokens: np.ndarray, beams: np.ndarray) -> np.ndarray:
        """Tokens that are missing after these candidates [B,C], each of one beam."""
        nodes, bits = (np.take_along_axis(state, beams, axis=1) for state in (self.nodes, self.bits))
        return self.table.needed(*self.after(nodes, bits, tokens))

    def limit(self, logits: np.ndarray, length: int) -> np.ndarray:
        now, after = self.table.needed(self.nodes, self.bits), self.needed_next()
        fits = after <= self.room - length  # [B, K, U+1]
        if self.greedy:
            would_end = (logits.argmax(axis=-1) == self.end) & (now > 0)
            fits &= ~would_end[..., None] | (after < now[..., None])
        logits[now > 0, self.end] = -np.inf
        if self.symbols is None:
            self.symbols = self.table.symbols(logits.shape[-1])
        some = fits.any(axis=-1) & ~fits.all(axis=-1)
        logits[some] = np.where(fits[some][:, self.symbols], logits[some], -np.inf)
        return logits

    def keep(self, rows: np.ndarray) -> None:
        self.nodes, self.bits = self.nodes[rows], self.bits[rows]


def banked_continuations(
    phrases: PhraseConstraint, logits: np.ndarray, best: np.ndarray, running: np.ndarray, normaliser: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Logits [B,K,V], beam scores and normalisers [B,K] -> scores, tokens, beams and logits [B,C] of 2K continuations.

    A candidate's bank is the number of phrase tokens it has. By score alone, beams without the phrases would push out
    those with them, so every bank has an equal share of the beams, best candidates first; a bank with too few
    candidates leaves its share to the others. `best` [B,K,K+1] are the best tokens of every beam; the tokens of all
    phrases are candidates as well. Of the result the first K, best first, are those that end and the shares of all
    banks; the others replace those that end.
    """
    batch, beam, count = best.shape
    offered = np.broadcast_to(phrases.table.alphabet, (batch, beam, len(phrases.table.alphabet)))
    tokens = np.concatenate((best, offered), axis=-1)  # [B, K, count + U]
    chosen_logits = np.take_along_axis(logits, tokens, axis=-1)
    scores = chosen_logits + (running - normaliser)[..., None]
    twice = (offered[..., None] == best[:, :, None, :]).any(axis=-1)
    scores[..., count:][twice] = -np.inf

    beams = np.broadcast_to(np.arange(beam)[:, None], tokens.shape)
    flat = [array.reshape(batch, -1) for array in (scores, tokens, beams, chosen_logits)]
    order = np.argsort(-flat[0], axis=1, kind="stable")
    scores, tokens, beams, chosen_logits = (np.take_along_axis(array, order, axis=1) for array in flat)
    chosen = bank_shares(phrases, scores, tokens, beams, beam)
    scores, tokens, beams, chosen_logits = (
        np.take_along_axis(array, chosen, axis=1) for array in (scores, tokens, beams, chosen_logits)
    )
    return scores, tokens, beams, chosen_logits


def bank_shares(
    phrases: PhraseConstraint, scores: np.ndarray, tokens: np.ndarray, beams: np.ndarray, beam: int
) -> np.ndarray:
    """Candidates [B,C], best first -> the columns [B,2K] that are kept.

    Round robin: the best candidate of every bank, then the second of each, and so on, the highest bank first. One that
    ends takes no beam: it counts if it is among the best K of its bank, as in a search without phrases.
    """
    missing = phrases.needed_after(tokens, beams)  # [B, C]: the fewer, the higher the bank
    ends, never = tokens == phrases.end, np.iinfo(np.int64).max
    better = np.tril(missing[:, :, None] == missing[:, None, :], k=-1)  # [B, C, C]: in the same bank
    turn = (better & ~ends[:, None, :]).sum(axis=-1)
    claim = np.where(ends & (better.sum(axis=-1) >= beam), never, turn * (phrases.table.total + 1) + missing)
    claim = np.where(ends & (claim < never), -1, claim)
    claim = np.where(scores > -np.inf, claim, never)
    chosen = np.argsort(claim, axis=1, kind="stable")[:, : 2 * beam]
    chosen[:, :beam].sort(axis=1)  # candidates are ordered best first
    return chosen

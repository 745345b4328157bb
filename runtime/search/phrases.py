"""Phrases that an output must say: an automaton that knows, for every beam, what is said and what is still missing.

    phrases 4 5 6 | 5 7      nodes "", 4, 45, 456, 5, 57      after 4 5 the token 7 leads to 57: progress carries over

A state is a node (the longest end of the text that begins a phrase) and a set of bits, the phrases that were said.
`needed` bounds the tokens that are still missing: one phrase is finished, the others follow in full. It falls by at
least 1 with the right token, so who never needs more than there is room for will always have said everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

Words = tuple[int, ...]
MOST = 62  # phrases: their bits are one number


def contains(words: Words, part: Words) -> bool:
    return any(words[i : i + len(part)] == part for i in range(len(words) - len(part) + 1))


class PhraseTable:
    """Shapes: N phrases, U different tokens in them (symbol 0 is any other token), P nodes."""

    def __init__(self, phrases: tuple[Words, ...]):
        wanted = sorted(set(phrases))
        # What another phrase says anyway needs no watching.
        self.phrases = [words for words in wanted if not any(words != w and contains(w, words) for w in wanted)]
        self.alphabet = np.array(sorted({token for words in self.phrases for token in words}), dtype=np.int64)
        places = {words[:i] for words in self.phrases for i in range(len(words) + 1)} | {()}
        nodes = sorted(places, key=lambda words: (len(words), words))
        number = {words: i for i, words in enumerate(nodes)}
        self.lengths = np.array([len(words) for words in self.phrases], dtype=np.int64)
        self.next = np.zeros((len(nodes), len(self.alphabet) + 1), dtype=np.int64)  # [P, U+1]
        self.said = np.zeros(len(nodes), dtype=np.int64)  # [P] bits
        self.begun = np.zeros((len(nodes), len(self.phrases)), dtype=np.int64)  # [P, N] tokens of it at the text's end
        for words, node in number.items():
            for symbol, token in enumerate(self.alphabet.tolist(), start=1):
                text = (*words, token)
                self.next[node, symbol] = next(number[text[i:]] for i in range(len(text) + 1) if text[i:] in number)
            for bit, phrase in enumerate(self.phrases):
                if words == phrase:
                    self.said[node] = 1 << bit
                ends = (words[i:] for i in range(len(words) + 1))
                self.begun[node, bit] = next(len(e) for e in ends if len(e) < len(phrase) and phrase[: len(e)] == e)

    @property
    def total(self) -> int:
        return int(self.lengths.sum())

    def symbols(self, vocab: int) -> np.ndarray:
        """[V] the symbol of every token."""
        symbols = np.zeros(vocab, dtype=np.int64)
        symbols[self.alphabet] = np.arange(1, len(self.alphabet) + 1)
        return symbols

    def needed(self, nodes: np.ndarray, said: np.ndarray) -> np.ndarray:
        """Tokens that are enough to say all that is missing, of states of any shape."""
        missing = ~(said[..., None] >> np.arange(len(self.phrases))) & 1
        return (missing * self.lengths).sum(axis=-1) - (missing * self.begun[nodes]).max(axis=-1, initial=0)

    def needed_after(self, tokens: Sequence[int]) -> int:
        node, said = 0, 0
        symbols = {token: symbol for symbol, token in enumerate(self.alphabet.tolist(), start=1)}
        for token in tokens:
            node = self.next[node, symbols.get(token, 0)]
            said |= int(self.said[node])
        return int(self.needed(np.array(node), np.array(said)))


@lru_cache(maxsize=16)
def phrase_table(phrases: tuple[Words, ...]) -> PhraseTable:
    return PhraseTable(phrases)

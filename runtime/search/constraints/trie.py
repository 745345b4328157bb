"""A prefix tree of token sequences (constrained decoding), as flat arrays: all beams of a batch are looked up at once.

    sequences  4 5 | 4 6 7 | 8        nodes      0 -4-> 1 -5-> 3 end
                                                        1 -6-> 4 -7-> 5 end
                                                 0 -8-> 2 end

Nodes are numbered by depth, within a depth by parent, then token. So edges are in the order of their keys (parent,
token), and edge i leads to node i + 1. Shapes: E edges, B sources, K beams, V vocab, R rows of some.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from seq2engine.errors import ConfigError

TOKEN_BITS = 32  # of a key; the rest is the parent
FAR = 1 << 30  # distance to an end that cannot be reached


@dataclass(frozen=True, eq=False)
class Trie:
    """Made once by `trie_from_sequences`, shared by all searches; E edges, E + 1 nodes."""

    keys: np.ndarray = field(repr=False)  # [E] parent << 32 | token, ascending
    ends: np.ndarray = field(repr=False)  # [E+1] whether a sequence ends at this node
    levels: tuple[int, ...] = field(repr=False)  # first edge of every depth, and the number of edges
    distances: dict[frozenset[int], np.ndarray] = field(default_factory=dict, repr=False)  # cache of `least`

    @property
    def longest(self) -> int:
        return len(self.levels) - 1

    @property
    def tokens(self) -> np.ndarray:
        """Of every edge."""
        return self.tokens_of(slice(None))

    def tokens_of(self, edges: np.ndarray | slice) -> np.ndarray:
        return self.keys[edges] & ((1 << TOKEN_BITS) - 1)

    @property
    def parents(self) -> np.ndarray:
        return self.keys >> TOKEN_BITS

    def after(self, nodes: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """The nodes that these tokens lead to, -1 where there is none; -1 itself leads to -1."""
        wanted = (nodes << TOKEN_BITS) | tokens
        edges = np.minimum(np.searchsorted(self.keys, wanted), max(len(self.keys) - 1, 0))
        if not len(self.keys):
            return np.full_like(nodes, -1)
        return np.where((nodes >= 0) & (self.keys[edges] == wanted), edges + 1, -1)

    def walked(self, tokens: Sequence[int]) -> int:
        """The node at the end of this sequence, -1 if it leaves the tree."""
        node = np.zeros((), dtype=np.int64)
        for token in tokens:
            node = self.after(node, np.asarray(token, dtype=np.int64))
        return int(node)

    def children(self, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Nodes [R], none of them -1 -> rows and edges of all their children, as two flat lists."""
        first = np.searchsorted(self.keys, nodes << TOKEN_BITS)
        counts = np.searchsorted(self.keys, (nodes + 1) << TOKEN_BITS) - first
        rows = np.repeat(np.arange(len(nodes)), counts)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        return rows, first[rows] + within

    def least(self, barred: frozenset[int]) -> np.ndarray:
        """[E+1] fewest tokens from every node to an end without a barred one; FAR if every path has one."""
        if barred not in self.distances:
            distance = np.where(self.ends, 0, FAR)
            open_ = ~np.isin(self.tokens, np.array(sorted(barred), dtype=np.int64))
            parents = self.parents
            for begin, end in zip(reversed(self.levels[:-1]), reversed(self.levels[1:]), strict=True):
                through = np.where(open_[begin:end], np.minimum(distance[begin + 1 : end + 1] + 1, FAR), FAR)
                np.minimum.at(distance, parents[begin:end], through)
            self.distances[barred] = distance
        return self.distances[barred]


def trie_from_sequences(sequences: Iterable[Sequence[int]]) -> Trie:
    """Sequences may repeat, and one may begin another; none has the end token."""
    rows = [tuple(sequence) for sequence in sequences]
    if not all(rows):
        raise ConfigError("a trie with an empty sequence, expected at least one token in each")
    if wrong := [token for row in rows for token in row if not 0 <= token < 1 << (TOKEN_BITS - 1)]:
        raise ConfigError(f"a trie with token {wrong[0]}, expected token ids from 0")
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    table = np.zeros((len(rows), int(lengths.max(initial=0))), dtype=np.int64)
    table[np.arange(table.shape[1]) < lengths[:, None]] = [token for row in rows for token in row]
    nodes = np.zeros(len(rows), dtype=np.int64)  # of every sequence at this depth
    keys, levels = [np.zeros(0, dtype=np.int64)], [0]
    for depth in range(table.shape[1]):
        longer = lengths > depth
        found, which = np.unique((nodes[longer] << TOKEN_BITS) | table[longer, depth], return_inverse=True)
        nodes[longer] = levels[-1] + 1 + which
        keys.append(found)
        levels.append(levels[-1] + len(found))
    ends = np.zeros(levels[-1] + 1, dtype=bool)
    ends[nodes] = True
    if not rows:
        ends[:] = False
    return Trie(np.concatenate(keys), ends, tuple(levels))


class TrieConstraint:
    """Only tokens that continue a sequence of the trie, and of those only such as reach an end within the room left.

    `room` is how many tokens an output may have, `offset` how many come before the trie, `barred` tokens that are never
    chosen. A row at no node (-1) is left as it is: its source has ended, or the score of its beam is -inf.
    """

    def __init__(self, trie: Trie, end: int, offset: int, room: int, barred: frozenset[int]):
        self.trie, self.end, self.offset, self.room = trie, end, offset, room
        self.least = trie.least(barred)
        self.nodes: np.ndarray = np.zeros((0, 0), dtype=np.int64)  # [B, K]

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

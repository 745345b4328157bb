"""The cache as a tree: all beams of a source share one cache, and a mask says which slots are whose ancestors.

Every step appends K slots to a source's cache. When beams switch, only rows of the mask are copied; nothing in the
cache moves. Slots that no beam descends from are dead; when the cache is full, compaction gathers the living to the
front.

    slots   0 1 2 | 3 4 5 | 6 7 8        K = 3; beam 0 continued slot 4, which continued slot 0
    beam 0  x . . | . x . | x . .
    beam 1  x . . | . x . | . x .        shares its prefix with beam 0: one copy
    beam 2  . x . | . . x | . . x
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import RequestError
from .session import Session, State

ROUND = 8  # capacities are multiples of this many slots


@dataclass
class CacheCounts:
    """What a decode did with its cache, for reports."""

    steps: int = 0
    compactions: int = 0  # dead slots dropped
    growths: int = 0  # the cache moved to more slots
    most_live: int = 0  # slots of one source that were alive at once
    most_slots: int = 0  # slots of one source that were allocated at once


class TreeStep:
    """A `Step` over a session: tokens and parents in, logits out. Owns the state it was given until it is dropped."""

    def __init__(self, session: Session, state: State, batch: int, beams: int, max_steps: int):
        self.session, self.state, self.beams = session, state, beams
        self.total = beams * max_steps  # more slots than this are never needed
        self.position = np.zeros(batch, dtype=np.int64)  # steps each source has done
        self.used = np.zeros(batch, dtype=np.int64)  # slots of each source that are written
        self.tally = CacheCounts()
        self.growing = session.cache_form == "growing"
        if self.growing:
            self.capacity = 0
        elif session.limits.slots is not None:
            self.capacity = session.limits.slots
        else:
            self.capacity = min(rounded(8 * beams), self.total)
        self.mask = np.zeros((batch, beams, self.capacity), dtype=bool)
        session.reserve(state, self.capacity)

    def __call__(self, tokens: np.ndarray, parents: np.ndarray) -> np.ndarray:
        self.descend(parents)
        if self.growing:
            self.compact_growing()
            self.mask = np.pad(self.mask, ((0, 0), (0, 0), (0, self.beams)))
            self.used[:] = self.capacity
            self.capacity += self.beams
        else:
            self.make_room()
        rows, beams = np.arange(len(tokens))[:, None], np.arange(self.beams)
        self.mask[rows, beams, self.used[:, None] + beams] = True
        logits = self.session.step(self.state, tokens, self.position, self.used, self.mask)
        self.used += self.beams
        self.position += 1
        self.tally.steps += 1
        self.tally.most_slots = max(self.tally.most_slots, self.capacity)
        return logits

    def attention(self) -> np.ndarray:
        return self.session.attention(self.state)

    @property
    def counts(self) -> CacheCounts:
        """What was done so far. Living slots are counted when room runs out, and here: between, they only grow."""
        self.live_slots()
        return self.tally

    def keep(self, rows: np.ndarray) -> None:
        self.session.select(self.state, rows, None)
        self.mask, self.used, self.position = self.mask[rows], self.used[rows], self.position[rows]

    def replace(self, rows: np.ndarray, newcomers: State, width: int) -> None:
        """From the next call on these rows [N] are the newcomers' sources, at their first step.

        In a growing cache they begin behind everyone's slots; none of those before is theirs.
        """
        self.session.replace(self.state, rows, newcomers, width)
        self.restart(rows)
        if not self.growing and self.session.limits.slots is None:
            enough = max(rounded(2 * self.live_slots()), rounded(8 * self.beams))
            if 2 * enough <= self.capacity:  # those who needed so many slots are gone
                self.compact(enough)

    def restart(self, rows: np.ndarray) -> None:
        """The next call is the first step of these rows."""
        self.mask[rows] = False
        self.used[rows] = self.position[rows] = 0

    def descend(self, parents: np.ndarray) -> None:
        """Beam k continues beam parents[b,k]: it inherits that beam's ancestors, of which there are none at first."""
        self.mask = np.take_along_axis(self.mask, parents[:, :, None], axis=1)

    def make_room(self) -> None:
        """Room for K more slots of every source: dead slots go first, then the cache grows."""
        if self.used.max(initial=0) + self.beams <= self.capacity:
            return
        live = self.live_slots()
        needed = live + self.beams
        capacity = self.capacity
        if self.session.limits.slots is not None:
            if needed > capacity:
                raise RequestError(
                    f"{live} slots of the cache are alive and {self.beams} more are needed, but the engine has "
                    f"{capacity}; rebuild it with: seq2engine build BUNDLE --slots {self.total}"
                )
        elif live > capacity // 2:  # compaction alone would have to come again too soon
            capacity = min(max(rounded(live + live // 2), rounded(needed)), self.total)
        self.compact(capacity)

    def compact_growing(self) -> None:
        """A growing cache sheds its dead slots once they outnumber the living."""
        if self.capacity >= 8 * self.beams:
            live = self.live_slots()
            if self.capacity > 2 * live:
                self.compact(live)

    def live_slots(self) -> int:
        live = int(self.mask.any(axis=1).sum(axis=1).max(initial=0))
        self.tally.most_live = max(self.tally.most_live, live)
        return live

    def compact(self, capacity: int) -> None:
        """Gathers every source's living slots to the front of a cache of that many slots."""
        live: np.ndarray = np.any(self.mask, axis=1)  # [B, L]
        self.used = live.sum(axis=1)
        front = np.argsort(~live, axis=1, kind="stable")  # living slots first, in their order
        slots = np.zeros((len(live), capacity), dtype=np.int64)  # the rest repeats slot 0: finite, and masked
        width = min(capacity, front.shape[1])
        slots[:, :width] = front[:, :width]
        valid = np.arange(capacity) < self.used[:, None]
        slots[~valid] = 0
        self.mask = np.take_along_axis(self.mask, slots[:, None, :], axis=2) & valid[:, None, :]
        self.session.select(self.state, None, slots)
        if capacity > self.capacity:
            self.tally.growths += 1
        else:
            self.tally.compactions += 1
        self.capacity = capacity


def rounded(slots: int) -> int:
    return -(-slots // ROUND) * ROUND

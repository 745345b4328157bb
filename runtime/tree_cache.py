"""The KV cache as a tree: all beams of a source share one cache, and a mask marks the ancestors of each beam.

Every step appends K slots to a source's cache. When beams switch, only rows of the mask are copied; nothing in the
cache moves. Slots that no beam descends from are dead. When the cache is full, compaction gathers the live slots to the
front and leaves `slack` free slots behind them.

    slots   0 1 2 | 3 4 5 | 6 7 8        K = 3; beam 0 continued slot 4, which continued slot 0
    beam 0  x . . | . x . | x . .
    beam 1  x . . | . x . | . x .        shares its prefix with beam 0: one copy
    beam 2  . x . | . . x | . . x
"""

from __future__ import annotations

import math

import numpy as np

from seq2engine.errors import RequestError

from .search.step_output import StepOutput
from .session import EVERYTHING, Session, State, StepForm, cross_attention

ROUND = 8  # capacities are multiples of this many slots
COMPACTION_STEPS = 16  # steps of a source after which a deterministic session compacts its cache


class TreeStep:
    """A `Step` over a session: tokens and parents in, the step's output out. It owns the state it was given."""

    def __init__(
        self,
        session: Session,
        state: State,
        batch: int,
        beams: int,
        max_steps: int,
        form: StepForm = EVERYTHING,
    ):
        self.session, self.state, self.beams, self.max_steps = session, state, beams, max_steps
        self.fixed_slots, self.batch_invariant = session.limits.slots_for(beams), session.deterministic
        self.growing = session.cache_form == "growing"
        if self.growing:
            self.capacity = 0
        elif self.fixed_slots is not None:
            self.capacity = self.fixed_slots
        else:
            self.capacity = min(slack(beams, 0), rounded(beams * max_steps))
        self.mask = np.zeros((batch, beams, self.capacity), dtype=bool)
        self.set_positions(np.zeros(batch, dtype=np.int64), np.zeros(batch, dtype=np.int64))
        session.reserve(state, self.capacity, form)

    def __call__(self, tokens: np.ndarray, parents: np.ndarray) -> StepOutput:
        self.descend(parents)
        if self.growing:
            self.compact_growing()
            self.mask = np.pad(self.mask, ((0, 0), (0, 0), (0, self.beams)))
            self.set_positions(self.position, np.full(len(tokens), self.capacity))
            self.capacity += self.beams
        else:
            self.free_slots()
        self.mask.put(self.next, True)
        output = self.session.step(self.state, tokens, self.position, self.used, self.mask)
        self.places += self.ahead
        self.most_used += self.beams
        return output

    def attention(self) -> np.ndarray:
        return cross_attention(self.session, self.state)

    def keep(self, rows: np.ndarray) -> None:
        self.session.select(self.state, rows, None)
        self.mask = self.mask[rows]
        self.set_positions(self.position[rows], self.used[rows])

    def replace(self, rows: np.ndarray, newcomers: State, width: int) -> None:
        """From the next call on these rows [N] are the newcomers' sources, at their first step.

        In a growing cache they begin behind all slots, and the mask hides those before from them.
        """
        self.session.replace(self.state, rows, newcomers, width)
        self.restart(rows)
        if not self.growing and not self.batch_invariant and self.fixed_slots is None:
            live = self.live_slots()
            if self.capacity > 2 * (live + slack(self.beams, live)):  # the sources that needed so many slots are gone
                self.compact(self.fitting_capacity(live))

    def restart(self, rows: np.ndarray) -> None:
        """The next call is the first step of these rows."""
        if len(rows):
            self.mask[rows] = False
            self.used[rows] = self.position[rows] = 0
            self.set_positions(self.position, self.used)

    def set_positions(self, position: np.ndarray, used: np.ndarray) -> None:
        """Sets how many steps each source [B] has done and how many slots it has written, for the current mask.

        All counters that a step advances are one array, so that advancing is one addition: a call of numpy takes longer
        than the addition itself.
        """
        batch, beams, slots = self.mask.shape
        self.rows = np.arange(batch)[:, None]  # to index with
        own = np.arange(beams)[:, None]
        following = (self.rows.T * beams + own) * slots + own + used  # [K, B] in the mask as one row
        self.places = np.concatenate((position[None], used[None], following))  # [2 + K, B]
        self.position, self.used, self.next = self.places[0], self.places[1], self.places[2:]
        self.ahead = np.repeat([1] + [beams] * (1 + beams), batch).reshape(self.places.shape)
        self.most_used = int(used.max(initial=0))

    def descend(self, parents: np.ndarray) -> None:
        """Beam k continues beam parents[b,k]: it inherits that beam's ancestors, none before the first step."""
        if self.beams == 1:  # it continues itself
            return
        self.mask = self.mask[self.rows, parents]

    def free_slots(self) -> None:
        """Makes sure of K free slots for every source: dead slots are dropped first, then the cache grows."""
        if self.batch_invariant:
            self.free_slots_deterministic()
        if self.most_used + self.beams <= self.capacity:
            return
        live = self.live_slots()
        if self.fixed_slots is None:
            self.compact(self.fitting_capacity(live))
        elif live + self.beams <= self.capacity:
            self.compact(self.capacity)
        else:
            raise RequestError(
                f"{live} cache slots are live and {self.beams} more are needed, but the engine has "
                f"{self.capacity}; rebuild it with: seq2engine build BUNDLE --slots {self.beams * self.max_steps}"
            )

    def free_slots_deterministic(self) -> None:
        """The same, but the slots of a source do not depend on its batch: another order of slots changes sums bitwise.

        So a source is compacted every COMPACTION_STEPS of its own steps, not when slots run out.
        """
        due = (self.position > 0) & (self.position % COMPACTION_STEPS == 0)
        if due.any():
            self.compact(self.capacity, due)
        used = self.most_used
        if used + self.beams > self.capacity:
            self.compact(rounded(used + slack(self.beams, used)), np.zeros_like(due))

    def fitting_capacity(self, live: int) -> int:
        """The next capacity. The current one is kept where it will do, so that only slots that move are copied."""
        wanted = slack(self.beams, live)
        if live + wanted // 2 <= self.capacity <= 2 * (live + wanted):
            return self.capacity
        most = np.any(self.mask, axis=1).sum(axis=1) + self.beams * (self.max_steps - self.position)  # [B]
        return rounded(min(live + wanted, int(most.max())))

    def compact_growing(self) -> None:
        """A growing cache is copied in every step, so a compaction pays as soon as enough slots are dead."""
        live = self.live_slots()
        if self.capacity > live + slack(self.beams, live):
            self.compact(live)

    def live_slots(self) -> int:
        return int(self.mask.any(axis=1).sum(axis=1).max(initial=0))

    def compact(self, capacity: int, due: np.ndarray | None = None) -> None:
        """Gathers every source's live slots to the front of a cache of that many slots.

        Sources that are not due [B] keep their dead slots.
        """
        live: np.ndarray = np.any(self.mask, axis=1)  # [B, L]
        if due is not None:
            live |= ~due[:, None] & (np.arange(self.capacity) < self.used[:, None])
        used = live.sum(axis=1)
        front = np.argsort(~live, axis=1, kind="stable")  # live slots first, in their order
        width = min(capacity, front.shape[1])
        slots = np.tile(np.arange(capacity), (len(live), 1))
        slots[:, width:] = 0  # new and unused slots repeat some slot: finite numbers, which the mask hides
        valid = np.arange(capacity) < used[:, None]
        slots[:, :width] = np.where(valid[:, :width], front[:, :width], slots[:, :width])
        self.mask = np.take_along_axis(self.mask, slots[:, None, :], axis=2) & valid[:, None, :]
        self.set_positions(self.position, used)
        self.session.select(self.state, None, slots)
        self.capacity = capacity


def slack(beams: int, live: int) -> int:
    """Free slots beside the live ones, until the next compaction.

    With s of them attention reads s/2 slots too many in every step, and a compaction comes every s/K steps. It copies
    about half of the live slots on average (those that stay in place cost nothing), and copying a slot takes as long as
    reading about three. So the sum is least for s = sqrt(3 K live): 56 beside 256 live slots of four beams.
    """
    return rounded(max(16, 8 * beams, math.isqrt(3 * beams * live)))


def rounded(slots: int) -> int:
    return -(-slots // ROUND) * ROUND

"""Greedy search by a session that chooses tokens itself, to the end of a batch (session.RunAhead)."""

from __future__ import annotations

import numpy as np

from ..search.ahead.greedy_plan import ChosenTokens, GreedyPlan
from ..session import Session, State, StepForm
from .tree_cache import compaction_calls, first_slots, rounded, slack


class PlannedStep:
    """Tokens in, the tokens of several steps out. It owns the state it was given.

    One beam writes slot after slot, so a source's slots are its positions, and there is no mask to keep. The cache
    begins small, as outputs are mostly shorter than their maximum, and grows between two calls.
    """

    def __init__(self, session: Session, state: State, batch: int, longest: int, form: StepForm, plan: GreedyPlan):
        self.session, self.state, self.longest, self.plan = session, state, longest, plan
        self.position = np.zeros(batch, dtype=np.int64)  # [B] steps that each source has done
        self.capacity = first_slots(session.config, batch, 1, longest)
        session.reserve(state, self.capacity, form)

    def choose(self, tokens: np.ndarray) -> ChosenTokens:
        used = int(self.position.max())
        if used == self.capacity:
            self.grow(self.room_after(used))
        assert self.session.ahead is not None
        count = min(self.session.ahead.tokens, self.longest - used, self.capacity - used)
        found = self.session.choose_alone(self.state, tokens, self.position, self.plan, count)
        self.position = np.minimum(self.position + found.tokens.shape[1], self.plan.limit - 1)
        return found

    def keep(self, rows: np.ndarray) -> None:
        self.session.select(self.state, rows, None)
        self.position, self.plan = self.position[rows], self.plan.of(rows)

    def room_after(self, used: int) -> int:
        """Slots of a cache in which so many are used."""
        free = slack(1, used, compaction_calls(self.session.config, len(self.position)))
        return min(rounded(used + free), rounded(self.longest))

    def grow(self, capacity: int) -> None:
        """New slots repeat the last one: finite numbers, which masks hide."""
        slots = np.minimum(np.arange(capacity), self.capacity - 1)
        self.session.select(self.state, None, np.tile(slots, (len(self.position), 1)))
        self.capacity = capacity

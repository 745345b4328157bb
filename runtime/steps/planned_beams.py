"""Beam search by a session that ranks and finishes beams itself, to the end of a batch (session.RunAhead)."""

from __future__ import annotations

import numpy as np

from ..search.ahead.beam_plan import BeamPlan, BeamRows, BeamsAhead
from ..search.options import SearchOptions
from ..session import Session, State, StepForm
from .tree_cache import first_slots, rounded


class PlannedBeamsStep:
    """Beams in, those after several steps out. It owns the state it was given, and its cache is a tree (tree_cache.py).

    The session drops dead slots by itself, as long as that leaves enough for some steps; else the cache grows here.
    """

    def __init__(
        self, session: Session, state: State, batch: int, options: SearchOptions, form: StepForm, plan: BeamPlan
    ):
        self.session, self.state, self.plan, self.beams = session, state, plan, options.beam
        self.most = rounded(options.beam * options.max_length)
        slots = first_slots(session.config, batch, self.beams, self.most)
        self.mask = np.zeros((batch, self.beams, slots), dtype=bool)
        self.length, self.longest = 0, options.max_length
        session.reserve(state, self.capacity, form)

    @property
    def capacity(self) -> int:
        return self.mask.shape[2]

    def run(self, rows: BeamRows) -> BeamsAhead:
        found = self.steps_from(rows)
        while not len(found.choices) and found.not_finite is None:  # the cache is full
            self.grow(min(2 * self.capacity, self.most))
            found = self.steps_from(found.rows)
        self.length += len(found.choices)
        return found

    def steps_from(self, rows: BeamRows) -> BeamsAhead:
        """As many as there are slots for."""
        assert self.session.ahead is not None
        room = self.beams if self.capacity == self.most else max(self.beams, self.capacity // 4)
        count = min(self.session.ahead.tokens, self.longest - self.length)
        found = self.session.choose_beams(self.state, rows, self.mask, self.plan, room, count)
        self.mask = found.mask
        return found

    def keep(self, rows: np.ndarray) -> None:
        self.session.select(self.state, rows, None)
        self.mask, self.plan = self.mask[rows], self.plan.of(rows)

    def grow(self, capacity: int) -> None:
        """New slots repeat the last one: finite numbers, which the mask hides."""
        slots = np.minimum(np.arange(capacity), self.capacity - 1)
        self.session.select(self.state, None, np.tile(slots, (len(self.mask), 1)))
        self.mask = np.pad(self.mask, ((0, 0), (0, 0), (0, capacity - self.capacity)))

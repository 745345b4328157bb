"""A decoder that chooses tokens itself by a plan, and whose every logit is written down."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from seq2engine.runtime.search.ahead.greedy_plan import ChosenTokens, GreedyPlan
from support.scripted_step import Prefix, Script


class ScriptedChoice:
    """A ChoosingStep over one script per source, of at most so many steps a call. It ends a call when sources should
    leave, and notes what it was asked."""

    def __init__(self, scripts: Sequence[Script], plan: GreedyPlan, steps: int, start: int = 0):
        self.scripts, self.plan, self.steps = list(scripts), plan, steps
        self.prefixes: list[Prefix] = [()] * len(self.scripts)
        self.next = np.full((len(self.scripts), 1), start)  # what the next call must feed
        self.ran: list[int] = []  # steps of every call
        self.batches: list[int] = []

    def choose(self, tokens: np.ndarray) -> ChosenTokens:
        assert np.array_equal(tokens, self.next)
        end = int(self.plan.end[0])
        done = np.array([bool(prefix) and prefix[-1] == end for prefix in self.prefixes])
        records: list[list[tuple[int, float, float, float]]] = []
        while len(records) < self.steps and len(self.prefixes[0]) < self.plan.limit[0]:
            records.append([self.step(row, bool(done[row]), end) for row in range(len(self.scripts))])
            done = np.array([prefix[-1] == end for prefix in self.prefixes])
            finite = all(np.isfinite(record[1]) for record in records[-1])
            if not finite or (done.any() and 8 * np.count_nonzero(done) >= len(done)):
                break
        self.ran.append(len(records))
        self.batches.append(len(self.scripts))
        chosen, *numbers = (
            np.array(column).T for column in zip(*(zip(*row, strict=True) for row in records), strict=True)
        )
        self.next = chosen[:, -1:]
        return ChosenTokens(chosen, *numbers)

    def step(self, row: int, done: bool, end: int) -> tuple[int, float, float, float]:
        """Token, best logit, its own logit, and sum of exp(logit - the best one's) of a source."""
        prefix = self.prefixes[row]
        if done:
            self.prefixes[row] = (*prefix, end)
            return end, 0.0, 0.0, 1.0
        logits, target = self.scripts[row](prefix), int(self.plan.target[row, len(prefix)])
        banned = self.plan.banned[-1 - target] if target < 0 else np.arange(len(logits)) != target
        token = int(np.where(banned, -np.inf, logits).argmax())
        self.prefixes[row] = (*prefix, token)
        top = float(logits.max())
        return token, top, float(logits[token]), float(np.exp(logits.astype(np.float64) - top).sum())

    def keep(self, rows: np.ndarray) -> None:
        assert 0 < len(rows) < len(self.scripts)
        self.plan = self.plan.of(rows)
        self.scripts, self.prefixes = [self.scripts[row] for row in rows], [self.prefixes[row] for row in rows]
        self.next = self.next[rows]

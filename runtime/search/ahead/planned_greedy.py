"""Greedy search by steps that a session makes itself: it finds what greedy.py finds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..greedy import GreedyState
from ..options import SearchOptions
from ..step import Search, Special, Start, searched
from ..step_output import NoLogits, StepOutput, finite
from .greedy_plan import ChoosingStep


def planned_greedy_search(
    step: ChoosingStep, batch: int, special: Special, options: SearchOptions, starts: Sequence[Start] = ()
) -> Search:
    """As `greedy_search`, with options that a plan serves (`unserved`). Yields an Emitted for several steps at a time,
    whose output has no logits."""
    return searched(step, batch, PlannedGreedy(batch, special, options, (), starts))


class PlannedGreedy(GreedyState):
    """The state of greedy search between two calls of a step that chooses tokens itself."""

    def advance(self, step: ChoosingStep) -> StepOutput:  # type: ignore[override]
        """As many steps as the step makes at once."""
        found = step.choose(self.tokens)
        finite(found.top_logits, self.sources)
        taken = slice(self.length, self.length + found.tokens.shape[1])
        self.length = taken.stop
        self.chosen[self.here, taken] = found.tokens
        if not self.unscored:
            self.log_probs[self.here, taken] = found.log_probs
        self.tokens = found.tokens[:, -1:].copy()
        if self.length == self.options.max_length:
            self.done = np.ones_like(self.done)
        else:
            self.done = self.done | (found.tokens == self.end).any(axis=1)
        self.done_count = int(np.count_nonzero(self.done))
        return StepOutput(NoLogits(len(self.done)))

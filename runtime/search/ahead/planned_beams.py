"""Beam search by steps that a session makes itself; as beam.py does it, and as fast for one short word."""

from __future__ import annotations

import numpy as np

from ..finished import Index
from ..options import SearchOptions
from ..step import Hypothesis, Search, Special, searched
from ..step_output import NoLogits, NotFiniteError, StepOutput
from .beam_plan import DONE, NUMBERS, BeamsStep, first_beams


def planned_beam_search(step: BeamsStep, batch: int, special: Special, options: SearchOptions) -> Search:
    """As `beam_search`, with options that allow it (`runs_ahead`). Yields an Emitted for several steps at a time, whose
    output has no logits."""
    return searched(step, batch, PlannedBeams(batch, special, options))


class PlannedBeams:
    """The state of a beam search between two calls of a step that makes several."""

    def __init__(self, batch: int, special: Special, options: SearchOptions):
        self.options, self.beam = options, options.beam
        self.rows = self.all_rows = first_beams(batch, self.beam, special.start)  # of the sources here; of the batch
        shape = (options.max_length, batch, self.beam)
        self.choices = np.empty((shape[0], 2, *shape[1:]), dtype=np.int64)
        self.log_probs = np.empty(shape)
        self.length = 0
        self.sources = np.arange(batch)
        self.here: Index = slice(None)  # as in beam.py
        self.read()

    def read(self) -> None:
        self.tokens = self.rows.state[:, NUMBERS : NUMBERS + self.beam]
        self.done = self.rows.state[:, DONE] != 0
        self.done_count = int(np.count_nonzero(self.done))

    @property
    def parents(self) -> np.ndarray:
        """[B,K] of the latest step."""
        return self.choices[max(self.length - 1, 0), 1, self.here]

    @property
    def all_done(self) -> bool:
        return self.done_count == len(self.done)

    def advance(self, step: BeamsStep) -> StepOutput:
        """As many steps as are made at once."""
        found = step.run(self.rows)
        if found.not_finite is not None:
            raise NotFiniteError(int(self.sources[found.not_finite]))
        taken = slice(self.length, self.length + len(found.choices))
        self.choices[taken, :, self.here], self.log_probs[taken, self.here] = found.choices, found.log_probs
        self.length, self.rows = taken.stop, found.rows
        if isinstance(self.here, slice):
            self.all_rows = found.rows
        else:
            self.all_rows.state[self.here], self.all_rows.scores[self.here] = found.rows.state, found.rows.scores
        self.read()
        return StepOutput(NoLogits(len(self.done)))

    def keep(self, rows: np.ndarray) -> None:
        """Keeps only these sources from now on."""
        self.sources, self.rows = self.sources[rows], self.rows.of(rows)
        self.here = self.sources
        self.read()

    def hypotheses(self, sources: np.ndarray) -> list[list[Hypothesis]]:
        """Of sources that are done, by their numbers in the whole batch."""
        return [self.of_source(source) for source in sources.tolist()]

    def of_source(self, source: int) -> list[Hypothesis]:
        beam = self.beam
        lengths, parents, tokens = self.all_rows.state[source, NUMBERS + beam :].reshape(3, beam).tolist()
        _, scores, log_probs = self.all_rows.scores[source].reshape(3, beam).tolist()
        existing = [place for place in range(self.options.nbest) if scores[place] > -np.inf]
        if not existing:
            return []
        longest = max(lengths[place] for place in existing) - 1
        chosen, came_from = self.choices[:longest, :, source].transpose(1, 0, 2).tolist()  # [N][K] each
        own = self.log_probs[:longest, source].tolist()
        found = []
        for place in existing:
            at, path, sums = parents[place], [tokens[place]], [log_probs[place]]
            for step in range(lengths[place] - 2, -1, -1):
                path.append(chosen[step][at])
                sums.append(own[step][at])
                at = came_from[step][at]
            found.append(Hypothesis(tuple(path[::-1]), scores[place], tuple(sums[::-1])))
        return found

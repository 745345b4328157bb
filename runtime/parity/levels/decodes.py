"""Free decodes of a corpus: one baseline and any number of candidates, compared token by token.

Every batch is decoded once by the baseline, then by each candidate, and dropped: memory does not grow with the corpus,
and several precisions share the baseline's decodes. Only divergent sources are run again, to be judged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from seq2engine.common.progress import Progress, silent
from seq2engine.errors import GraphError, RequestError

from ...numerics.budgets import DecodeResult, Divergence, ScoreResult
from ...numerics.teacher_forcing import Tokens
from ...search.options import SearchOptions
from ...session import Session
from ...text.batching import corpus_batches
from .divergence import Diverged, Judge, Rescored, Traced, diverged_at, traced

RowOutputs = dict[int, Tokens]  # source -> tokens
Outputs = dict[tuple[str, str], RowOutputs]  # (side, search) -> source -> tokens


@dataclass
class Arm:
    """A candidate, the judge of its divergences from the baseline, and its outputs."""

    candidate: Session
    judge: Judge
    outputs: dict[str, RowOutputs] = field(default_factory=dict)  # by search
    diverged: list[Diverged] = field(default_factory=list)
    rescored: list[Rescored] = field(default_factory=list)  # outputs with equal tokens
    failure: str = ""

    @property
    def name(self) -> str:
        return f"{self.candidate.backend} {self.candidate.precision}"

    def compare(self, wanted: Traced, rows: list[int], chosen: Sequence[Sequence[int]], options: SearchOptions) -> None:
        given = traced(self.candidate, chosen, options)
        pairs = zip(rows, wanted.tokens, given.tokens, strict=True)  # equal outputs are kept once for both sides
        self.outputs[search_name(options)].update((row, a if a == b else b) for row, a, b in pairs)
        self.rescored += [
            Rescored(row, source, tokens, abs(wanted.scores[i] - given.scores[i]))
            for i, (row, source, tokens) in enumerate(zip(rows, chosen, wanted.tokens, strict=True))
            if tokens == given.tokens[i] and math.isfinite(wanted.scores[i] - given.scores[i])
        ]
        end = self.candidate.config.end_id
        self.diverged += [
            diverged_at(wanted, given, i, row, source, end)
            for i, (row, source) in enumerate(zip(rows, chosen, strict=True))
            if wanted.tokens[i] != given.tokens[i]
        ]

    def divergences(self, options: SearchOptions) -> list[Divergence]:
        """All divergent sources, judged together: a step of many rows costs little more than one of a few."""
        if options.beam == 1:
            return self.judge.greedy(self.diverged, options)
        return self.judge.beams(self.diverged, options)

    def result(self, options: SearchOptions, sources: int, name: str) -> DecodeResult:
        found: list[Divergence] = []
        scores: ScoreResult | None = None
        if not self.failure:
            try:
                found = self.divergences(options)
                scores = self.judge.scores(self.rescored, options)
            except (RequestError, GraphError) as error:
                self.failure = f"PyTorch stopped while judging divergences from {name}: {error}"
        if self.failure:
            return DecodeResult(search_name(options), sources, failure=self.failure)
        ordered = tuple(sorted(found, key=lambda d: d.source))
        return DecodeResult(search_name(options), sources, ordered, scores=scores)


def search_name(options: SearchOptions) -> str:
    return "greedy" if options.beam == 1 else f"beam {options.beam}"


def compare_decodes(
    baseline: Session,
    name: str,
    arms: Sequence[Arm],
    sources: Sequence[Sequence[int]],
    options: SearchOptions,
    batch: int,
    progress: Progress = silent,
) -> tuple[list[DecodeResult], RowOutputs]:
    """All sessions decode every source; the judge of each arm classifies its divergences from the baseline.

    Returns a result for every arm, and the baseline's outputs; an arm keeps its own.
    """
    search = search_name(options)
    expected: RowOutputs = {}
    for arm in arms:
        arm.diverged, arm.rescored, arm.failure = [], [], ""
        arm.outputs[search] = {}
    batches = corpus_batches([len(source) for source in sources], batch)
    for done, rows in enumerate(batches):
        diverged = ", ".join(f"{arm.candidate.precision} {len(arm.diverged)} diverged" for arm in arms)
        progress(f"parity: {search}", done / len(batches), diverged)
        chosen = [sources[row] for row in rows]
        # Requests were checked before: an error here is one of a model's output, such as
        # logits that are not finite, or of a graph that cannot run.
        try:
            wanted = traced(baseline, chosen, options)
        except (RequestError, GraphError) as error:
            for arm in arms:
                arm.failure = arm.failure or f"{name} stopped in batch {done}: {error}"
            break
        expected.update(zip(rows, wanted.tokens, strict=True))
        for arm in arms:
            if not arm.failure:
                try:
                    arm.compare(wanted, rows, chosen, options)
                except (RequestError, GraphError) as error:
                    arm.failure = f"{arm.candidate.backend} stopped in batch {done}: {error}"
    found = [arm.result(options, len(sources), name) for arm in arms]
    progress(f"parity: {search}", 1.0)
    return found, expected

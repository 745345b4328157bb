"""Free decodes of a corpus: one speaker and any number of candidates, token by token.

Every batch is decoded by the speaker once, then by each candidate, and forgotten: memory does not grow with the corpus,
and several precisions cost the speaker's decode only once. Only where two part is anything else run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from seq2engine.common.progress import Progress, silent
from seq2engine.errors import RequestError

from ...numerics.budgets import DecodeResult, Divergence
from ...numerics.teacher_forcing import Tokens
from ...search.options import SearchOptions
from ...session import Session
from ...text.batching import corpus_batches
from .divergence import Judge, Parted, Traced, parted_at, traced

Said = dict[int, Tokens]  # source -> tokens
Outputs = dict[tuple[str, str], Said]  # (who, search) -> source -> tokens


@dataclass
class Arm:
    """A candidate, who judges where it parts from the speaker, and what it has said."""

    candidate: Session
    judge: Judge
    said: dict[str, Said] = field(default_factory=dict)  # by search
    parted: list[Parted] = field(default_factory=list)
    failure: str = ""

    @property
    def name(self) -> str:
        return f"{self.candidate.backend} {self.candidate.precision}"

    def compare(self, wanted: Traced, rows: list[int], chosen: Sequence[Sequence[int]], options: SearchOptions) -> None:
        given = traced(self.candidate, chosen, options)
        pairs = zip(rows, wanted.tokens, given.tokens, strict=True)  # equal outputs are kept once for both sides
        self.said[search_name(options)].update((row, a if a == b else b) for row, a, b in pairs)
        end = self.candidate.config.end_id
        self.parted += [
            parted_at(wanted, given, i, row, source, end)
            for i, (row, source) in enumerate(zip(rows, chosen, strict=True))
            if wanted.tokens[i] != given.tokens[i]
        ]

    def divergences(self, options: SearchOptions) -> list[Divergence]:
        """All that parted, judged together: a step of many rows costs hardly more than one of a few."""
        if options.beam == 1:
            return self.judge.greedy(self.parted)
        return self.judge.beams(self.parted, options.length_penalty)

    def result(self, options: SearchOptions, sources: int, name: str) -> DecodeResult:
        found: list[Divergence] = []
        if not self.failure:
            try:
                found = self.divergences(options)
            except RequestError as error:
                self.failure = f"{name} stopped where it judges divergences: {error}"
        if self.failure:
            return DecodeResult(search_name(options), sources, failure=self.failure)
        return DecodeResult(search_name(options), sources, tuple(sorted(found, key=lambda d: d.source)))


def search_name(options: SearchOptions) -> str:
    return "greedy" if options.beam == 1 else f"beam {options.beam}"


def compare_decodes(
    speaker: Session,
    arms: Sequence[Arm],
    sources: Sequence[Sequence[int]],
    options: SearchOptions,
    batch: int,
    name: str = "PyTorch",
    progress: Progress = silent,
    said: Said | None = None,
) -> list[DecodeResult]:
    """All decode every source freely; where an arm parts from the speaker, its judge says by how much.

    `said` is filled with what the speaker says; an arm keeps what it says itself.
    """
    search = search_name(options)
    for arm in arms:
        arm.parted, arm.failure = [], ""
        arm.said[search] = {}
    batches = corpus_batches([len(source) for source in sources], batch)
    for done, rows in enumerate(batches):
        parted = ", ".join(f"{arm.candidate.precision} {len(arm.parted)} apart" for arm in arms)
        progress(f"parity: {search}", done / len(batches), parted)
        chosen = [sources[row] for row in rows]
        # Requests were checked before, so where one is refused here it is a model's answer that is wrong.
        try:
            wanted = traced(speaker, chosen, options)
        except RequestError as error:
            for arm in arms:
                arm.failure = arm.failure or f"{name} stopped in batch {done}: {error}"
            break
        if said is not None:
            said.update(zip(rows, wanted.tokens, strict=True))
        for arm in arms:
            if not arm.failure:
                try:
                    arm.compare(wanted, rows, chosen, options)
                except RequestError as error:
                    arm.failure = f"{arm.candidate.backend} stopped in batch {done}: {error}"
    found = [arm.result(options, len(sources), name) for arm in arms]
    progress(f"parity: {search}", 1.0)
    return found

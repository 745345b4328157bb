"""The tensors of the contract, compared over the encoder and teacher-forced steps; and PyTorch's own error in them.

The oracle's own outputs are fed, each up to its end. Some sources, the lasting ones, continue after their end up to the
last step: they show how errors grow (error_growth.py) even in a model with short outputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from seq2engine.common.progress import Progress, silent

from ...encoder_inputs import encoder_inputs
from ...generate import generate, search_over
from ...numerics.budgets import FEWEST_ROWS, ErrorTally, TensorResult
from ...numerics.error_scale import error_spread
from ...numerics.teacher_forcing import ForcedRun, ForcedRuns, forced_tokens
from ...search.options import SearchOptions
from ...session import Session
from ...text.batching import mixed_batches
from .error_growth import LOGITS, ErrorGrowth, ErrorGrowthTally
from .next_token import NextToken, NextTokenTally


@dataclass(frozen=True)
class TensorLevel:
    """`tensors` are in the order of the computation; `usual` is the median spread of PyTorch's errors in the logits of
    a step; `next_token` compares both sides' next-token distributions with the oracle's.
    """

    tensors: tuple[TensorResult, ...]
    usual: float
    next_token: dict[str, NextToken]
    error_growth: ErrorGrowth
    at_length: TensorResult  # the logits of the lasting sources, of all steps


class TensorTallies:
    """Errors over all batches."""

    def __init__(self, candidate: Session, steps: int):
        precision, layers = candidate.precision, range(candidate.config.decoder_layers)
        caches = [f"{part}.{i}" for i in layers for part in "kv"]
        self.steps, self.precision = steps, precision
        self.encoder = {n: ErrorTally(precision) for n in ("encoder_states", *(f"cross_{cache}" for cache in caches))}
        self.caches = {f"self_{cache}": ErrorTally(precision) for cache in caches}
        self.by_step = [ErrorTally(precision) for _ in range(steps)]
        self.error_growth = ErrorGrowthTally(list(self.caches), steps, precision)
        self.sides = {f"{side} {precision}": NextTokenTally() for side in ("PyTorch", candidate.backend)}
        self.spreads: list[np.ndarray] = []

    def add_batch(
        self, sessions: Sequence[Session], sources: Sequence[Sequence[int]], options: SearchOptions, lasts: bool
    ) -> None:
        """One batch of sources, up to the end of its longest output; with `lasts`, up to the last step."""
        oracle, runs = sessions[0], ForcedRuns(sessions, sources, self.steps)
        _, real = encoder_inputs(sources, oracle.config)
        for name, tally in self.encoder.items():
            tally.add(*(positions_of(tensor)[real] for tensor in runs.tensors(name)))
        counts = np.zeros((len(sources), self.steps), dtype=bool)
        going = np.ones(len(sources), dtype=bool)  # outputs that are still running
        with closing(search_over(runs, sources, oracle.config, endless(options, self.steps))) as search:
            for emitted in search:
                counts[:, emitted.step] = going
                self.add_step(emitted.step, runs.answers, going, lasts)
                going = going & ~ended(runs.answers[0], emitted.tokens, emitted.step + 1, oracle.config.end_id, options)
                if not (lasts or going.any()):
                    break
        for name, tally in self.caches.items():
            # With one beam, slot t holds what step t wrote.
            written = [positions_of(tensor)[:, : emitted.step + 1] for tensor in runs.tensors(name)]
            tally.add(*(cache[counts[:, : emitted.step + 1]] for cache in written))
            if lasts:
                self.error_growth.add_cache(name, *written)

    def add_step(self, step: int, answers: Sequence[np.ndarray], going: np.ndarray, lasts: bool) -> None:
        """Logits [B,V] of all sessions; outputs that have ended count only for the error growth."""
        now = ErrorTally(self.precision)
        exact, *others = (answer[going] for answer in answers)
        if len(exact):
            now.add_logits(exact, *others)
            self.spreads.append(error_spread(exact, others[0]))
            for next_token, other in zip(self.sides.values(), others, strict=True):
                next_token.add(exact, other)
            self.by_step[step].merge(now)
        if lasts:
            now.add_logits(*(answer[~going] for answer in answers))
            self.error_growth.by_step[step].merge(now)


def compare_tensors(
    oracle: Session,
    reference: Session,
    candidate: Session,
    sources: Sequence[Sequence[int]],
    lasting: Sequence[int],
    options: SearchOptions,
    steps: int,
    batch: int,
    progress: Progress = silent,
) -> TensorLevel:
    """The encoder's tensors and those of teacher-forced steps; `lasting` are places among the sources."""
    tallies = TensorTallies(candidate, steps)
    rest = sorted(set(range(len(sources))) - set(lasting))
    batches = [
        ([kind[place] for place in places], lasts)
        for kind, lasts in ((list(lasting), True), (rest, False))
        for places in mixed_batches(len(kind), batch)
    ]
    for done, (rows, lasts) in enumerate(batches):
        progress("parity: tensors", done / len(batches))
        tallies.add_batch((oracle, reference, candidate), [sources[row] for row in rows], options, lasts)
    progress("parity: tensors", 1.0)

    logits = ErrorTally(candidate.precision)
    for tally in tallies.by_step:
        logits.merge(tally)

    def results(level: str, tallies: dict[str, ErrorTally]) -> Iterator[TensorResult]:
        return (tally.result(level, name) for name, tally in tallies.items())

    single = enumerate(tallies.by_step)
    found = (
        *results("encoder", tallies.encoder),
        *results("steps", {**tallies.caches, LOGITS: logits}),
        *(t.result("steps", LOGITS, step) for step, t in single if t.rows >= FEWEST_ROWS),
    )
    next_tokens = {side: tally.result() for side, tally in tallies.sides.items()}
    usual = float(np.median(np.concatenate(tallies.spreads)))
    return TensorLevel(found, usual, next_tokens, tallies.error_growth.result(), tallies.error_growth.at_length())


def endless(options: SearchOptions, steps: int) -> SearchOptions:
    """The same options without an end: no end token, no trie and no phrases, which decide when an output ends."""
    allowed = options.allowed if options.shortlist is None else options.shortlist
    return dataclasses.replace(
        options,
        max_length=steps,
        min_length=steps,
        forced_eos=None,
        trie=None,
        phrases=(),
        shortlist=None,
        allowed=allowed,
    )


def ended(logits: np.ndarray, tokens: np.ndarray, length: int, end: int, options: SearchOptions) -> np.ndarray:
    """Logits [B,V] and the tokens [B,1] chosen without the end token -> the outputs [B] that would end here."""
    if length >= options.max_length:
        return np.ones(len(logits), dtype=bool)
    if length <= len(options.forced_start) or length < options.min_length:
        return np.zeros(len(logits), dtype=bool)
    return logits[:, end] > np.take_along_axis(logits, tokens, axis=1)[:, 0]


def positions_of(tensor: np.ndarray) -> np.ndarray:
    """By position: [B,H,S,E] -> [B,S,H,E]; encoder states [B,S,D] stay unchanged."""
    return tensor.swapaxes(1, 2) if tensor.ndim == 4 else tensor


def usual_spread(
    oracle: Session, reference: Session, sources: Sequence[Sequence[int]], options: SearchOptions, batch: int
) -> float:
    """The median spread of PyTorch's errors in the logits of a step."""
    spreads = []
    for rows in mixed_batches(len(sources), batch):
        chosen = [sources[row] for row in rows]
        targets = [nbest[0].tokens for nbest in generate(oracle, chosen, options)]
        fed, counts = forced_tokens(targets, oracle.config, options.start)
        runs = [ForcedRun(session, chosen, fed.shape[1], options.prompt) for session in (oracle, reference)]
        for step in range(fed.shape[1]):
            spreads.append(error_spread(*(run.step(fed[:, step])[counts[:, step]] for run in runs)))
    return float(np.median(np.concatenate(spreads)))

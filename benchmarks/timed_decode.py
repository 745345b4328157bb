"""A decode of fixed length, which is what is timed; watched, where its pieces are asked for; and one step of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from seq2engine.runtime.generate import form_from_options, padded
from seq2engine.runtime.parallel import in_parallel
from seq2engine.runtime.search.beam import beam_search
from seq2engine.runtime.search.greedy import greedy_search
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step import Emitted, Hypothesis, Special, drain
from seq2engine.runtime.search.step_output import Answer
from seq2engine.runtime.session import Session, State
from seq2engine.runtime.tree_cache import CacheCounts, TreeStep

from .cases import Case
from .split import PIECES, WatchedSession, WatchedTree

NEVER = -1  # no token has this id: as the end token it makes every decode run to its maximum length

Tokens = list[tuple[int, ...]]  # the best hypothesis of every source


def best_tokens(hypotheses: list[list[Hypothesis]]) -> Tokens:
    return [nbest[0].tokens for nbest in hypotheses]


def options_of(case: Case) -> SearchOptions:
    """How a case is decoded: for its tokens. No peer is asked for scores either."""
    return SearchOptions(max_length=case.target, beam=case.beam, scores=False)


@dataclass(frozen=True)
class FixedDecode:
    """A decode that ran to its full length: its tokens, its cache, and the choices (tokens, parents) of every step."""

    tokens: Tokens
    counts: CacheCounts
    trail: list[tuple[np.ndarray, np.ndarray]]


def fixed_decode(
    session: Session, sources: list[list[int]], options: SearchOptions, tree: type[TreeStep] = TreeStep
) -> FixedDecode:
    """`generate`, but no source ends before the maximum length: every arm does the same work, whatever it says."""
    state = session.encode(*padded(sources, session.config.pad_id))
    form = form_from_options(options, session.config)
    step = tree(session, state, len(sources), options.beam, options.max_length, form)
    search = greedy_search if options.beam == 1 else beam_search
    steps = search(step, len(sources), Special(session.config.start_id, NEVER), options)
    trail: list[tuple[np.ndarray, np.ndarray]] = []

    def follow(emitted: Emitted) -> None:
        trail.append((emitted.tokens, emitted.parents))

    tokens = best_tokens(drain(steps, follow))
    assert all(len(row) == options.max_length for row in tokens)
    return FixedDecode(tokens, step.counts, trail)


def split_decode(
    splits: list[dict[str, int]], session: Session, sources: list[list[int]], options: SearchOptions
) -> None:
    """A fixed decode, by parallel workers where a user's would be; the mean of their pieces is added to the list."""

    def part(worker: Session, numbers: list[int]) -> dict[str, int]:
        watched = WatchedSession(worker)
        fixed_decode(cast(Session, watched), [sources[number] for number in numbers], options, WatchedTree)
        return watched.split()

    found = [split for _, split in in_parallel(session, sources, options.beam, part)]
    splits.append({piece: sum(split[piece] for split in found) // len(found) for piece in PIECES})


class SeenSession:
    """A session that keeps what its latest step was given: the inputs, and the state's tensors as they were before."""

    def __init__(self, session: Session):
        self.session = session
        self.given: tuple[State, State, list[np.ndarray]] = ({}, {}, [])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def step(self, state: State, *inputs: np.ndarray) -> Answer:
        self.given = state, dict(state), [array.copy() for array in inputs]
        return self.session.step(state, *inputs)


def repeated_step(
    session: Session,
    ids: np.ndarray,
    mask: np.ndarray,
    case: Case,
    trail: list[tuple[np.ndarray, np.ndarray]],
) -> Callable[[], Answer]:
    """The step halfway through a decode that made these choices, to be called again and again.

    Every arm follows the first arm's choices, so all of them step over a cache of the same shape and fill.
    """
    seen = SeenSession(session)
    form = form_from_options(options_of(case), session.config)
    step = TreeStep(cast(Session, seen), session.encode(ids, mask), case.batch, case.beam, case.target, form)
    start = np.full((case.batch, case.beam), session.config.start_id, dtype=np.int64)
    step(start, np.tile(np.arange(case.beam), (case.batch, 1)))
    for tokens, parents in trail[: case.target // 2]:
        step(tokens, parents)
    state, before, inputs = seen.given

    def again() -> Answer:
        if session.cache_form == "growing":  # the tensors that come out are longer: every call starts from the same
            state.update(before)
        return session.step(state, *inputs)  # a static cache gets the same slots again

    return again

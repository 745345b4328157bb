"""Ids in, ids out: sources are padded, encoded and searched over any session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

import numpy as np

from seq2engine.model.config import ModelConfig

from .model_options import options_from_session
from .parallel import in_lanes
from .requests import check_request
from .search.alternatives import alternatives_search
from .search.beam import beam_search
from .search.greedy import greedy_search
from .search.options import SearchOptions
from .search.sampling import sampling_search
from .search.step import Emitted, Hypothesis, Search, Special, Start, Step
from .search.step_output import Shortlist
from .session import Session
from .tree_cache import TreeStep


def decode(
    session: Session,
    sources: Sequence[Sequence[int]],
    options: SearchOptions,
    prefixes: Sequence[Sequence[int]] | None = None,
) -> Search:
    """The decode loop as a generator of steps; its return value are the n-best hypotheses of every source."""
    rows = [list(source) for source in sources]
    check_request(session.limits, session.config, rows, options, prefixes=prefixes)
    session = session_for(session, options)
    state = session.encode(*padded(rows, session.config.pad_id))
    step = TreeStep(session, state, len(rows), options.width, options.max_length)
    return (yield from search_over(step, rows, session.config, options, prefixes))


def search_over(
    step: Step,
    sources: list[list[int]],
    config: ModelConfig,
    options: SearchOptions,
    prefixes: Sequence[Sequence[int]] | None = None,
) -> Search:
    """The search that the options ask for. Of `prefixes`, an empty one leaves what is forced for all."""
    search = alternatives_search if options.alternatives else sampling_search if options.sample else beam_search
    if options.greedy and search is beam_search:
        search = greedy_search
    starts = [Start(tuple(prefix) or options.forced_start) for prefix in prefixes or ()]
    return search(step, len(sources), Special(start_of(config, options), config.end_id), options, sources, starts)


def session_for(session: Session, options: SearchOptions) -> Session:
    """The session with the vocabulary that the options ask for, and its shortcut where they ask for tokens alone."""
    if options.shortlist is not None:
        config = session.config
        tokens = tuple(sorted({*options.shortlist, config.end_id}))
        session = session.shortlisted(Shortlist(tokens, config.target_vocab))
    return session.unscored(options.candidates) if options.unscored and options.candidates else session


def start_of(config: ModelConfig, options: SearchOptions) -> int:
    """What every beam is fed first."""
    return config.start_id if options.start is None else options.start


def generate(
    session: Session,
    sources: Sequence[Sequence[int]],
    options: SearchOptions | None = None,
    on_step: Callable[[Emitted], None] | None = None,
    prefixes: Sequence[Sequence[int]] | None = None,
) -> list[list[Hypothesis]]:
    """Decodes a batch of sources; n-best hypotheses each, best first (samples by number, alternatives by token).

    Without `options`, as the model does by default (its bundle's generation.json); `options_from_session` changes parts
    of that. SearchOptions that are given are taken at their word.

    `on_step` sees every step as it is done. It stops the decode by raising: its exception comes out of here, the
    decode's state is dropped, and the session is ready for the next call. `prefixes`, one for every source (an empty
    one for none), are forced like the options' `prefix`. A large batch may be decoded in lanes, if there
    is no `on_step`.
    """
    options = options or options_from_session(session)
    if on_step is not None:
        return run_through(decode(session, sources, options, prefixes), on_step)
    check_request(session.limits, session.config, [list(source) for source in sources], options, prefixes=prefixes)

    def part(lane: Session, numbers: list[int]) -> list[list[Hypothesis]]:
        own = None if prefixes is None else [prefixes[number] for number in numbers]
        return run_through(decode(lane, [sources[number] for number in numbers], options, own))

    found = in_lanes(session, sources, options.width, part)
    by_number = {number: nbest for numbers, each in found for number, nbest in zip(numbers, each, strict=True)}
    return [by_number[number] for number in range(len(sources))]


def run_through(search: Search, on_step: Callable[[Emitted], None] | None = None) -> list[list[Hypothesis]]:
    with closing(search) as steps:
        while True:
            try:
                emitted = next(steps)
            except StopIteration as finished:
                return finished.value
            if on_step is not None:
                on_step(emitted)


def padded(sources: Sequence[Sequence[int]], pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Ragged sources -> ids int64 and mask bool, both [B, longest]."""
    lengths = np.array([len(source) for source in sources])
    mask = np.arange(lengths.max()) < lengths[:, None]
    ids = np.full(mask.shape, pad_id, dtype=np.int64)
    ids[mask] = np.concatenate([np.asarray(source, dtype=np.int64) for source in sources])
    return ids, mask

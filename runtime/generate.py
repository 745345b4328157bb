"""Ids in, ids out: sources are padded, encoded and searched over any session."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from seq2engine.model.config import ModelConfig

from .model_options import options_from_session
from .parallel import in_parallel
from .requests import check_request
from .search.alternatives import alternatives_search
from .search.beam import beam_search
from .search.greedy import greedy_search
from .search.options import SearchOptions
from .search.sampling import sampling_search
from .search.step import NO_TOKEN, Emitted, Hypothesis, Search, Special, Start, Step, drain
from .search.step_output import Shortlist
from .session import Session, StepForm
from .tree_cache import TreeStep


def decode(
    session: Session,
    sources: Sequence[Sequence[int]],
    options: SearchOptions,
    prefixes: Sequence[Sequence[int]] | None = None,
) -> Search:
    """The decode loop as a generator of steps; it returns the n-best hypotheses of every source."""
    rows = [list(source) for source in sources]
    check_request(session.limits, session.config, rows, options, prefixes=prefixes)
    return (yield from decode_checked(session, rows, options, prefixes))


def decode_checked(
    session: Session,
    sources: list[list[int]],
    options: SearchOptions,
    prefixes: Sequence[Sequence[int]] | None = None,
) -> Search:
    """The same for a request that was checked, or a part of one."""
    state = session.encode(*padded(sources, session.config.pad_id))
    form = form_from_options(options, session.config)
    step = TreeStep(session, state, len(sources), options.width, options.max_length, form)
    return (yield from search_over(step, sources, session.config, options, prefixes))


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
    special = Special(start_of(config, options), NO_TOKEN if options.ignore_eos else config.end_id)
    return search(step, len(sources), special, options, sources, starts)


def form_from_options(options: SearchOptions, config: ModelConfig) -> StepForm:
    """What these options read of a step's output: their shortlist, and only candidates where no score is asked for."""
    shortlist = None
    if options.shortlist is not None:
        shortlist = Shortlist(tuple(sorted({*options.shortlist, config.end_id})), config.target_vocab)
    return StepForm(shortlist, options.candidates if options.unscored else 0)


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

    Without `options`, the model's own defaults apply (its bundle's generation.json); `options_from_session` changes
    parts of them. SearchOptions that are given are taken as they are.

    `on_step` sees every step as it is done. It stops the decode by raising: its exception comes out of here, the
    decode's state is dropped, and the session is ready for the next call. `prefixes`, one for every source (an empty
    one for none), are forced like the options' `prefix`. A large batch may be decoded by parallel workers if there is
    no `on_step`.
    """
    options = options or options_from_session(session)
    if on_step is not None:
        return drain(decode(session, sources, options, prefixes), on_step)
    rows = [list(source) for source in sources]
    check_request(session.limits, session.config, rows, options, prefixes=prefixes)

    def part(worker: Session, numbers: list[int]) -> list[list[Hypothesis]]:
        own = None if prefixes is None else [prefixes[number] for number in numbers]
        return drain(decode_checked(worker, [rows[number] for number in numbers], options, own))

    found = in_parallel(session, rows, options.width, part)
    by_number = {number: nbest for numbers, each in found for number, nbest in zip(numbers, each, strict=True)}
    return [by_number[number] for number in range(len(rows))]


def padded(sources: Sequence[Sequence[int]], pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Ragged sources -> ids int64 and mask bool, both [B, longest]."""
    lengths = np.array([len(source) for source in sources])
    mask = np.arange(lengths.max()) < lengths[:, None]
    ids = np.full(mask.shape, pad_id, dtype=np.int64)
    ids[mask] = np.concatenate([np.asarray(source, dtype=np.int64) for source in sources])
    return ids, mask

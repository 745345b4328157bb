"""Ids in, ids out: sources are padded, encoded and searched over any session."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from seq2engine.model.config import ModelConfig

from .encoder_inputs import encoder_inputs, listed_sources
from .model_options import options_from_session
from .parallel import in_parallel
from .requests import check_request
from .search.ahead.beam_plan import BeamPlan, beam_plan, runs_ahead
from .search.ahead.greedy_plan import GreedyPlan, greedy_plan, unserved
from .search.ahead.planned_beams import planned_beam_search
from .search.ahead.planned_greedy import planned_greedy_search
from .search.alternatives import alternatives_search
from .search.beam import beam_search
from .search.greedy import greedy_search
from .search.options import SearchOptions
from .search.sampling import sampling_search
from .search.step import NO_TOKEN, Emitted, Hypothesis, Search, Special, Start, Step, drain
from .search.step_output import Shortlist
from .session import RunAhead, Session, State, StepForm
from .steps.planned_beams import PlannedBeamsStep
from .steps.planned_step import PlannedStep
from .steps.tree_cache import TreeStep


def decode(
    session: Session,
    sources: Sequence[Sequence[int]],
    options: SearchOptions,
    prefixes: Sequence[Sequence[int]] | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
    logits: bool = False,
) -> Search:
    """The decode loop as a generator of steps; it returns the n-best hypotheses of every source.

    With `logits`, the caller may read the logits of every step.
    """
    rows = listed_sources(sources, session.config)
    check_request(session.limits, session.config, rows, options, prefixes=prefixes, prompts=prompts)
    return (yield from decode_checked(session, rows, options, prefixes, prompts, logits))


def decode_checked(
    session: Session,
    sources: Sequence[Sequence[int]],
    options: SearchOptions,
    prefixes: Sequence[Sequence[int]] | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
    logits: bool = False,
    followed: bool = True,
) -> Search:
    """The same for a checked request, or a part of one; `followed`: somebody reads its steps as they come."""
    state = session.encode(*encoder_inputs(sources, session.config))
    return (yield from decode_encoded(session, state, sources, options, prefixes, prompts, logits, followed))


def decode_encoded(
    session: Session,
    state: State,
    sources: Sequence[Sequence[int]],
    options: SearchOptions,
    prefixes: Sequence[Sequence[int]] | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
    logits: bool = False,
    followed: bool = True,
) -> Search:
    """The same for sources that were encoded; their state may be decoded several times, one after another."""
    form, special = form_from_options(options, session.config, logits), special_of(session.config, options)
    planned = not (logits or prompts)
    beams = beam_plan_from_options(session, options, len(sources)) if planned and not (followed or prefixes) else None
    if beams is not None:
        running = PlannedBeamsStep(session, state, len(sources), options, form, beams)
        return (yield from planned_beam_search(running, len(sources), special, options))
    plan = plan_from_options(session, options, len(sources), prefixes, followed) if planned else None
    if plan is not None and session.ahead is not None and session.ahead.undisturbed:
        choosing = PlannedStep(session, state, len(sources), options.max_length, form, plan)
        starts = starts_of(options, prefixes)
        return (yield from planned_greedy_search(choosing, len(sources), special, options, starts))
    step = TreeStep(session, state, len(sources), options.width, options.max_length, form, plan, alike=True)
    if prompts or options.prompt:
        step.feed(np.arange(len(sources)), prompts_of(session.config, options, len(sources), prompts))
    return (yield from search_over(step, sources, session.config, options, prefixes))


def prompts_of(
    config: ModelConfig, options: SearchOptions, count: int, given: Sequence[Sequence[int]] | None = None
) -> list[tuple[int, ...]]:
    """What the decoder is fed for each source before it emits anything: its own prompt, or start token and prompt of
    the options."""
    if given is None:
        return [(start_of(config, options), *options.prompt)] * count
    return [tuple(prompt) for prompt in given]


def search_over(
    step: Step,
    sources: Sequence[Sequence[int]],
    config: ModelConfig,
    options: SearchOptions,
    prefixes: Sequence[Sequence[int]] | None = None,
) -> Search:
    """The search that the options ask for. Of `prefixes`, an empty one leaves what is forced for all."""
    search = alternatives_search if options.alternatives else sampling_search if options.sample else beam_search
    if options.greedy and search is beam_search:
        search = greedy_search
    starts = starts_of(options, prefixes)
    return search(step, len(sources), special_of(config, options), options, sources, starts)


def starts_of(options: SearchOptions, prefixes: Sequence[Sequence[int]] | None) -> list[Start]:
    return [Start(tuple(prefix) or options.forced_start) for prefix in prefixes or ()]


def special_of(config: ModelConfig, options: SearchOptions) -> Special:
    return Special(start_of(config, options), NO_TOKEN if options.ignore_eos else config.end_id)


def plan_from_options(
    session: Session,
    options: SearchOptions,
    batch: int,
    prefixes: Sequence[Sequence[int]] | None,
    followed: bool = True,
) -> GreedyPlan | None:
    """The plan by which a session chooses tokens itself; None if it does not."""
    ahead, config = session.ahead, session.config
    if ahead is None or not chooses_tokens(ahead, config, options, batch, prefixes, followed):
        return None
    starts = starts_of(options, prefixes)
    return greedy_plan(options, special_of(config, options), starts, batch, config.target_vocab, ahead.length)


def chooses_tokens(
    ahead: RunAhead,
    config: ModelConfig,
    options: SearchOptions,
    batch: int,
    prefixes: Sequence[Sequence[int]] | None,
    followed: bool,
) -> bool:
    """Whether greedy search leaves the choice to the session: not with options that no plan serves, with a prompt, as a
    plan counts from position 0, or where the decode is `followed`, if that would disturb it."""
    if batch < ahead.least_rows or options.max_length > ahead.length or options.prompt:
        return False
    if ahead.undisturbed and (followed or not chosen_among_candidates(options, config, prefixes)):
        return False
    return not unserved(options, ahead.candidates)


def beam_plan_from_options(session: Session, options: SearchOptions, batch: int) -> BeamPlan | None:
    """The plan by which a session makes steps of beam search itself; None if it does not."""
    ahead, config = session.ahead, session.config
    if ahead is None or not ranks_beams(ahead, options, batch):
        return None
    return beam_plan(options, special_of(config, options), batch, config.target_vocab)


def ranks_beams(ahead: RunAhead, options: SearchOptions, batch: int) -> bool:
    enough = batch * options.beam >= ahead.least_rows
    return ahead.undisturbed and enough and runs_ahead(options, ahead.candidates)


def makes_steps_ahead(
    session: Session, options: SearchOptions, batch: int, prefixes: Sequence[Sequence[int]] | None = None
) -> bool:
    """Whether a batch that nobody follows is decoded in a few calls of many steps each."""
    ahead = session.ahead
    if ahead is None or not ahead.undisturbed:
        return False
    beams = not prefixes and ranks_beams(ahead, options, batch)
    return beams or chooses_tokens(ahead, session.config, options, batch, prefixes, followed=False)


def chosen_among_candidates(
    options: SearchOptions, config: ModelConfig, prefixes: Sequence[Sequence[int]] | None
) -> bool:
    """Whether a step's candidates have every token that a plan chooses: a forced one needs none without a score."""
    forced = any(prefixes or ()) or options.forced_start or options.forced_eos is not None
    return options.candidates <= config.target_vocab and (options.unscored or not forced)


def form_from_options(options: SearchOptions, config: ModelConfig, logits: bool = False) -> StepForm:
    """What these options read of a step's output: their shortlist, and only candidates where no score is asked for, or
    where the search alone reads the `logits`."""
    shortlist = None
    if options.shortlist is not None:
        shortlist = Shortlist(tuple(sorted({*options.shortlist, config.end_id})), config.target_vocab)
    return StepForm(shortlist, options.greedy_candidates if options.unscored else 0, 0 if logits else options.best)


def start_of(config: ModelConfig, options: SearchOptions) -> int:
    """What every beam is fed first."""
    return config.start_id if options.start is None else options.start


def generate(
    session: Session,
    sources: Sequence[Sequence[int]],
    options: SearchOptions | None = None,
    on_step: Callable[[Emitted], None] | None = None,
    prefixes: Sequence[Sequence[int]] | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
    logits: bool = False,
) -> list[list[Hypothesis]]:
    """Decodes a batch of sources; n-best hypotheses each, best first (samples by number, alternatives by token).

    A source is token ids or, for a model that takes audio, an array of log-mel features [mels, frames].

    Without `options`, the model's own defaults apply (its bundle's generation.json); `options_from_session` changes
    parts of them. SearchOptions that are given are taken as they are.

    `on_step` sees every step as it is done; if it reads their logits, set `logits`, because some sessions leave them
    on a device otherwise, where they may also be some steps ahead. It stops the decode by raising: its exception comes
    out of here, the decode's state is dropped, and the session is ready for the next call. `prefixes`, one for every
    source (an empty one for none), are forced like the options' `prefix`. `prompts`, one for every source, are all that
    the decoder is fed before it emits anything, in place of the start token and the options' `prompt`; a prompt is read
    in one call where the session can, and is not part of the output. A large batch may be decoded by parallel workers
    if there is no `on_step`.
    """
    options = options or options_from_session(session)
    if on_step is not None:
        return drain(decode(session, sources, options, prefixes, prompts, logits), on_step)
    rows = listed_sources(sources, session.config)
    check_request(session.limits, session.config, rows, options, prefixes=prefixes, prompts=prompts)

    def part(worker: Session, numbers: list[int]) -> list[list[Hypothesis]]:
        own = None if prefixes is None else [prefixes[number] for number in numbers]
        fed = None if prompts is None else [prompts[number] for number in numbers]
        return drain(decode_checked(worker, [rows[number] for number in numbers], options, own, fed, followed=False))

    found = in_parallel(session, rows, options.width, part, tokens_of)
    by_number = {number: nbest for numbers, each in found for number, nbest in zip(numbers, each, strict=True)}
    return [by_number[number] for number in range(len(rows))]


def tokens_of(found: Sequence[Sequence[Hypothesis]]) -> int:
    """The tokens of all best hypotheses."""
    return sum(len(best.tokens) for nbest in found for best in nbest[:1])

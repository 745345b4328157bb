"""Times `generate` itself, to a fixed output length, through a session that measures its calls.

    encoder      session.encode
    step         session.step: the graph, and the copies into and out of its buffers; where one call makes many steps,
                 what the library does between them as well: ranking, finished beams, compaction
    compaction   session.select of cache slots: living slots move to the front, or to a longer cache
    copies       all other moves of the cache: reserve, rows that leave the batch, rows that are replaced
    search       everything else in `generate`

Wrappers forward every call to the session, so the decode is the one that users run.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from seq2engine.runtime.generate import form_from_options, generate, prompts_of, start_of
from seq2engine.runtime.model_options import measured_options
from seq2engine.runtime.search.ahead.beam_plan import BeamsAhead
from seq2engine.runtime.search.ahead.greedy_plan import ChosenTokens, GreedyPlan
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step import Emitted, Hypothesis
from seq2engine.runtime.search.step_output import StepOutput
from seq2engine.runtime.session import Session, State, StepForm
from seq2engine.runtime.steps.tree_cache import TreeStep
from seq2engine.runtime.threads import Workers

from .cases import Case, Sources, audio_prompt

PIECES = ("encoder", "step", "search", "compaction", "copies")

Tokens = list[tuple[int, ...]]  # the best hypothesis of every source
Split = dict[str, int]  # piece -> nanoseconds
Choices = tuple[np.ndarray, np.ndarray]  # tokens and parents of one step


def best_tokens(hypotheses: list[list[Hypothesis]]) -> Tokens:
    return [nbest[0].tokens for nbest in hypotheses]


def case_options(session: Session, case: Case, defaults: bool = True, forced_bos: int | None = None) -> SearchOptions:
    """How a case is decoded: tokens without scores, with the model's own rules unless `defaults` is false.

    Peers get only the weights of a model, so in comparisons with them its rules and the target language's token
    (`forced_bos`) are left out; a prompt, which a model of audio does not decode without, stays.
    """
    if not defaults:
        prompt = audio_prompt(session.config)
        return SearchOptions(max_length=case.target, beam=case.beam, scores=False, prompt=prompt)
    own = measured_options(session, case.beam, case.target, forced_bos)
    return dataclasses.replace(own, max_length=case.target)


def fixed_length(options: SearchOptions) -> SearchOptions:
    """The same options, but every output has the maximum length, so that every arm does the same work."""
    return dataclasses.replace(options, ignore_eos=True)


# --- timing -----------------------------------------------------------------------------------------------------------


class WatchedSession:
    """A session that adds up the nanoseconds spent in it."""

    def __init__(self, session: Session):
        self.session = session
        self.spent = dict.fromkeys(PIECES, 0)
        self.parallel: list[Split] = []  # what parallel decodes spent, each on its own

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    @contextmanager
    def counted(self, piece: str) -> Iterator[None]:
        started = time.perf_counter_ns()
        yield
        self.spent[piece] += time.perf_counter_ns() - started

    @property
    def workers(self) -> WatchedWorkers | None:
        return None if self.session.workers is None else WatchedWorkers(self.session.workers, self.parallel)

    def encode(self, source: np.ndarray, source_mask: np.ndarray) -> State:
        with self.counted("encoder"):
            return self.session.encode(source, source_mask)

    def prefill(self, state: State, *inputs: Any) -> StepOutput:
        with self.counted("step"):
            return self.session.prefill(state, *inputs)

    def step(self, state: State, *inputs: np.ndarray) -> StepOutput:
        started = time.perf_counter_ns()  # no context manager: its own cost would be charged to the search
        answer = self.session.step(state, *inputs)
        self.spent["step"] += time.perf_counter_ns() - started
        return answer

    def choose(self, state: State, *inputs: Any) -> list[StepOutput]:
        with self.counted("step"):
            return self.session.choose(state, *inputs)

    def choose_alone(self, state: State, *inputs: Any) -> ChosenTokens:
        with self.counted("step"):
            return self.session.choose_alone(state, *inputs)

    def choose_beams(self, state: State, *inputs: Any) -> BeamsAhead:
        with self.counted("step"):
            return self.session.choose_beams(state, *inputs)

    def reserve(self, state: State, slots: int, form: StepForm) -> None:
        with self.counted("copies"):
            self.session.reserve(state, slots, form)

    def replace(self, state: State, *given: Any) -> None:
        with self.counted("copies"):
            self.session.replace(state, *given)

    def select(self, state: State, rows: np.ndarray | None, slots: np.ndarray | None) -> None:
        with self.counted("compaction" if rows is None else "copies"):
            self.session.select(state, rows, slots)

    def split(self, whole: int) -> Split:
        """Nanoseconds of every piece, of `whole` in all: of parallel decodes the mean."""
        parts = self.parallel or [self.spent]
        mean = {piece: sum(spent[piece] for spent in parts) // len(parts) for piece in PIECES}
        return {**mean, "search": whole - sum(mean.values())}


class WatchedWorkers:
    """Workers that are watched, each on its own."""

    def __init__(self, workers: Workers[Session], spent: list[Split]):
        self.watched, self.spent = workers, spent

    def for_batch(self, sources: int, rows: int) -> tuple[WatchedSession, ...]:
        found = tuple(WatchedSession(worker) for worker in self.watched.for_batch(sources, rows))
        self.spent += [worker.spent for worker in found]
        return found

    def note(self, *given: Any) -> None:
        self.watched.note(*given)


def timed_decode(session: Session, sources: Sources, options: SearchOptions) -> Split:
    """One call of `generate`, as a user makes it, and where its time went."""
    watched = WatchedSession(session)
    started = time.perf_counter_ns()
    generate(cast(Session, watched), sources, options)
    return watched.split(time.perf_counter_ns() - started)


# --- counting ---------------------------------------------------------------------------------------------------------


@dataclass
class CacheCounts:
    """Cache statistics of a decode, for one source."""

    steps: int = 0
    compactions: int = 0  # dead slots dropped
    growths: int = 0  # the cache moved to more slots
    most_live: int = 0  # most slots alive at once
    most_slots: int = 0  # most slots allocated at once
    read: int = 0  # slots that attention went over, in all steps together
    moved: int = 0  # slots that compactions and growths copied, all together


class CountedSession:
    """A session that counts cache slots."""

    def __init__(self, session: Session):
        self.session, self.counts = session, CacheCounts()
        self.capacity = 0  # slots of the cache as it is now

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def step(self, state: State, *inputs: np.ndarray) -> StepOutput:
        _, _, _, mask, *_ = inputs  # [B, K, L]
        counts = self.counts
        self.capacity = mask.shape[-1]
        counts.steps += 1
        counts.read += self.capacity
        counts.most_slots = max(counts.most_slots, self.capacity)
        counts.most_live = max(counts.most_live, int(mask.any(axis=1).sum(axis=1).max(initial=0)))
        return self.session.step(state, *inputs)

    def choose(
        self, state: State, tokens: np.ndarray, position: np.ndarray, plan: GreedyPlan, count: int
    ) -> list[StepOutput]:
        counts, last = self.counts, int(position.max(initial=0)) + count
        counts.steps += count
        counts.read += self.capacity * count
        counts.most_slots, counts.most_live = max(counts.most_slots, self.capacity), max(counts.most_live, last)
        return self.session.choose(state, tokens, position, plan, count)

    def reserve(self, state: State, slots: int, form: StepForm) -> None:
        self.capacity = slots
        self.session.reserve(state, slots, form)

    def select(self, state: State, rows: np.ndarray | None, slots: np.ndarray | None) -> None:
        if slots is not None:
            self.count_move(slots)
        self.session.select(state, rows, slots)

    def count_move(self, slots: np.ndarray) -> None:
        """Slots [B,L] that the cache is gathered from: into one of the same length, or a longer or shorter one."""
        before, after = self.capacity, slots.shape[1]
        stays = np.arange(after) if after == before else -1
        self.counts.moved += int((slots != stays).sum(axis=1).max(initial=0))
        if after > before:
            self.counts.growths += 1
        else:
            self.counts.compactions += 1
        self.capacity = after


@dataclass(frozen=True)
class FixedDecode:
    """An untimed decode to a fixed length: its tokens, its cache, and the choices of every step."""

    tokens: Tokens
    counts: CacheCounts
    trail: list[Choices]


def fixed_decode(session: Session, sources: Sources, options: SearchOptions) -> FixedDecode:
    """`generate` to a fixed length, the whole batch in one decode."""
    counted = CountedSession(session)
    trail: list[Choices] = []

    def note(emitted: Emitted) -> None:
        trail.append((emitted.tokens, emitted.parents))

    tokens = best_tokens(generate(cast(Session, counted), sources, fixed_length(options), note))
    assert all(len(row) == options.max_length for row in tokens)
    return FixedDecode(tokens, counted.counts, trail)


# --- one step ---------------------------------------------------------------------------------------------------------


class RecordedSession:
    """A session that keeps the inputs of its latest step, and of a growing cache the tensors before it."""

    def __init__(self, session: Session):
        self.session, self.growing = session, session.cache_form == "growing"
        self.given: tuple[State, dict[str, Any], list[np.ndarray]] = ({}, {}, [])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def step(self, state: State, *inputs: np.ndarray) -> StepOutput:
        self.given = state, dict(state) if self.growing else {}, [array.copy() for array in inputs]
        return self.session.step(state, *inputs)


def repeated_step(
    session: Session, source: np.ndarray, mask: np.ndarray, options: SearchOptions, trail: list[Choices]
) -> Callable[[], StepOutput]:
    """The step halfway through a decode that made these choices, as a function to call again and again.

    Every arm follows the first arm's choices, so all of them step over a cache of the same shape and fill.
    """
    recorded = RecordedSession(session)
    batch, beam, form = len(mask), options.beam, form_from_options(options, session.config)
    step = TreeStep(cast(Session, recorded), session.encode(source, mask), batch, beam, options.max_length, form)
    step.feed(np.arange(batch), prompts_of(session.config, options, batch))
    start = np.full((batch, beam), start_of(session.config, options), dtype=np.int64)
    step(start, np.tile(np.arange(beam), (batch, 1)))
    for tokens, parents in trail[: options.max_length // 2]:
        step(tokens, parents)
    state, before, inputs = recorded.given

    def again() -> StepOutput:
        if recorded.growing:  # outputs are longer: every call starts from the same tensors
            state.update(before)
        return session.step(state, *inputs)  # a static cache gets the same slots again

    return again

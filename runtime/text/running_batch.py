"""A batch whose sources come and go: each row is one source at its own step, and free rows are given to others.

    rows    0  1  2  3  4  5  6  7
    step 9  a  a  a  .  a  a  .  a     two of the first eight are done
    step 10 a  a  a  b  a  a  b  a     the next two are encoded and begin in their rows
    step 17 a  .  a  b  .  .  b  a

Sources that begin together with the same options are one search, the usual one; only the decoder
step is shared by all. So there is no second implementation of search, and the output of a source does not depend on its
neighbours. Sources with other options share a batch where their steps have the same form (`BatchForm`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from seq2engine.errors import Seq2EngineError

from ..encoder_inputs import encoder_inputs, groups_by_padding
from ..generate import form_from_options, plan_from_options, prompts_of, search_over, start_of
from ..search.ahead.greedy_plan import GreedyPlan
from ..search.options import SearchOptions
from ..search.step import Hypothesis, staying_rows
from ..search.step_output import NotFiniteError, StepOutput
from ..session import Session, State, StepForm
from ..steps.tree_cache import TreeStep, rounded

NOBODY = -1  # a number that no source has
Decoded = tuple[int, list[Hypothesis]]  # the number of a source, and its hypotheses


@dataclass(frozen=True)
class Source:
    """One source: its number, its tokens (or features), its options, the prefix of its output (None: none of its
    own), and what the decoder is fed before that (None: as in the options).

    `asked` is an index in its prompt: the logits after that token are returned, too (`RunningBatch.asked`)."""

    number: int
    tokens: Sequence[int]
    options: SearchOptions
    prefix: list[int] | None = None
    prompt: list[int] | None = None
    asked: int | None = None


@dataclass(frozen=True)
class BatchForm:
    """What all sources of a batch have in common.

    `bans` are the banned tokens that a session which chooses tokens by itself gets once for a batch; None where the
    search chooses them.
    """

    width: int
    step: StepForm
    bans: tuple[object, ...] | None


def batch_form(session: Session, source: Source) -> BatchForm:
    options = source.options
    planned = source.prompt is None and plan_from_options(session, options, 1, None) is not None
    bans = (options.banned, options.first_banned, options.bars_eos, options.ignore_eos) if planned else None
    return BatchForm(options.width, form_from_options(options, session.config), bans)


@dataclass(frozen=True)
class Advance:
    """What one step of a batch did: the latest token of each source that has one beam, by its number; the sources that
    are done; and groups of sources whose search failed, with the reason."""

    tokens: dict[int, int]
    done: list[Decoded]
    failed: list[tuple[list[int], Seq2EngineError]]


class RunningBatch:
    """Rows that are decoded together, and the searches over them. It has no rows before the first sources come.

    `encode` makes a state of sources that are padded alike; the state of those that come first becomes the batch's.
    `asked` are the requested logits [V] by source number; the caller removes them.
    """

    def __init__(
        self,
        session: Session,
        form: BatchForm,
        max_length: int,
        encode: Callable[[Sequence[Sequence[int]]], State] | None = None,
    ):
        self.session, self.form, self.max_length = session, form, max_length
        self.encode = encode or (lambda group: session.encode(*encoder_inputs(group, session.config)))
        self.rows: _Rows | None = None
        self.cohorts: list[_Cohort] = []
        self.asked: dict[int, np.ndarray] = {}

    @property
    def size(self) -> int:
        """Rows of a step, free ones included."""
        return 0 if self.rows is None else len(self.rows.free)

    @property
    def used(self) -> int:
        return 0 if self.rows is None else int(np.count_nonzero(~self.rows.free))

    @property
    def settled(self) -> bool:
        """Whether rows may change: the search has consumed all steps that the session ran ahead."""
        return self.rows is None or not self.rows.tree.waiting

    def admit(self, sources: list[Source]) -> None:
        """Starts these sources with the next step: in free rows, and in new ones if those are too few."""
        if self.rows is None:
            self.rows = _Rows(self, sources)
            places = np.arange(len(sources))
        else:
            self.rows.grow(max(0, len(sources) - (self.size - self.used)))
            places = np.flatnonzero(self.rows.free)[: len(sources)]
            self.rows.admit(places, sources)
        for own in same_options(sources):
            self.cohorts.append(_Cohort(self.rows, places[own], [sources[place] for place in own]))

    def step(self, tokens: bool = False) -> Advance:
        """One decoder step of all rows, and one step of their searches; `tokens` are returned only on request."""
        assert self.rows is not None
        advance = Advance({}, [], [])
        self.rows.step()
        for cohort in self.cohorts:
            try:
                advance.done.extend(cohort.advance(advance.tokens if tokens else None))
            except NotFiniteError as error:
                cohort.end()
                found = NotFiniteError(cohort.sources[error.source].number)
                advance.failed.append(([source.number for source in cohort.sources], found))
        self.cohorts = [cohort for cohort in self.cohorts if not cohort.done.all()]
        if not self.cohorts:
            self.rows.tree.waiting.clear()  # steps that the session ran ahead and that are not needed
        return advance

    def drop(self, numbers: set[int]) -> None:
        """Frees the rows of these sources, which were cancelled."""
        for cohort in self.cohorts:
            cohort.drop(numbers)
        self.cohorts = [cohort for cohort in self.cohorts if not cohort.done.all()]
        if self.rows is not None and not self.cohorts:
            self.rows.tree.waiting.clear()

    def shrink(self) -> None:
        """Drops free rows, where they are enough to be worth a copy."""
        if self.rows is None or staying_rows(self.rows.free) is None:
            return
        places = self.rows.keep(closed_up(self.rows.free))
        for cohort in self.cohorts:
            cohort.rows = places[cohort.rows]


def closed_up(free: np.ndarray) -> np.ndarray:
    """The rows in use [N] of all [B], in an order in which few have to move: the last ones take the free places.

    free  . x . . x .      0 1 2 3 4 5      ->      rows 0 5 2 3
    """
    used = np.flatnonzero(~free)
    rows = np.arange(len(used))
    rows[free[: len(used)]] = used[used >= len(used)]
    return rows


def same_options(sources: Sequence[Source]) -> list[list[int]]:
    """The places of sources with equal options together."""
    groups: list[tuple[SearchOptions, list[int]]] = []
    for place, source in enumerate(sources):
        found = next((places for options, places in groups if options == source.options), None)
        if found is None:
            groups.append((source.options, [place]))
        else:
            found.append(place)
    return [places for _, places in groups]


def prefixes_of(sources: Sequence[Source]) -> list[list[int]]:
    """The beginning of each output, an empty one for none of its own; nothing if no source has any."""
    own = any(source.prefix is not None for source in sources)
    return [source.prefix or [] for source in sources] if own else []


class _Rows:
    """The rows of the batch for the decoder: one source per row, each at its own step, some of them free."""

    def __init__(self, owner: RunningBatch, sources: list[Source]):
        self.session, self.form, self.encode, self.asked = owner.session, owner.form, owner.encode, owner.asked
        batch, width = len(sources), self.form.width
        self.lengths = np.array([len(source.tokens) for source in sources])
        self.free = np.zeros(batch, dtype=bool)
        self.asking = np.full(batch, NOBODY)  # numbers of the sources that ask for the logits of the next step
        self.tokens = np.zeros((batch, width), dtype=np.int64)
        self.parents = np.zeros((batch, width), dtype=np.int64)
        state = self.first_state(sources)
        plan = self.plan_of(sources)
        self.tree = TreeStep(self.session, state, batch, width, owner.max_length, self.form.step, plan, alike=True)
        self.begin(np.arange(batch), sources)
        self.answer = StepOutput(np.zeros(0))

    def begin(self, rows: np.ndarray, sources: list[Source]) -> None:
        """Starts these rows: prompts are read, and the search will ask for start tokens."""
        config = self.session.config
        fed = [place for place, source in enumerate(sources) if source.prompt is not None or source.options.prompt]
        if fed:
            prompts = [source.prompt or prompts_of(config, source.options, 1)[0] for source in sources]
            asked = [sources[place].asked for place in fed]
            found = self.tree.feed(rows[fed], [prompts[place] for place in fed], asked)
            self.read_logits(rows, sources, found)
        self.free[rows] = False
        self.tokens[rows] = [[start_of(config, source.options)] for source in sources]
        self.parents[rows] = np.arange(self.form.width)

    def read_logits(self, rows: np.ndarray, sources: list[Source], found: dict[int, np.ndarray]) -> None:
        """Stores requested logits by row; those after a prompt's last token come with the next step."""
        for row, source in zip(rows.tolist(), sources, strict=True):
            if row in found:
                self.asked[source.number] = found[row]
            elif source.asked is not None:
                self.asking[row] = source.number

    def first_state(self, sources: list[Source]) -> State:
        """Joins the states of sources that were encoded in several calls."""
        (places, state), *others = self.encoded(sources)
        rows = np.zeros(len(sources), dtype=np.int64)
        rows[places] = np.arange(len(places))
        self.session.select(state, rows, None)
        self.width = 0  # columns of the sources since the last admission
        for places, more in others:
            self.session.replace(state, places, more, int(self.lengths.max()))
        return state

    def plan_of(self, sources: list[Source]) -> GreedyPlan | None:
        """The plan by which the session chooses tokens itself; None if the search does."""
        if self.form.bans is None:
            return None
        whole: GreedyPlan | None = None
        for own in same_options(sources):
            mine = [sources[place] for place in own]
            plan = plan_from_options(self.session, mine[0].options, len(mine), prefixes_of(mine))
            assert plan is not None
            if whole is None:
                whole = plan.of(np.zeros(len(sources), dtype=np.int64))
            whole = whole.put(np.array(own), plan)
        return whole

    def encoded(self, sources: list[Source]) -> Iterator[tuple[np.ndarray, State]]:
        """States of sources of like length with their places, the longest first."""
        for places in groups_by_padding([len(source.tokens) for source in sources]):
            yield np.array(places), self.encode([sources[place].tokens for place in places])

    def step(self) -> None:
        if self.tree.plan is None:
            self.tree.restart(np.flatnonzero(self.free))  # free rows are stepped as well, but must not use up slots
        self.answer = self.tree(self.tokens, self.parents)
        for row in np.flatnonzero(self.asking != NOBODY).tolist():
            self.asked[int(self.asking[row])] = np.array(self.answer.logits[row, 0])
        self.asking[:] = NOBODY

    def admit(self, rows: np.ndarray, sources: list[Source]) -> None:
        self.lengths[self.free] = 0
        self.lengths[rows] = [len(source.tokens) for source in sources]
        needed = min(rounded(int(self.lengths.max())), self.session.limits.source)
        if not needed <= self.width <= needed + needed // 4:  # another width copies all rows
            self.width = needed
        for places, state in self.encoded(sources):
            self.tree.replace(rows[places], state, self.width, self.plan_of([sources[place] for place in places]))
        self.begin(rows, sources)

    def grow(self, count: int) -> None:
        """Adds free rows: copies of the first one, until a source takes them."""
        if not count:
            return
        rows = np.concatenate([np.arange(len(self.free)), np.zeros(count, dtype=np.int64)])
        first = len(self.free)
        self.keep(rows)
        self.free[first:], self.lengths[first:], self.asking[first:] = True, 0, NOBODY

    def keep(self, rows: np.ndarray) -> np.ndarray:
        """Drops all other rows; the new place of every row, 0 for those that are gone."""
        places = np.zeros(len(self.free), dtype=np.int64)
        places[rows] = np.arange(len(rows))
        self.tree.keep(rows)
        self.lengths, self.free, self.asking = self.lengths[rows], self.free[rows], self.asking[rows]
        self.tokens, self.parents = self.tokens[rows], self.parents[rows]
        return places


class _Cohort:
    """Sources that began together: a search, and its `Step`, which reads its rows of the batch's latest step.

    A search emits with every step the tokens it will ask for next, so the whole batch can be stepped beforehand.
    """

    def __init__(self, batch: _Rows, rows: np.ndarray, sources: list[Source]):
        self.batch, self.sources = batch, sources
        self.rows = rows  # rows of the sources in the search; finished ones read another's row
        self.done = np.zeros(len(rows), dtype=bool)
        self.dropped = np.zeros(len(rows), dtype=bool)  # of all sources: cancelled
        texts = [source.tokens for source in sources]
        options, config = sources[0].options, batch.session.config
        self.search = search_over(self, texts, config, options, prefixes_of(sources))
        self.here = np.arange(len(rows))  # the numbers of the search's sources

    def __call__(self, tokens: np.ndarray, parents: np.ndarray) -> StepOutput:
        going = self.rows[~self.done]
        assert np.array_equal(self.batch.tokens[going], tokens[~self.done]), "a search asks for what it emitted"
        every = len(self.rows) == len(self.batch.free) and bool((np.diff(self.rows) == 1).all())
        return self.batch.answer if every else self.batch.answer.of(self.rows)  # rows of logits would be copied

    def attention(self) -> np.ndarray:
        return self.batch.tree.attention()[self.rows]

    def keep(self, rows: np.ndarray) -> None:
        self.rows, self.done, self.here = self.rows[rows], self.done[rows], self.here[rows]

    def advance(self, tokens: dict[int, int] | None = None) -> list[Decoded]:
        """One step of the search; the tokens it asks for next go to the batch. Returns finished sources.

        `tokens` gets the latest token of each source that has one beam.
        """
        emitted = next(self.search)
        if tokens is not None and emitted.tokens.shape[1] == 1:
            going, latest = np.flatnonzero(~self.done).tolist(), emitted.tokens[:, 0].tolist()
            tokens.update({self.sources[self.here[place]].number: latest[place] for place in going})
        done = emitted.done | self.dropped[self.here]
        finished = done & ~self.done
        self.done = done
        going = self.rows[~done]
        self.batch.tokens[going] = emitted.tokens[~done]
        self.batch.parents[going] = emitted.parents[~done]
        if not finished.any():
            return []
        self.batch.free[self.rows[finished]] = True
        numbers = self.here[finished]
        found = emitted.hypotheses(numbers)
        if done.all():
            self.search.close()
        return [(self.sources[place].number, nbest) for place, nbest in zip(numbers.tolist(), found, strict=True)]

    def drop(self, numbers: set[int]) -> None:
        """Frees the rows of these sources; the search goes on for the others."""
        gone = np.array([source.number in numbers for source in self.sources]) & ~self.dropped
        if not gone.any():
            return
        self.dropped |= gone
        leaving = self.dropped[self.here] & ~self.done
        self.batch.free[self.rows[leaving]] = True
        self.done = self.done | leaving
        if self.done.all():
            self.search.close()

    def end(self) -> None:
        """Frees all its rows, as the search has failed."""
        self.batch.free[self.rows[~self.done]] = True
        self.done = np.ones_like(self.done)

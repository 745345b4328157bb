"""The KV cache as a tree: all beams of a source share one cache, and a mask marks the ancestors of each beam.

Every step appends K slots to a source's cache. When beams switch, only rows of the mask are copied; nothing in the
cache moves. Slots that no beam descends from are dead. When the cache is full, compaction gathers the live slots to the
front and leaves `slack` free slots after them.

    slots   0 1 2 | 3 4 5 | 6 7 8        K = 3; beam 0 continued slot 4, which continued slot 0
    beam 0  x . . | . x . | x . .
    beam 1  x . . | . x . | . x .        shares its prefix with beam 0: one copy
    beam 2  . x . | . . x | . . x
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from seq2engine.errors import RequestError
from seq2engine.model.config import ModelConfig

from ..search.ahead.greedy_plan import GreedyPlan
from ..search.step import NO_TOKEN
from ..search.step_output import StepOutput
from ..session import EVERYTHING, Session, State, StepForm, cross_attention
from ..threads import row_work

ROUND = 8  # capacities are multiples of this many slots
PREFILL_TOKENS = 32  # of a prompt in one call: graphs compute the logits of all of them
# What the calls of one compaction take, whatever it copies: as long as attention reads this many numbers of a layer's
# keys. A small model's steps are short beside them (docs/LOG.md).
COMPACTION_CALLS, LEAST_NUMBERS = 5_000_000, 768
ROOMY = 4  # times `slack`: several times as many slots make no decode faster
FIRST_BYTES = 32 << 20  # of a cache at the beginning; more are for outputs that are long
FIRST_STEP = 16_000_000  # multiplications that take as long as the calls for a first step of another shape
COMPACTION_STEPS = 16  # steps of a source after which a deterministic session compacts its cache


class TreeStep:
    """A `Step` over a session: tokens and parents in, the step's output out. It owns the state it was given."""

    def __init__(
        self,
        session: Session,
        state: State,
        batch: int,
        beams: int,
        max_steps: int,
        form: StepForm = EVERYTHING,
        plan: GreedyPlan | None = None,
        alike: bool = False,
    ):
        """`alike`: the first call feeds all beams of a source the same token."""
        self.session, self.state, self.beams, self.max_steps = session, state, beams, max_steps
        self.longest_output = max_steps
        self.fixed_slots, self.batch_invariant = session.limits.slots_for(beams), session.deterministic
        self.growing = session.cache_form == "growing"
        if self.growing:
            self.capacity = 0
        elif self.fixed_slots is not None:
            self.capacity = self.fixed_slots
        elif plan is not None:
            self.capacity = rounded(max_steps)  # running ahead is not interrupted for a larger cache
        else:
            self.capacity = min(self.slack(batch, 0), rounded(beams * max_steps))
        self.position: np.ndarray  # [B] steps that each source has done
        self.mask = np.zeros((batch, beams, self.capacity), dtype=bool)
        # Position of the token in every slot [B,L], for models with relative positions; arbitrary where masked.
        self.slot_position = np.zeros((batch, self.capacity), dtype=np.int64) if session.config.relative else None
        self.opening: np.ndarray | None = None  # [B] the last token of a prompt, fed in place of the start token
        self.set_positions(np.zeros(batch, dtype=np.int64), np.zeros(batch, dtype=np.int64))
        self.announces = session.keeps_mask and not self.growing
        # One beam then stands for all of a source. With one source that saves nothing: reading weights takes the time.
        whole = batch == 1 or form.candidates or self.growing or self.batch_invariant
        worth_it = batch * (beams - 1) * row_work(session.config) >= FIRST_STEP
        self.alike = alike and session.fewer_beams and worth_it and not whole
        # With a plan the session runs some steps ahead of the search, which gets the outputs one by one.
        self.plan = plan if plan is not None and beams == 1 and self.capacity >= max_steps else None
        self.waiting: list[StepOutput] = []
        self.staying: np.ndarray | None = None  # remaining rows, if some have left since the session chose
        self.begun: np.ndarray | None = None  # [B] rows that restart in the next step; None: the whole mask is sent
        session.reserve(state, self.capacity, form)

    def feed(
        self, rows: np.ndarray, prompts: Sequence[Sequence[int]], asked: Sequence[int | None] = ()
    ) -> dict[int, np.ndarray]:
        """Reads prompts of these rows [N], which are at their first step: all but the last token of each. The next call
        feeds that last one, whatever start token it is given.

        `asked` are places in the prompts, or None: the logits [V] after that token are given back by row, unless it is
        the last.
        """
        if self.opening is None:
            self.opening = np.full(len(self.mask), NO_TOKEN)
        self.opening[rows] = [prompt[-1] for prompt in prompts]
        longest = max(map(len, prompts)) - 1
        if not longest:
            return {}
        self.max_steps = max(self.max_steps, self.longest_output + longest)
        self.begun = None
        # Calls of several tokens differ between batches, so their sums do, too.
        at_once = self.session.prefills and not self.batch_invariant and self.slot_position is None
        if not (at_once and self.session.prefills_rows and len(rows) < len(self.mask)):
            return self.read(rows, prompts, asked, PREFILL_TOKENS if at_once else 1)
        found: dict[int, np.ndarray] = {}
        for i, row in enumerate(rows.tolist()):  # one by one: rows in the middle of a decode are not computed again
            found |= self.read(rows[[i]], prompts[i : i + 1], asked[i : i + 1], PREFILL_TOKENS, row)
        return found

    def read(
        self,
        rows: np.ndarray,
        prompts: Sequence[Sequence[int]],
        asked: Sequence[int | None],
        most: int,
        alone: int | None = None,
    ) -> dict[int, np.ndarray]:
        """Reads prompts in calls of at most `most` tokens; with `alone`, of that row only."""
        found = {}
        longest = max(map(len, prompts)) - 1
        counts = np.zeros(len(self.mask), dtype=np.int64)
        tokens = np.zeros((len(self.mask), longest), dtype=np.int64)
        for row, prompt in zip(rows.tolist(), prompts, strict=True):
            counts[row] = len(prompt) - 1
            tokens[row, : len(prompt) - 1] = prompt[:-1]
        for first in range(0, longest, most):
            part = tokens[:, first : first + most]
            real = np.clip(counts - first, 0, part.shape[1])
            output = self.prefill(part, real, alone) if most > 1 else self.prefill_step(part, real)
            for row, place in zip(rows.tolist(), asked, strict=False):
                if place is not None and 0 <= place - first < real[row]:
                    found[row] = np.array(output.logits[row if alone is None else 0, place - first])
        return found

    def prefill(self, tokens: np.ndarray, real: np.ndarray, alone: int | None = None) -> StepOutput:
        """Tokens [B,P], of which each row's first `real` [B] count: the slots of the others are written again later."""
        count = tokens.shape[1]
        most_used = self.most_used if alone is None else int(self.used[alone])
        if self.growing:
            self.grow(count)
        elif most_used + count > self.capacity:
            self.compact(rounded(self.live_slots() + count + self.slack(len(self.mask), self.live_slots())))
        rows = slice(None) if alone is None else slice(alone, alone + 1)
        used, places, slots = self.used[rows], np.arange(count), np.arange(self.capacity)
        written = (slots >= used[:, None, None]) & (slots <= (used[:, None] + places)[..., None])  # [B, P, L]
        positions = np.minimum(self.position[rows, None] + places, self.session.config.max_target - 1)
        mask = written | self.mask[rows, :1]
        output = self.session.prefill(self.state, tokens[rows], positions, used, mask, alone)
        last = np.maximum(real[rows] - 1, 0)
        self.mask[rows] |= (written[np.arange(len(written)), last] & (real[rows] > 0)[:, None])[:, None]  # [B, 1, L]
        self.advance(real, real)
        return output

    def prefill_step(self, tokens: np.ndarray, real: np.ndarray) -> StepOutput:
        """One token [B,1] of each row that has one, by a step of all beams; only the first beam's slot is kept."""
        if self.growing:
            self.grow(self.beams)
        else:
            self.free_slots()
        mask = self.mask.copy()
        mask.put(self.next, True)
        output = self.step(np.repeat(tokens, self.beams, axis=1), mask)
        fed = np.flatnonzero(real)
        self.mask[fed, :, self.used[fed]] = True
        self.advance(real, real * self.beams)
        return output

    def advance(self, steps: np.ndarray, slots: np.ndarray) -> None:
        """Advances rows [B] by a number of steps and of slots written."""
        self.set_positions(self.position + steps, self.used + (0 if self.growing else slots))

    def __call__(self, tokens: np.ndarray, parents: np.ndarray) -> StepOutput:
        if self.plan is not None:
            return self.chosen(tokens, self.plan)
        if self.opening is not None:
            tokens = np.where(self.opening[:, None] == NO_TOKEN, tokens, self.opening[:, None])
            self.opening = None
        if self.alike:
            return self.first_step(tokens)
        self.descend(parents)
        if self.growing:
            self.compact_growing()
            self.grow(self.beams)
        else:
            self.free_slots()
        self.mask.put(self.next, True)
        if self.announces:
            self.announce(parents)
        if self.slot_position is None:  # inlined `step`: this runs for every token
            output = self.session.step(self.state, tokens, self.position, self.used, self.mask)
        else:
            output = self.step(tokens, self.mask)
        self.places += self.ahead
        self.most_used += self.beams
        return output

    def first_step(self, tokens: np.ndarray) -> StepOutput:
        """One beam of each source, as they are all alike: its slot is the ancestor of all."""
        self.alike = False
        self.free_slots()
        self.mask[self.rows[:, 0], :, self.used] = True
        output = self.step(tokens[:, :1], np.ascontiguousarray(self.mask[:, :1]))
        self.places += 1
        self.most_used += 1
        return output.of_alike(self.beams)

    def step(self, tokens: np.ndarray, mask: np.ndarray) -> StepOutput:
        if self.slot_position is None:
            return self.session.step(self.state, tokens, self.position, self.used, mask)
        written = self.used[:, None] + np.arange(tokens.shape[1])
        self.slot_position[self.rows, written] = self.position[:, None]
        return self.session.step(self.state, tokens, self.position, self.used, mask, self.slot_position)

    def grow(self, slots: int) -> None:
        """Adds slots at the end of a growing cache, which the next call writes."""
        self.mask = np.pad(self.mask, ((0, 0), (0, 0), (0, slots)))
        if self.slot_position is not None:
            self.slot_position = np.pad(self.slot_position, ((0, 0), (0, slots)))
        self.set_positions(self.position, np.full(len(self.mask), self.capacity))
        self.capacity += slots

    def announce(self, parents: np.ndarray) -> None:
        """Announces to a session that keeps the mask how the next one is derived from it, if possible."""
        if self.begun is not None:
            self.session.descend(self.state, np.where(self.begun[:, None], -1, parents))
        self.begun = np.zeros(len(parents), dtype=bool)

    def chosen(self, tokens: np.ndarray, plan: GreedyPlan) -> StepOutput:
        """The next of the steps that the session ran ahead; runs more when all were consumed.

        Rows that left in between leave the session only then.
        """
        assert self.session.ahead is not None
        if not self.waiting:
            plan = self.settled(plan)
            left = int((plan.limit - self.position).max())
            count = min(self.session.ahead.tokens, left)
            self.waiting = self.session.choose(self.state, tokens, self.position, plan, count)
            self.position = np.minimum(self.position + count, plan.limit - 1)  # as the session counts
        output = self.waiting.pop(0)
        return output if self.staying is None else output.of(self.staying)

    def settled(self, plan: GreedyPlan) -> GreedyPlan:
        """The plan of the rows that are left, once all others have left the session."""
        if self.staying is not None:
            self.session.select(self.state, self.staying, None)
            plan = self.plan = plan.of(self.staying)
            self.position, self.staying = self.position[self.staying], None
        return plan

    def attention(self) -> np.ndarray:
        weights = cross_attention(self.session, self.state)  # [B, K, S]; K is 1 in a first step of alike beams
        return np.repeat(weights, self.beams // weights.shape[1], axis=1)

    def keep(self, rows: np.ndarray) -> None:
        if self.plan is not None:
            self.staying = rows if self.staying is None else self.staying[rows]
            return
        self.session.select(self.state, rows, None)
        self.mask = self.mask[rows]
        self.begun = None
        if self.slot_position is not None:
            self.slot_position = self.slot_position[rows]
        self.opening = None if self.opening is None else self.opening[rows]
        self.set_positions(self.position[rows], self.used[rows])

    def replace(self, rows: np.ndarray, newcomers: State, width: int, plan: GreedyPlan | None = None) -> None:
        """From the next call on these rows [N] are the newcomers' sources, at their first step, by this plan.

        In a growing cache they begin after all slots, and the mask hides those before from them.
        """
        assert not self.waiting, "rows change only between two runs ahead of the session"
        if self.plan is not None and plan is not None:
            self.plan = self.settled(self.plan).put(rows, plan)
        self.session.replace(self.state, rows, newcomers, width)
        self.restart(rows)
        if not self.growing and not self.batch_invariant and self.fixed_slots is None and self.plan is None:
            live = self.live_slots()
            if self.capacity > 2 * (
                live + self.slack(len(self.mask), live)
            ):  # the sources that needed these slots are gone
                self.compact(self.fitting_capacity(live))

    def restart(self, rows: np.ndarray) -> None:
        """The next call is the first step of these rows."""
        if self.plan is not None:
            self.position[rows] = 0
        elif len(rows):
            self.mask[rows] = False
            if self.begun is not None:
                self.begun[rows] = True
            self.used[rows] = self.position[rows] = 0
            self.set_positions(self.position, self.used)

    def set_positions(self, position: np.ndarray, used: np.ndarray) -> None:
        """Sets how many steps each source [B] has done and how many slots it has written, for the current mask.

        All counters that a step advances are one array, so that advancing is one addition: a call of numpy takes longer
        than the addition itself.
        """
        batch, beams, slots = self.mask.shape
        self.rows = np.arange(batch)[:, None]  # as an index
        own = np.arange(beams)[:, None]
        following = (self.rows.T * beams + own) * slots + own + used  # [K, B] in the mask as one row
        self.places = np.concatenate((position[None], used[None], following))  # [2 + K, B]
        self.position, self.used, self.next = self.places[0], self.places[1], self.places[2:]
        self.ahead = np.repeat([1] + [beams] * (1 + beams), batch).reshape(self.places.shape)
        self.most_used = int(used.max(initial=0))

    def descend(self, parents: np.ndarray) -> None:
        """Beam k continues beam parents[b,k]: it inherits that beam's ancestors, none before the first step."""
        if self.beams == 1:  # it continues itself
            return
        self.mask = self.mask[self.rows, parents]

    def slack(self, batch: int, live: int) -> int:
        """Free slots beside the live ones of these many sources."""
        calls = 0 if self.batch_invariant else compaction_calls(self.session.config, batch)
        return slack(self.beams, live, calls)

    def free_slots(self) -> None:
        """Ensures K free slots for every source: dead slots are dropped first, then the cache grows."""
        if self.batch_invariant:
            self.free_slots_deterministic()
        if self.most_used + self.beams <= self.capacity:
            return
        live = self.live_slots()
        if self.fixed_slots is None:
            self.compact(self.fitting_capacity(live))
        elif live + self.beams <= self.capacity:
            self.compact(self.capacity)
        else:
            raise RequestError(
                f"{live} cache slots are live and {self.beams} more are needed, but the engine has "
                f"{self.capacity}; rebuild it with: seq2engine build BUNDLE --slots {self.beams * self.max_steps}"
            )

    def free_slots_deterministic(self) -> None:
        """The same, but the slots of a source do not depend on its batch: another order of slots changes sums bitwise.

        So a source is compacted every COMPACTION_STEPS of its own steps, not when slots run out.
        """
        due = (self.position > 0) & (self.position % COMPACTION_STEPS == 0)
        if due.any():
            self.compact(self.capacity, due)
        used = self.most_used
        if used + self.beams > self.capacity:
            self.compact(rounded(used + slack(self.beams, used)), np.zeros_like(due))

    def fitting_capacity(self, live: int) -> int:
        """The next capacity. The current one is kept if it suffices, so that only slots that move are copied."""
        wanted = self.slack(len(self.mask), live)
        if live + wanted // 2 <= self.capacity <= 2 * (live + wanted):
            return self.capacity
        most = np.any(self.mask, axis=1).sum(axis=1) + self.beams * (self.max_steps - self.position)  # [B]
        return rounded(min(live + wanted, int(most.max())))

    def compact_growing(self) -> None:
        """A growing cache is copied in every step, so a compaction pays as soon as enough slots are dead."""
        live = self.live_slots()
        if self.capacity > live + slack(self.beams, live):
            self.compact(live)

    def live_slots(self) -> int:
        return int(self.mask.any(axis=1).sum(axis=1).max(initial=0))

    def compact(self, capacity: int, due: np.ndarray | None = None) -> None:
        """Gathers every source's live slots to the front of a cache of that many slots.

        Sources that are not due [B] keep their dead slots.
        """
        live: np.ndarray = np.any(self.mask, axis=1)  # [B, L]
        if due is not None:
            live |= ~due[:, None] & (np.arange(self.capacity) < self.used[:, None])
        used = live.sum(axis=1)
        front = np.argsort(~live, axis=1, kind="stable")  # live slots first, in their order
        width = min(capacity, front.shape[1])
        slots = np.tile(np.arange(capacity), (len(live), 1))
        slots[:, width:] = 0  # new and unused slots repeat some slot: finite numbers, which the mask hides
        valid = np.arange(capacity) < used[:, None]
        slots[:, :width] = np.where(valid[:, :width], front[:, :width], slots[:, :width])
        self.mask = np.take_along_axis(self.mask, slots[:, None, :], axis=2) & valid[:, None, :]
        if self.slot_position is not None:
            self.slot_position = np.take_along_axis(self.slot_position, slots, axis=1)
        self.set_positions(self.position, used)
        self.session.select(self.state, None, slots)
        self.begun = None
        self.capacity = capacity


def compaction_calls(config: ModelConfig, batch: int) -> int:
    """What the calls of a compaction take, as readings of a slot of these many sources."""
    return COMPACTION_CALLS // (batch * max(config.decoder_layers * config.d_model, LEAST_NUMBERS))


def slack(beams: int, live: int, calls: int = 0) -> int:
    """Free slots beside the live ones, until the next compaction; `calls`: readings of a slot that its calls take,
    times 2 K.

    With s of them attention reads s/2 slots too many in every step, and a compaction comes every s/K steps. It copies
    about half of the live slots on average (those that stay in place cost nothing), and copying a slot takes as long as
    reading about three. So the sum is least for s = sqrt(3 K live + calls): 56 beside 256 live slots of four beams, if
    the calls take no time.
    """
    return rounded(max(16, 8 * beams, math.isqrt(3 * beams * live + calls)))


def first_slots(config: ModelConfig, batch: int, beams: int, most: int) -> int:
    """Slots that the cache of a decode begins with which moves or copies them only where it is full.

    More of them than `slack` cost memory for sources that end early, and save copies of the others.
    """
    least = slack(beams, 0, compaction_calls(config, batch))
    slot = 2 * batch * config.decoder_layers * config.heads * config.head_dim * np.dtype(np.float32).itemsize
    return min(rounded(max(least, min(ROOMY * least, FIRST_BYTES // slot))), rounded(most))


def rounded(slots: int) -> int:
    return -(-slots // ROUND) * ROUND

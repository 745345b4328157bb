"""Speculative decoding: a cheaper step drafts the next tokens of a single source, and one step verifies them all.

A step with one row reads every weight to make one token; with five rows it reads them once as well. So the draft
session decodes some tokens ahead, say four, and the target session's step takes the latest token together with the
drafted ones, each at its own position:

    slots      ... | w    w+1  w+2  w+3  w+4      written by the draft, then again by the target
    latest         | t    .    .    .    .        the output that is returned now
    draft 1        | t    a    .    .    .        returned without any work if the search then chooses a, and so on
    draft 2        | t    a    b    .    .

Outputs are always the target's own, for the tokens that were really chosen. A wrong draft costs time, and its slots are
overwritten. Nothing is drafted behind an end token, unless the search has gone on behind one. Steps of several beams or
several sources are not drafted: they have rows enough to use what they read, and the target runs many in one call.

The draft is a cheaper precision of the bundle, or the target's own weights in fewer bits (ort_forms/draft_step.py).
Its output table is narrowed when enough states of drafts are known (ort_forms/narrow_table.py): later drafts, of later
sessions as well, take less time.
How many tokens are drafted follows from measured times (drafting.py). With `drafting`, drafts are made only as long as
they are worth their time, and the draft session is opened when single sources have taken about as long as opening it
takes: not for one sentence.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from seq2engine.errors import SessionError
from seq2engine.export.artifact.bundle import Bundle

from ..backends import QUANTISED
from ..search.ahead.beam_plan import BeamPlan, BeamRows, BeamsAhead
from ..search.ahead.greedy_plan import ChosenTokens, GreedyPlan
from ..search.option_fields import LEAST_CANDIDATES
from ..search.step_output import Candidates, Logits, Reduced, StepOutput
from ..session import EVERYTHING, Session, StepForm
from ..threads import row_work
from .binding import OrtState
from .drafting import Drafting, DraftLength
from .graphs import model_from_bundle
from .session import OrtSession, OrtSettings

WORTH_IT = 8_000_000  # numbers of a step's weights: 32 MB in fp32 are more than most processors' caches hold
OPENING = 1.0  # seconds of plain steps after which a draft is opened: about what opening it takes
STATES_PER_COLUMN = 2  # states of drafts, for each of their numbers, by which the table is narrowed
PATIENCE = 3  # excess of wrong over right drafts after which a decode continues without


@dataclass
class Verified:
    """Verified outputs of drafted tokens that the search has not asked for yet, and the draft statistics."""

    length: DraftLength  # of the session
    outputs: list[tuple[int, np.ndarray, StepOutput]] = field(default_factory=list)  # token, its mask, its output
    right: int = 0
    wrong: int = 0
    past_end: bool = False  # the search goes on behind end tokens
    seconds: float = 0.0  # of the latest drafts and their step
    tokens: int = 0  # tokens accepted so far

    def output_of(self, token: int, mask: np.ndarray) -> StepOutput | None:
        """The verified output, if the next token is the drafted one at the same place."""
        if not self.outputs:
            return None
        drafted, drafted_mask, output = self.outputs.pop(0)
        right = drafted == token and np.array_equal(drafted_mask, mask)
        self.length.note_draft(right)
        if not right:
            self.wrong += 1
            self.outputs.clear()
            return None
        self.right += 1
        self.tokens += 1
        return output

    @property
    def worth_it(self) -> bool:
        return self.wrong <= self.right + PATIENCE


@dataclass
class SpeculativeState:
    """The target's state, and a second binding of the same arrays for the draft's step, made when needed."""

    target: OrtState
    verified: Verified
    draft: OrtState | None = None


class SpeculativeSession(Session):
    """Two ONNX Runtime sessions as one: all outputs are `target`'s; `draft` only reduces its number of steps.

    Both must have the same cache type; the target takes a position for every token of a step.
    """

    def __init__(self, target: OrtSession, open_draft: Callable[[], OrtSession], drafting: Drafting | None = None):
        assert target.settings.beam_positions
        self.target, self.open_draft, self.drafting = target, open_draft, drafting
        self.length = DraftLength()
        self.states: list[np.ndarray] | None = []  # of drafts, until the draft's table is narrowed by them
        self.undrafted = 0.0  # seconds of steps that could have been drafted
        self.workers = target.workers
        self.backend, self.precision, self.cache_form = target.backend, target.precision, target.cache_form
        self.config, self.limits, self.prefills = target.config, target.limits, target.prefills
        self.prefills_rows, self.fewer_beams = target.prefills_rows, target.fewer_beams
        if target.ahead is not None:  # what is not drafted
            self.ahead = dataclasses.replace(target.ahead, least_rows=2)

    @classmethod
    def from_bundle(
        cls,
        bundle: Bundle,
        precision: str,
        draft: str,
        threads: int | None = None,
        drafting: Drafting | None = None,
    ) -> SpeculativeSession:
        """`draft` is QUANTISED, or a precision of the bundle with the same cache.

        Without `drafting` drafts are always made, as long as they are right.
        """
        model = model_from_bundle(bundle, precision)
        check_draft(bundle, precision, draft)
        # They alternate, so the threads of each must sleep while the other runs.
        resting = ("encoder", "decoder_step")
        target = OrtSession(model, OrtSettings(threads, beam_positions=True, resting=resting))

        def open_draft() -> OrtSession:
            own = draft == QUANTISED
            settings = OrtSettings(threads, resting=resting, drafts=own)
            return OrtSession(model if own else model_from_bundle(bundle, draft), settings, target.encoder)

        return cls(target, open_draft, drafting)

    @cached_property
    def draft(self) -> OrtSession:
        return self.open_draft()

    def encode(self, source: np.ndarray, source_mask: np.ndarray) -> SpeculativeState:
        return SpeculativeState(self.target.encode(source, source_mask), Verified(self.length))

    def reserve(self, state: SpeculativeState, slots: int, form: StepForm = EVERYTHING) -> None:
        self.target.reserve(state.target, slots, form)
        state.verified, state.draft = Verified(self.length), None

    def select(self, state: SpeculativeState, rows: np.ndarray | None, slots: np.ndarray | None) -> None:
        self.target.select(state.target, rows, slots)
        state.verified.outputs.clear()
        state.draft = None

    def replace(self, state: SpeculativeState, rows: np.ndarray, newcomers: SpeculativeState, width: int) -> None:
        self.target.replace(state.target, rows, newcomers.target, width)
        state.verified, state.draft = Verified(self.length), None

    def prefill(
        self,
        state: SpeculativeState,
        tokens: np.ndarray,
        position: np.ndarray,
        write_index: np.ndarray,
        self_mask: np.ndarray,
        row: int | None = None,
    ) -> StepOutput:
        state.verified.outputs.clear()
        return self.target.prefill(state.target, tokens, position, write_index, self_mask, row)

    def step(
        self,
        state: SpeculativeState,
        tokens: np.ndarray,
        position: np.ndarray,
        write_index: np.ndarray,
        self_mask: np.ndarray,
        slot_position: np.ndarray | None = None,
    ) -> StepOutput:
        if tokens.size > 1:
            return self.target.step(state.target, tokens, position[:, None], write_index, self_mask, slot_position)
        verified, drafting = state.verified, self.drafting
        verified.past_end |= tokens.item() == self.config.end_id and position.item() > 0
        known = verified.output_of(tokens.item(), self_mask[0, 0])
        if known is not None:
            return known
        if drafting is not None and verified.seconds:
            drafting.note(True, verified.seconds, verified.tokens)
            verified.seconds = 0.0
        room = min(self_mask.shape[-1] - write_index.item(), self.config.max_target - position.item())
        count = min(self.length.most, room)
        if count > 1 and verified.worth_it and (drafting is None or (self.worth_opening and drafting.next())):
            return self.drafted_step(state, tokens, position, write_index, self_mask, slot_position, count)
        started = time.perf_counter()
        output = self.target.step(state.target, tokens, position[:, None], write_index, self_mask, slot_position)
        if drafting is not None:
            seconds = time.perf_counter() - started
            self.undrafted += seconds
            drafting.note(False, seconds, 1)
        return output

    def choose_alone(
        self, state: SpeculativeState, tokens: np.ndarray, position: np.ndarray, plan: GreedyPlan, count: int
    ) -> ChosenTokens:
        return self.target.choose_alone(state.target, tokens, position, plan, count)

    def choose_beams(
        self, state: SpeculativeState, rows: BeamRows, mask: np.ndarray, plan: BeamPlan, room: int, count: int
    ) -> BeamsAhead:
        return self.target.choose_beams(state.target, rows, mask, plan, room, count)

    @property
    def worth_opening(self) -> bool:
        """Whether the draft session is open, or single sources have come long enough for it."""
        return "draft" in self.__dict__ or self.undrafted >= OPENING

    def drafted_step(
        self,
        state: SpeculativeState,
        tokens: np.ndarray,
        position: np.ndarray,
        write_index: np.ndarray,
        self_mask: np.ndarray,
        slot_position: np.ndarray | None,
        count: int,
    ) -> StepOutput:
        """Drafts, and one step of the target that verifies them; the output of the first token."""
        if state.draft is None:
            state.draft = self.draft_state(state.target)
        verified, started = state.verified, time.perf_counter()
        positions = position[:, None] + np.arange(count)
        if slot_position is not None:  # each draft is in the slot after the previous one
            slot_position = slot_position.copy()
            slot_position[0, write_index.item() :][:count] = positions[0]
        drafted, masks = self.drafted(state, tokens, position, write_index, self_mask, slot_position, count)
        count, then = drafted.shape[1], time.perf_counter()
        output = self.target.step(state.target, drafted, positions[:, :count], write_index, masks, slot_position)
        first, *others = (output_of_beam(output, beam) for beam in range(count))
        verified.outputs = list(zip(drafted[0, 1:].tolist(), masks[0, 1:], others, strict=True))
        ended = time.perf_counter()
        verified.seconds, verified.tokens = ended - started, 1
        self.length.note_step(count, then - started, ended - then)
        self.narrow_table(state)
        return first

    def narrow_table(self, state: SpeculativeState) -> None:
        """Narrows the draft's table once enough states are known; the draft's state is then that of another graph."""
        if self.states and len(self.states) >= STATES_PER_COLUMN * len(self.states[0]):
            assert self.draft.decoders is not None
            self.draft.decoders.narrow_table(np.stack(self.states))
            self.states, state.draft = None, None

    def drafted(
        self,
        state: SpeculativeState,
        tokens: np.ndarray,
        position: np.ndarray,
        write_index: np.ndarray,
        self_mask: np.ndarray,
        slot_position: np.ndarray | None,
        count: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """A token and its drafted followers [1,count], or fewer if one is an end token, and their masks [1,count,L]."""
        assert state.draft is not None
        drafted = np.repeat(tokens, count, axis=1)
        masks = np.repeat(self_mask, count, axis=1)
        for ahead in range(1, count):
            masks[:, ahead:, write_index.item() + ahead] = True
        for ahead in range(count - 1):
            now = slice(ahead, ahead + 1)
            places = position + ahead, write_index + ahead
            output = self.draft.step(state.draft, drafted[:, now], *places, masks[:, now], slot_position)
            drafted[0, ahead + 1] = output.candidates.tokens[0, 0, 0]
            self.note_state(state.draft)
            if drafted[0, ahead + 1] == self.config.end_id and not state.verified.past_end:
                break
        return drafted[:, : ahead + 2], masks[:, : ahead + 2]

    def note_state(self, state: OrtState) -> None:
        if self.states is not None and state.bound is not None and state.bound.states is not None:
            self.states.append(state.bound.states[0, 0].copy())

    def draft_state(self, target: OrtState) -> OrtState:
        """Shares the memory: the draft reads the same cache, and the target overwrites what the draft writes."""
        shared = OrtState(target)
        self.draft.take(shared, StepForm(target.form.shortlist, candidates=1))  # only its best token is read
        return shared

    def tensor(self, state: SpeculativeState, name: str) -> np.ndarray:
        return self.target.tensor(state.target, name)

    def close(self) -> None:
        if self.drafting is not None:
            self.drafting.keep()
        self.workers = None
        self.target.close()
        if "draft" in self.__dict__:
            self.draft.close()

    def __exit__(self, *exc: object) -> None:
        self.close()


def drafts_for(bundle: Bundle, precision: str) -> str | None:
    """What drafts for a precision of a bundle by default; None: nothing does."""
    fits = precision == "fp32" and bundle.cache_form == "static" and not bundle.config.takes_audio
    return QUANTISED if fits and row_work(bundle.config) >= WORTH_IT else None


def check_draft(bundle: Bundle, precision: str, draft: str) -> None:
    if bundle.cache_form != "static":
        raise SessionError(
            f"speculative decoding with a {bundle.cache_form} cache, expected a static one; export with: "
            "seq2engine export CHECKPOINT BUNDLE --cache-form static"
        )
    if draft == QUANTISED:
        if precision != "fp32":
            raise SessionError(
                f"weights of {precision} in fewer bits cannot draft, expected those of fp32; leave --draft out"
            )
        return
    own, theirs = (bundle.specs(name)["decoder_step"].inputs for name in (precision, draft))
    if own != theirs or draft == precision:
        raise SessionError(
            f"{draft} cannot draft for {precision}, expected another precision with the same cache, as w8a8 for fp32; "
            "export with: seq2engine export CHECKPOINT BUNDLE --precision fp32 w8a8"
        )


def output_of_beam(output: StepOutput, beam: int) -> StepOutput:
    """The output of one beam of a step, as if there were no others."""
    only = slice(beam, beam + 1)
    assert output.reduced is not None
    best = output.reduced.candidates
    stored = isinstance(output.raw, np.ndarray)
    # A step with logits has a candidate more for every beam; one without has as many as the search asked for.
    count = LEAST_CANDIDATES if stored and output.raw.shape[-1] else best.tokens.shape[-1]
    found = Candidates(best.tokens[:, only, :count], best.logits[:, only, :count])
    reduced = Reduced(found, output.reduced.exp_sum[:, only])
    raw = output.raw[:, only] if stored else LogitsOfBeam(output.raw, beam)
    return StepOutput(raw, reduced, output.shortlist)


class LogitsOfBeam:
    """The logits [B,1,W] of one beam of a step that may have to be computed again for them: only once they are asked
    for."""

    def __init__(self, logits: Logits, beam: int):
        batch, _, width = logits.shape
        self.logits, self.beam, self.shape = logits, beam, (batch, 1, width)

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.logits[:, self.beam : self.beam + 1][index]

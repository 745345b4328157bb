"""Single sources decoded with drafts: a cheaper precision guesses the next tokens, one step checks them all.

One row reads every weight to make one token, and five rows read them once as well. So the drafts' precision says what
it would say next, four times, and the step of this session takes the token it was asked about together with the four
that were guessed, each at its own position:

    slots      ... | w    w+1  w+2  w+3  w+4      written by the drafts, then once more by the step
    asked          | t    .    .    .    .        the answer that is given now
    guess 1        | t    a    .    .    .        given without any work if the search then chooses a, and so on
    guess 2        | t    a    b    .    .

Nobody outside can tell: an answer is always this session's own to the tokens that were really chosen. A wrong guess
costs time, and is overwritten. Searches with several beams, and several sources, are not drafted: there a step has rows
enough to earn its reading.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from seq2engine.errors import SessionError
from seq2engine.export.artifact.bundle import Bundle

from ..search.option_fields import LEAST_CANDIDATES
from ..search.step_output import Answer, Candidates, Reduced
from ..session import State
from .session import OrtSession, check_precision

AHEAD = 5  # most tokens of one step: of 3 to 8 the fastest where few guesses are wrong (docs/LOG.md)
PATIENCE = 3  # steps with a wrong guess more than right guesses, after which a decode goes on without


@dataclass
class Drafts:
    """What one state knows ahead: answers to tokens that have not been asked about, and how its guesses fared."""

    guesses: State = field(default_factory=dict)  # the state's own tensors, as the drafting session binds them
    known: list[tuple[int, np.ndarray, Answer]] = field(default_factory=list)  # token, its mask, and the answer to it
    right: int = 0
    wrong: int = 0
    ahead: int = AHEAD  # tokens of the next step; fewer after a wrong guess, as they come in flocks

    def answer_to(self, token: int, mask: np.ndarray) -> Answer | None:
        """The answer, where the next token is the one that was guessed, in the place it was guessed for."""
        if not self.known:
            return None
        guess, guessed_mask, answer = self.known.pop(0)
        if guess != token or not np.array_equal(guessed_mask, mask):
            self.wrong += 1
            self.ahead = max(2, self.ahead - 1 - len(self.known))
            self.known.clear()
            return None
        self.right += 1
        if not self.known:  # all of them
            self.ahead = min(AHEAD, self.ahead + 2)
        return answer

    @property
    def worth_it(self) -> bool:
        return self.wrong <= self.right + PATIENCE


class RestingSession(OrtSession):
    resting = ("decoder_step",)


class DraftedSession(OrtSession):
    """An ONNX Runtime session whose decoder step is asked less often than the search asks it."""

    resting = ("encoder", "decoder_step")  # it takes turns with the drafts' session
    speculative = True
    drafting: OrtSession

    @classmethod
    def with_drafts(cls, bundle: Bundle, precision: str, draft: str, threads: int | None = None) -> DraftedSession:
        """`draft` is a precision of the bundle that keeps its cache in the same type; the better, the fewer slips."""
        check_precision(precision)
        check_drafts(bundle, precision, draft)
        session = cls.from_bundle(bundle, precision, threads)
        assert isinstance(session, DraftedSession)
        rest = (bundle.config, draft, bundle.cache_form, threads)
        step = {"decoder_step": bundle.graph_path(draft, "decoder_step")}
        session.drafting = RestingSession(step, bundle.specs(draft), *rest)
        return session

    def reserve(self, state: State, slots: int) -> None:
        state["drafts"] = Drafts()
        super().reserve(state, slots)

    def select(self, state: State, rows: np.ndarray | None, slots: np.ndarray | None) -> None:
        before = state.pop("drafts", None)  # none in a state that was only encoded
        super().select(state, rows, slots)
        if before is not None:
            state["drafts"] = Drafts(right=before.right, wrong=before.wrong, ahead=before.ahead)

    def replace(self, state: State, rows: np.ndarray, newcomers: State, width: int) -> None:
        state["drafts"] = Drafts()
        super().replace(state, rows, newcomers, width)

    def step(
        self, state: State, tokens: np.ndarray, position: np.ndarray, write_index: np.ndarray, self_mask: np.ndarray
    ) -> Answer:
        if tokens.size > 1:
            return super().step(state, tokens, position[:, None], write_index, self_mask)
        drafts: Drafts = state["drafts"]
        known = drafts.answer_to(tokens.item(), self_mask[0, 0])
        if known is not None:
            return known
        room = min(drafts.ahead, self_mask.shape[-1] - write_index.item(), self.config.max_target - position.item())
        if room == 1 or not drafts.worth_it:
            return super().step(state, tokens, position[:, None], write_index, self_mask)
        said, masks = self.guessed(state, tokens, position, write_index, self_mask, room)
        places = position[:, None] + np.arange(room)
        answer = super().step(state, said, places, write_index, masks)
        first, *others = (answer_of_beam(answer, beam) for beam in range(room))
        drafts.known = list(zip(said[0, 1:].tolist(), masks[0, 1:], others, strict=True))
        return first

    def guessed(
        self,
        state: State,
        tokens: np.ndarray,
        position: np.ndarray,
        write_index: np.ndarray,
        self_mask: np.ndarray,
        count: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """A token and its likely followers [1,count], each with the slots it comes after [1,count,L]."""
        guesses = state["drafts"].guesses
        if not guesses:  # the same memory: a draft sees the cache as it is, and what it writes is written again
            names = [tensor.name for tensor in self.specs["decoder_step"].inputs]
            guesses.update({name: state[name] for name in names if name in state})
        said = np.repeat(tokens, count, axis=1)
        masks = np.repeat(self_mask, count, axis=1)
        for ahead in range(1, count):
            masks[:, ahead:, write_index.item() + ahead] = True
        for ahead in range(count - 1):
            now = slice(ahead, ahead + 1)
            answer = self.drafting.step(guesses, said[:, now], position + ahead, write_index + ahead, masks[:, now])
            said[0, ahead + 1] = answer.candidates.tokens[0, 0, 0]
        return said, masks

    def close(self) -> None:
        super().close()
        self.drafting.close()


def check_drafts(bundle: Bundle, precision: str, draft: str) -> None:
    if bundle.cache_form != "static":
        raise SessionError(
            f"drafts with a {bundle.cache_form} cache, expected a static one; export with: "
            "seq2engine export CHECKPOINT BUNDLE --cache static"
        )
    own, theirs = (bundle.specs(name)["decoder_step"].inputs for name in (precision, draft))
    if own != theirs or draft == precision:
        raise SessionError(
            f"{draft} cannot draft for {precision}, expected another precision with the same cache, as w8a8 for fp32; "
            "export with: seq2engine export CHECKPOINT BUNDLE --precision fp32 w8a8"
        )


def answer_of_beam(answer: Answer, beam: int) -> Answer:
    """What an answer says of one of its beams, as if there were no others."""
    only = slice(beam, beam + 1)
    assert answer.reduced is not None
    best = answer.reduced.candidates
    count = LEAST_CANDIDATES if answer.raw.shape[-1] else best.tokens.shape[-1]
    found = Candidates(best.tokens[:, only, :count], best.logits[:, only, :count])
    reduced = Reduced(found, answer.reduced.exp_sum[:, only])
    return Answer(answer.raw[:, only], reduced, answer.shortlist)

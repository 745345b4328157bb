"""A session: a model opened on one backend, with the same interface for all backends.

Arrays at the edge are numpy. What a session keeps between calls (cross-attention keys and values, the KV cache) is in a
`State`, which only the session that made it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from seq2engine.errors import SessionError
from seq2engine.export.contract import attention_name
from seq2engine.model.config import ModelConfig

from .defaults import Defaults
from .search.ahead.beam_plan import BeamPlan, BeamRows, BeamsAhead
from .search.ahead.greedy_plan import ChosenTokens, GreedyPlan
from .search.step_output import Shortlist, StepOutput
from .threads import Workers

State = Any  # of one batch: named tensors of the backend's own kind, and what belongs to them


@dataclass(frozen=True)
class StepForm:
    """What a decode reads from the output of its steps, so that a session can compute less.

    With `candidates`, the normaliser of an output is finite exactly if the logits are, but it is not the one
    that gives probabilities.
    """

    shortlist: Shortlist | None = None  # the only tokens that have logits; None: the whole vocabulary
    candidates: int = 0  # only this many best tokens of every beam are read, and no score; 0: more than that
    best: int = 0  # only this many best tokens of every beam and their scores are read, in most steps; 0: all logits


EVERYTHING = StepForm()


@dataclass(frozen=True)
class Limits:
    """The largest request a session takes. `slots` is the cache length where it is fixed (engines), else None."""

    batch: int | None
    beam: int | None
    source: int
    target: int
    slots: int | None = None
    attention: bool = False  # whether its states have the cross-attention weights of the latest step
    least_beams: int = 1  # a decode with fewer beams is padded, and the spare beams need cache slots too
    # For engines: the build command for larger values, by the names of these fields.
    larger: Callable[[Mapping[str, int]], str] | None = field(default=None, compare=False, repr=False)

    def slots_for(self, beams: int) -> int | None:
        """Cache length of a decode with this many beams where that is fixed (engines), else None."""
        return None if self.slots is None else self.slots - max(0, self.least_beams - beams)


@dataclass(frozen=True)
class RunAhead:
    """How a session chooses tokens by itself, greedily: tokens between two waits of the host, and candidates per step.

    A plan (search/ahead/greedy_plan.py) carries the rules; `length` is the most tokens it covers. `undisturbed`: only
    for a decode that nobody follows token by token, and to which no source is added: sources that are done are left out
    of its steps, and its cache may grow. Steps of beam search may be run ahead then, too. `least_rows`: sources times
    beams, with fewer of which a decode's steps are made one by one.
    """

    tokens: int
    candidates: int
    length: int
    undisturbed: bool = False
    least_rows: int = 1


class Session(AbstractContextManager["Session"], Protocol):
    """What a backend must do. A session owns its graphs; a State belongs to the caller and ends with the session."""

    backend: str
    precision: str
    cache_form: str
    config: ModelConfig
    limits: Limits
    deterministic: bool = False  # bitwise batch-invariant: no bit of an output depends on other sources
    defaults: Defaults = Defaults()  # the model's own decoding options, from its bundle if it was opened from one
    chosen: str = ""  # the precision that `auto` chose, and why
    prefills: bool = False  # whether it has `prefill`; else a prompt is fed by steps
    prefills_rows: bool = False  # whether `prefill` can read one source alone while others are decoded
    workers: Workers[Session] | None = None  # for parallel decodes of one batch, where they pay (parallel.py)
    ahead: RunAhead | None = None  # where its steps can choose tokens by themselves
    fewer_beams: bool = False  # its steps may have fewer beams than the decode (TreeStep)
    keeps_mask: bool = False  # the mask stays on its device between steps, so `descend` is called

    def encode(self, source: np.ndarray, source_mask: np.ndarray) -> State:
        """ids int64 [B,S] or features float32 [B,mels,2S] of a model that takes audio, and mask bool [B,S] -> a state
        with `source_mask`, `cross_k/v.i` and `encoder_states`."""

    def reserve(self, state: State, slots: int, form: StepForm = EVERYTHING) -> None:
        """Allocates a cache of that many slots in the state, of any finite numbers, which masks hide; its steps then
        have this form."""

    def step(
        self,
        state: State,
        tokens: np.ndarray,
        position: np.ndarray,
        write_index: np.ndarray,
        self_mask: np.ndarray,
        slot_position: np.ndarray | None = None,
    ) -> StepOutput:
        """One `decoder_step`: tokens [B,K], position [B], write_index [B], self_mask [B,K,M] -> its output in fp32.

        A model with relative positions also needs slot_position [B,M], the position of the token in every slot.
        The state's cache then holds the K new slots. The output is valid until the next call.
        """

    def descend(self, state: State, parents: np.ndarray) -> None:
        """Announces how the mask of the next step follows from that of the latest one, so that it need not be sent.

        Row k of source b becomes row parents[b,k] of the latest mask (-1: an empty row), and slot write_index[b] + k is
        added to it. Called right before a step, only where `keeps_mask`, and never after `reserve` or `select`: then
        the step sends a new mask. The step gets the whole mask in either case.
        """
        return None

    def prefill(
        self,
        state: State,
        tokens: np.ndarray,
        position: np.ndarray,
        write_index: np.ndarray,
        self_mask: np.ndarray,
        row: int | None = None,
    ) -> StepOutput:
        """Several tokens of each source in one call: tokens and their positions [B,P], write_index [B], self_mask
        [B,P,M]. The state's cache then holds P new slots; the output has the logits of each token [B,P,V]. Only where
        `prefills`.

        With `row`, only where `prefills_rows`, they are tokens of that source alone: B is 1, and nothing of the others
        is read or written."""
        raise SessionError(f"a session of {self.backend} reads a prompt step by step")

    def choose(
        self, state: State, tokens: np.ndarray, position: np.ndarray, plan: GreedyPlan, count: int
    ) -> list[StepOutput]:
        """Only where `ahead`: some steps of one beam, each fed with the token that the one before it chose.

        tokens [B,1] and position [B] are those of the first of them; what a source has cached is at slots 0 to its
        position. The outputs have one candidate: the token that was chosen. A source that is done, or at the limit of
        the plan, stays there; its outputs are meaningless.
        """
        raise SessionError(f"{self.backend} chooses no tokens by itself")

    def choose_alone(
        self, state: State, tokens: np.ndarray, position: np.ndarray, plan: GreedyPlan, count: int
    ) -> ChosenTokens:
        """The same where `ahead` is `undisturbed`, of at least one and at most `count` steps: it ends when all sources
        are done, or a logit is not finite."""
        raise SessionError(f"{self.backend} chooses no tokens by itself")

    def choose_beams(
        self, state: State, rows: BeamRows, mask: np.ndarray, plan: BeamPlan, room: int, count: int
    ) -> BeamsAhead:
        """Only where `ahead` is `undisturbed`: at most `count` steps of beam search. `mask` [B,K,L] marks the slots
        that each beam sees. It ends when all sources are done, when a logit is not finite, and when the cache is full:
        where dropping dead slots does not leave `room` slots for new ones. So a full cache takes no step at all."""
        raise SessionError(f"{self.backend} runs no steps of beam search by itself")

    def select(self, state: State, rows: np.ndarray | None, slots: np.ndarray | None) -> None:
        """Keeps these sources [B'] (None: all) and of their caches these slots [B',L'] (None: as they are).

        To grow a batch, all sources are kept and some repeated after them, as rows for others (`replace`).
        """

    def replace(self, state: State, rows: np.ndarray, newcomers: State, width: int) -> None:
        """Gives these rows [N] to the sources of another state, which stays as it is, and makes all S `width` long.

        The KV cache of that state is not copied. `width` fits every source that is still decoded. The caches of these
        rows keep the old values: finite numbers, which the mask hides.
        """

    def tensor(self, state: State, name: str) -> np.ndarray:
        """A copy of one tensor of the state."""

    def close(self) -> None: ...


def cross_attention(session: Session, state: State) -> np.ndarray:
    """Cross-attention weights of the latest step: the last layer's, mean of its heads, fp64 [B,K,S]."""
    if not session.limits.attention:
        raise SessionError("this session keeps no cross-attention weights; open it with attention=True")
    weights = session.tensor(state, attention_name(session.config.decoder_layers - 1))  # [B, H, K, S]
    return weights.astype(np.float64).mean(axis=1)

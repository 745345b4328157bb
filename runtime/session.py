"""A session: the two graphs of a model, opened on one backend. All backends look alike from here on.

Arrays at the edge are numpy; what a session keeps between calls (cross K/V, the cache) is its own kind of tensor in a
`State`, which only that session reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from seq2engine.errors import SessionError
from seq2engine.model.config import ModelConfig

from .defaults import Defaults
from .search.step_output import Answer, Shortlist

State = dict[str, Any]  # named tensors of one batch: source_mask, cross_k.0, ..., self_k.0, ...


@dataclass(frozen=True)
class Limits:
    """The largest request a session takes. `slots` is the cache length where it is fixed (engines), else None."""

    batch: int | None
    beam: int | None
    source: int
    target: int
    slots: int | None = None
    attention: bool = False  # whether it tells where it looks


class Session(AbstractContextManager["Session"], Protocol):
    """Who owns what: a session owns its graphs; a State belongs to the caller and dies with it or with the session."""

    backend: str
    precision: str
    cache_form: str
    config: ModelConfig
    limits: Limits
    deterministic: bool = False  # shapes are such that no bit of an output depends on other sources
    defaults: Defaults = Defaults()  # the model's own way of decoding; what its bundle says, if it was opened from one
    chosen: str = ""  # which precision `auto` has chosen, and why
    shortlist: Shortlist | None = None  # what its answers are about, where that is not the whole vocabulary

    def shortlisted(self, shortlist: Shortlist) -> Session:
        """This session with answers about these tokens alone, as if the model knew no others.

        It is a view, which shares states with this session and ends with it. Where the backend can, it computes no
        other logits; the latest view is kept, as making one may take as long as opening a session.
        """

    def unscored(self, wanted: int) -> Session:
        """This session with answers that have so many candidates of every beam and nothing else, if that is less work.

        Such an answer's normaliser is a number where the model's logits are, but not what makes probabilities of them.
        It is a view, which shares states with this session and ends with it.
        """
        return self

    def lanes(self, sources: int, rows: int) -> Sequence[Session]:
        """Sessions to decode so many sources with, rows of them in all, at the same time; one: this session alone."""
        return (self,)

    def encode(self, source_ids: np.ndarray, source_mask: np.ndarray) -> State:
        """ids int64 and mask bool [B,S] -> a state with `source_mask`, `cross_k/v.i` and `encoder_states`."""

    def slots_for(self, beams: int) -> int | None:
        """How long the cache of a decode with so many beams is, where that is fixed (engines), else None."""
        return self.limits.slots

    def reserve(self, state: State, slots: int) -> None:
        """Puts an empty cache of that many slots, all zero, into the state."""

    def step(
        self, state: State, tokens: np.ndarray, position: np.ndarray, write_index: np.ndarray, self_mask: np.ndarray
    ) -> Answer:
        """One `decoder_step`: tokens [B,K], position [B], write_index [B], self_mask [B,K,M] -> an answer in fp32.

        The state's cache then holds the K new slots. The answer is valid until the next call.
        """

    def select(self, state: State, rows: np.ndarray | None, slots: np.ndarray | None) -> None:
        """Keeps these sources [B'] (None: all) and of their caches these slots [B',L'] (None: as they are)."""

    def replace(self, state: State, rows: np.ndarray, newcomers: State, width: int) -> None:
        """Gives these rows [N] to the sources of another state, which was only encoded, and makes all S `width` long.

        `width` holds every source that still matters. The rows' caches keep what the sources before left there: finite
        numbers, for a mask to hide.
        """

    def tensor(self, state: State, name: str) -> np.ndarray:
        """A copy of one tensor of the state, for parity."""

    def attention(self, state: State) -> np.ndarray:
        """Where the latest step looked: the last layer's cross-attention, mean of its heads, fp64 [B,K,S]."""
        raise SessionError("this session does not keep where it looks; open it with attention=True")

    def close(self) -> None: ...

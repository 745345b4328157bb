"""A session: a model opened on one backend. All backends look alike from here on.

Arrays at the edge are numpy. What a session keeps between calls (cross-attention keys and values, the KV cache) is in a
`State`, which only the session that made it reads.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from seq2engine.errors import SessionError
from seq2engine.export.contract import attention_name
from seq2engine.model.config import ModelConfig

from .defaults import Defaults
from .search.step_output import Shortlist, StepOutput
from .threads import Workers

State = Any  # of one batch: named tensors of the backend's own kind, and what belongs to them


@dataclass(frozen=True)
class StepForm:
    """What a decode reads of its steps' output. A session may compute less where less is read.

    With `candidates`, the normaliser of an output is a number where the model's logits are numbers, but not the one
    that makes probabilities of them.
    """

    shortlist: Shortlist | None = None  # the only tokens that have logits; None: the whole vocabulary
    candidates: int = 0  # only this many best tokens of every beam are read; 0: everything


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

    def slots_for(self, beams: int) -> int | None:
        """Cache length of a decode with so many beams where that is fixed (engines), else None."""
        return None if self.slots is None else self.slots - max(0, self.least_beams - beams)


class Session(AbstractContextManager["Session"], Protocol):
    """What a backend must do. A session owns its graphs; a State belongs to the caller and ends with the session."""

    backend: str
    precision: str
    cache_form: str
    config: ModelConfig
    limits: Limits
    deterministic: bool = False  # bitwise batch-invariant: no bit of an output depends on other sources
    defaults: Defaults = Defaults()  # the model's own decoding options; what its bundle says, if it was opened from one
    chosen: str = ""  # which precision `auto` has chosen, and why
    workers: Workers[Session] | None = None  # for parallel decodes of one batch, where they pay (parallel.py)

    def encode(self, source_ids: np.ndarray, source_mask: np.ndarray) -> State:
        """ids int64 and mask bool [B,S] -> a state with `source_mask`, `cross_k/v.i` and `encoder_states`."""

    def reserve(self, state: State, slots: int, form: StepForm = EVERYTHING) -> None:
        """Puts an empty cache of that many slots, all zero, into the state; its steps then have this form."""

    def step(
        self, state: State, tokens: np.ndarray, position: np.ndarray, write_index: np.ndarray, self_mask: np.ndarray
    ) -> StepOutput:
        """One `decoder_step`: tokens [B,K], position [B], write_index [B], self_mask [B,K,M] -> its output in fp32.

        The state's cache then holds the K new slots. The output is valid until the next call.
        """

    def select(self, state: State, rows: np.ndarray | None, slots: np.ndarray | None) -> None:
        """Keeps these sources [B'] (None: all) and of their caches these slots [B',L'] (None: as they are)."""

    def replace(self, state: State, rows: np.ndarray, newcomers: State, width: int) -> None:
        """Gives these rows [N] to the sources of another state, which was only encoded, and makes all S `width` long.

        `width` holds every source that still matters. The caches of these rows keep what the sources before left
        there: finite numbers, which the mask hides.
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

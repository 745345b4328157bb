"""Decoding by hand over a TensorRT session: greedy, and a tree of beams checked against PyTorch step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from seq2engine.runtime.encoder_inputs import padded
from seq2engine.runtime.session import Session, State
from seq2engine.runtime.trt.session import TrtSession
from support.stand_in_engines import (
    SOURCES,
    check_logits,
    copied,
    put_engines,
    session_over,
)

FORMS = ("static", "growing")

FLAVOURS = ("tensorrt_rtx", "tensorrt")

LENGTH = 10


def opened(bundles: dict[str, Path], where: Path, form: str = "static", trt: Any = None, **options: Any) -> TrtSession:
    return session_over(put_engines(copied(bundles[form], where / "run7"), **options), trt)


def encoded(session: Session, sources: list[list[int]] = SOURCES) -> State:
    state = session.encode(*padded(sources, session.config.pad_id))
    session.reserve(state, session.limits.slots or 0)
    return state


def one_beam_step(session: Session, state: State, tokens: np.ndarray, step: int) -> np.ndarray:
    """One step of sources that have one beam and have done `step` of them."""
    batch, slots = len(tokens), session.limits.slots or step + 1
    place = np.full(batch, step)
    mask = np.broadcast_to(np.arange(slots) <= step, (batch, 1, slots))
    return session.step(state, tokens, place, place, mask).logits


def greedy(session: Session, sources: list[list[int]], length: int) -> list[list[int]]:
    """The plain loop; finished sources leave the batch at once."""
    state = encoded(session, sources)
    found: list[list[int]] = [[] for _ in sources]
    rows = np.arange(len(sources))
    tokens = np.full((len(rows), 1), session.config.start_id)
    for step in range(length):
        tokens = one_beam_step(session, state, tokens, step).argmax(axis=-1)
        for row, token in zip(rows, tokens[:, 0], strict=True):
            found[row].append(int(token))
        going = np.flatnonzero(tokens[:, 0] != session.config.end_id)
        if not len(going):
            break
        if len(going) < len(rows):
            session.select(state, going, None)
            rows, tokens = rows[going], tokens[going]
    return found


class Tree:
    """Sources with K beams each, whose ancestors are kept track of by hand, checked against PyTorch step by step."""

    def __init__(self, session: Session, sources: list[list[int]], beams: int):
        self.session, self.sources, self.beams = session, sources, beams
        self.state = encoded(session, sources)
        start = session.config.start_id
        self.paths = [[[start] for _ in range(beams)] for _ in sources]  # decoder inputs of every beam
        self.slots: list[list[list[int]]] = [[[] for _ in range(beams)] for _ in sources]  # where they are cached
        self.used = [0] * len(sources)

    def step(self) -> np.ndarray:
        """Runs the last token of every path; its logits must be PyTorch's."""
        longest = max(self.used) + self.beams
        mask = np.zeros((len(self.sources), self.beams, longest), dtype=bool)
        for row, beams in enumerate(self.slots):
            for beam, own in enumerate(beams):
                own.append(self.used[row] + beam)
                mask[row, beam, own] = True
        if (slots := self.session.limits.slots) is not None:
            mask = np.pad(mask, ((0, 0), (0, 0), (0, max(slots - longest, 0))))[:, :, :slots]
        tokens = np.array([[path[-1] for path in beams] for beams in self.paths])
        position = np.array([len(beams[0]) - 1 for beams in self.paths])
        logits = self.session.step(self.state, tokens, position, np.array(self.used), mask).logits
        self.used = [used + self.beams for used in self.used]
        for row, source in enumerate(self.sources):
            check_logits(logits[row], [source] * self.beams, self.paths[row])
        return logits.copy()

    def descend(self, logits: np.ndarray, turn: int) -> None:
        """Every beam moves on: beam k continues beam (k * turn) % K with its k-th best token."""
        for row in range(len(self.sources)):
            parents = [(beam * turn) % self.beams for beam in range(self.beams)]
            best = [int(np.argsort(-logits[row, parent])[beam]) for beam, parent in enumerate(parents)]
            self.paths[row] = [[*self.paths[row][parent], token] for parent, token in zip(parents, best, strict=True)]
            self.slots[row] = [list(self.slots[row][parent]) for parent in parents]

    def select(self, rows: list[int] | None, compact: bool) -> None:
        kept = list(range(len(self.sources))) if rows is None else rows
        self.sources = [self.sources[row] for row in kept]
        self.paths = [self.paths[row] for row in kept]
        self.slots = [self.slots[row] for row in kept]
        self.used = [self.used[row] for row in kept]
        slots = None
        if compact:
            live = [sorted({slot for beam in beams for slot in beam}) for beams in self.slots]
            slots = np.zeros((len(kept), max(map(len, live))), dtype=np.int64)
            for row, own in enumerate(live):
                slots[row, : len(own)] = own
                self.slots[row] = [[own.index(slot) for slot in beam] for beam in self.slots[row]]
            # A growing cache appends behind the longest.
            growing = self.session.cache_form == "growing"
            self.used = [slots.shape[1] if growing else len(own) for own in live]
        self.session.select(self.state, None if rows is None else np.array(rows), slots)

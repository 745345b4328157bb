"""Time per token on a GPU, with the time of its launches alone, the bytes over the bus, and the host's share.

A small step is bound by its launches: a kernel in a CUDA graph takes some two microseconds however little it does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from seq2engine.common.tables import text_table
from seq2engine.export.artifact.passport import Passport
from seq2engine.export.artifact.transfers import transfers_of_token
from seq2engine.export.engines.launch_budget import TOKENS
from seq2engine.runtime.generate import generate
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.session import Session
from seq2engine.runtime.trt.device import Device

from ..cases import Case, sources_for
from ..timed_decode import fixed_length

LAUNCH_SECONDS = 2e-6  # seconds of a launch; an assumption until it is measured
HEAD = (
    "case",
    "step output",
    "per token",
    "launches",
    "launch-bound",
    "times that",
    "to GPU",
    "to host",
    "host's part",
)


class WaitClock:
    """A device wrapper that sums the seconds spent waiting for it."""

    def __init__(self, device: Device):
        self.device, self.waited = device, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.device, name)

    def synchronize(self) -> None:
        started = time.perf_counter()
        self.device.synchronize()
        self.waited += time.perf_counter() - started


@dataclass(frozen=True)
class StepTime:
    """For one token of a whole batch, including its share of the encoder; the median of several decodes."""

    case: str
    reduction: str
    seconds: float
    launches: int
    sent: int
    received: int
    host: float  # share of the time in which the host did not wait

    @property
    def bound(self) -> float:
        return self.launches * LAUNCH_SECONDS


def step_times(
    session: Session, clock: WaitClock, passport: Passport, cases: Sequence[Case], rounds: int
) -> list[StepTime]:
    """Every case with every way to reduce the logits that the passport lists. Decodes have the length of the case."""
    found = []
    for case in cases:
        sources, options = sources_for(case, session.config), SearchOptions(max_length=case.target, beam=case.beam)
        for reduction in passport.reductions:
            if reduction == "next_greedy" and case.beam > 1:
                continue
            decode = decode_of(session, sources, fixed_length(options), reduction)
            decode()  # engines are bound and captured
            timed = sorted(timed_decodes(decode, clock, rounds))
            seconds, waited = timed[len(timed) // 2]
            moved = transfers_of_token(passport, reduction, case.batch, case.beam)
            engines = TOKENS[passport.cache_form][reduction]
            launches = sum(passport.engines[engine].launches for engine in engines)
            part = 1 - waited / seconds
            found.append(
                StepTime(str(case), reduction, seconds / case.target, launches, moved.sent, moved.received, part)
            )
    return found


def decode_of(session: Session, sources: list[list[int]], options: SearchOptions, reduction: str) -> Callable[[], None]:
    """A decode that reduces the logits on the device in this way."""

    def decode() -> None:
        ahead, session.ahead = session.ahead, session.ahead if reduction == "next_greedy" else None
        try:
            generate(session, sources, options, on_step=lambda emitted: None, logits=reduction == "logits")
        finally:
            session.ahead = ahead

    return decode


def timed_decodes(decode: Callable[[], None], clock: WaitClock, rounds: int) -> list[tuple[float, float]]:
    """Seconds of each decode, and those of its waits."""
    found = []
    for _ in range(rounds):
        started, waited = time.perf_counter(), clock.waited
        decode()
        found.append((time.perf_counter() - started, clock.waited - waited))
    return found


def step_table(times: Sequence[StepTime]) -> str:
    rows = [
        (
            one.case,
            one.reduction,
            f"{one.seconds * 1e6:,.0f} us",
            one.launches,
            f"{one.bound * 1e6:,.0f} us",
            f"{one.seconds / one.bound:.1f}" if one.bound else "-",
            f"{one.sent:,} bytes",
            f"{one.received:,} bytes",
            f"{one.host:.0%}",
        )
        for one in times
    ]
    return text_table(HEAD, rows)

"""Decides whether speculative decoding pays, from the measured time per token with and without drafts.

What a draft costs depends on the machine, on what else runs there, and on how many drafts are right. So it is measured
while tokens are decoded: some tokens without drafts, some with, then the faster way, and from time to time a few in
the other.
"""

from __future__ import annotations

from collections import deque

from seq2engine.common.measured import Measured

TRIAL = 8  # steps of the target, in each way, before they are compared
REMEMBERED = 32  # latest steps of each way that count
AGAIN = 256  # steps after which the other way is tried once more
MARGIN = 1.05  # the other way must be this many times as fast to be taken


class StepStatistics:
    """The latest steps of one way of decoding: their seconds and tokens."""

    def __init__(self) -> None:
        self.steps: deque[tuple[float, int]] = deque(maxlen=REMEMBERED)

    def note(self, seconds: float, tokens: int) -> None:
        self.steps.append((seconds, tokens))

    @property
    def seconds_per_token(self) -> float:
        """Of the middle of the steps: steps that another process delayed are outliers."""
        ordered = sorted(self.steps, key=lambda step: step[0] / step[1])
        cut = len(ordered) // 4
        middle = ordered[cut : len(ordered) - cut]
        return sum(seconds for seconds, _ in middle) / sum(tokens for _, tokens in middle)


class Drafting:
    """Chooses between drafts and none, one choice for all decodes of a session.

    It begins with the better way of earlier sessions (`kept`) and tries the other one later.
    """

    def __init__(self, kept: Measured | None = None):
        self.drafted, self.plain = StepStatistics(), StepStatistics()
        self.kept = kept
        before = (kept.value() or {}).get("speedup") if kept is not None else None
        self.known = isinstance(before, float)
        self.drafts = before is None or not self.known or before > 1
        self.trying = 0  # steps that are left of a trial of the other way
        self.since = 0  # steps since the last trial

    def next(self) -> bool:
        """Whether the next step takes drafts."""
        if self.trying:
            self.trying -= 1
            if not self.trying:
                self.choose()
                return self.drafts
            return not self.drafts
        self.since += 1
        if self.since >= (AGAIN if self.known or self.other.steps else TRIAL):
            self.since, self.trying = 0, TRIAL
            return not self.drafts
        return self.drafts

    def note(self, drafted: bool, seconds: float, tokens: int) -> None:
        (self.drafted if drafted else self.plain).note(seconds, tokens)

    @property
    def other(self) -> StepStatistics:
        return self.plain if self.drafts else self.drafted

    def choose(self) -> None:
        now = self.drafted if self.drafts else self.plain
        if now.steps and self.other.steps and now.seconds_per_token > MARGIN * self.other.seconds_per_token:
            self.drafts = not self.drafts

    @property
    def speedup(self) -> float | None:
        """Speedup by drafts; None before both ways were tried."""
        if not (self.drafted.steps and self.plain.steps):
            return None
        return self.plain.seconds_per_token / self.drafted.seconds_per_token

    def keep(self) -> None:
        """Keeps what was measured for the next session."""
        if self.kept is not None and self.speedup is not None:
            self.kept.keep({"speedup": self.speedup})

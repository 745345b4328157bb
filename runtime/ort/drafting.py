"""Decides whether speculative decoding pays and how many tokens to draft, from measured times.

What a draft costs depends on the machine, on what else runs there, and on how many drafts are right. So it is measured
while tokens are decoded: some tokens without drafts, some with, then the faster way, and from time to time a few in
the other. The number of tokens that one step verifies follows from the same measurements.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import median

from seq2engine.common.measured import Measured

TRIAL = 8  # steps of the target, in each way, before they are compared
REMEMBERED = 32  # latest steps of each way that count
AGAIN = 256  # steps after which the other way is tried once more
MARGIN = 1.05  # the other way must be this many times as fast to be taken
FIRST, LONGEST = 5, 32  # tokens of one step: before anything is measured, and at most
EXPECTED = (19.0, 1.0)  # right and wrong drafts, before any was verified
FADES = 0.99  # weight of earlier drafts for every new one: about the latest hundred count


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


class DraftLength:
    """How many tokens one step verifies: as many as take the least time per token, by what was measured so far.

    A step of n tokens needs n - 1 drafts. It gives 1 + p + ... + p^(n-1) tokens where a draft is right with
    probability p, as those behind a wrong one are lost.
    """

    def __init__(self) -> None:
        self.drafts: deque[float] = deque(maxlen=REMEMBERED)  # seconds of one draft
        self.steps: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)  # tokens of a verifying step, its seconds
        self.right, self.wrong = EXPECTED
        self.most = FIRST

    def note_draft(self, right: bool) -> None:
        """Whether the search chose a drafted token."""
        self.right, self.wrong = FADES * self.right + right, FADES * self.wrong + (not right)

    def note_step(self, tokens: int, drafting: float, verifying: float) -> None:
        """A step of so many tokens, the seconds of its drafts together and its own."""
        self.drafts.append(drafting / (tokens - 1))
        self.steps.append((tokens, verifying))
        draft, right, step_of = median(self.drafts), self.right / (self.right + self.wrong), self.line_of_steps()
        taken = spent = 0.0  # tokens of a step, and its drafts' seconds
        best = math.inf
        for count in range(1, LONGEST + 1):
            taken += right ** (count - 1)
            each = (spent + step_of(count)) / taken
            if count > 1 and each < best:
                best, self.most = each, count
            spent += draft

    def line_of_steps(self) -> Callable[[int], float]:
        """Seconds of a step of so many tokens: on the line through the shortest and the longest step that were seen. It
        never falls, nor below either."""
        counts = [count for count, _ in self.steps]
        (least, short), (most, long) = (
            (count, median(seconds for other, seconds in self.steps if other == count))
            for count in (min(counts), max(counts))
        )
        slope = max(0.0, long - short) / max(1, most - least)
        return lambda tokens: max(min(short, long), long + slope * (tokens - most))

"""The timing primitive, with a clock that is wound by hand."""

from __future__ import annotations

import numpy as np
import pytest

from seq2engine.benchmarks.timing import MOST_LEADING, Ratio, Samples, interleaved, ratio_interval

MS = 1_000_000


class HandClock:
    """A clock that only arms advance."""

    def __init__(self):
        self.now = 0
        self.calls = []

    def __call__(self):
        return self.now

    def arm(self, name, *costs):
        """An arm whose calls cost these nanoseconds, the last one for ever."""
        left = list(costs)

        def call():
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return call

    def sleep(self, seconds):
        self.calls.append("rest")
        self.now += round(seconds * 1e9)


def samples(*milliseconds):
    return Samples(tuple(round(value * MS) for value in milliseconds))


def test_arms_take_turns_and_none_is_always_first():
    clock = HandClock()
    arms = {"a": clock.arm("a", 1), "b": clock.arm("b", 2), "c": clock.arm("c", 3)}
    found = interleaved(arms, rounds=4, warmup=0, clock=clock)
    assert "".join(clock.calls) == "abcbcacababc"
    assert found == {"a": Samples((1,) * 4), "b": Samples((2,) * 4), "c": Samples((3,) * 4)}


def test_samples_are_kept_in_order_and_warm_up_is_not_among_them():
    clock = HandClock()
    found = interleaved({"a": clock.arm("a", 900, 800, 5, 7, 6)}, rounds=3, warmup=2, clock=clock)
    assert found["a"].nanoseconds == (5, 7, 6)


def test_rest_and_lead_are_not_timed():
    clock = HandClock()
    arms = {"a": clock.arm("a", 4, 50, 4, 3, 50, 4, 3), "b": clock.arm("b", 9)}
    found = interleaved(arms, rounds=2, warmup=1, lead=8e-9, rest=0.5, clock=clock, sleep=clock.sleep)
    assert found == {"a": Samples((3, 3)), "b": Samples((9, 9))}
    assert clock.calls[:10] == ["a", "b", "rest", "a", "a", "a", "rest", "b", "b", "b"]


def test_results_of_timed_calls_alone_are_kept():
    clock, made, kept = HandClock(), iter(range(100)), []
    arm = lambda: (clock.arm("a", 4)(), next(made))[1]  # noqa: E731
    interleaved({"a": arm}, 2, warmup=1, lead=8e-9, clock=clock, after=lambda name, result: kept.append((name, result)))
    assert kept == [("a", 3), ("a", 6)]


@pytest.mark.parametrize(("nanoseconds", "calls"), [(1, MOST_LEADING), (30, 6), (200, 1), (201, 0), (10**9, 0)])
def test_long_calls_do_not_lead(nanoseconds, calls):
    """All arms lead with as many calls as the fastest makes in that time."""
    clock = HandClock()
    arms = {"a": clock.arm("a", nanoseconds), "b": clock.arm("b", 3 * nanoseconds)}
    interleaved(arms, rounds=1, warmup=1, lead=200e-9, clock=clock)
    assert clock.calls == ["a", "b", *["a"] * (calls + 1), *["b"] * (calls + 1)]


@pytest.mark.parametrize(
    ("turn", "calls", "rests"),
    [
        (0.0, "a1 b1 b2 a2 a3 b3 b4 a4 a5 b5", 10),
        (25e-9, "a1 a2 b1 b2 b3 b4 a3 a4 a5 b5", 6),  # as many as the faster one makes
        (1.0, "a1 a2 a3 a4 a5 b1 b2 b3 b4 b5", 2),
    ],
)
def test_a_turn_of_several_rounds(turn, calls, rests):
    """Every arm makes its rounds in their order, and rests before the first of a turn."""
    clock, made = HandClock(), []
    arms = {"a": clock.arm("a", 10), "b": clock.arm("b", 20)}
    note = lambda name, number: made.append(f"{name}{number + 1}")  # noqa: E731
    found = interleaved(arms, 5, warmup=1, rest=0.1, turn=turn, before=note, clock=clock, sleep=clock.sleep)
    assert made == ["a1", "b1", *calls.split()]  # the first of each is the warm-up's
    assert {name: len(taken.nanoseconds) for name, taken in found.items()} == {"a": 5, "b": 5}
    assert clock.calls.count("rest") == rests


def test_progress_ends_at_one():
    reports = []
    interleaved({"a": lambda: None}, rounds=4, progress=lambda *report: reports.append(report), stage="x")
    assert reports == [("x", 0.0), ("x", 0.25), ("x", 0.5), ("x", 0.75), ("x", 1.0)]


def test_an_arm_that_fails_ends_the_run():
    def broken():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interleaved({"a": lambda: None, "b": broken}, rounds=2)


def test_percentiles_of_known_numbers():
    found = samples(*range(100, 0, -1))
    assert found.median == pytest.approx(50.5)
    assert (found.p10, found.p90, found.p99) == pytest.approx((10.9, 90.1, 99.01))
    assert found.spread == pytest.approx((90.1 - 10.9) / 50.5)
    assert samples(3).p99 == pytest.approx(3)
    assert samples(3).spread == 0


def test_an_arm_that_always_takes_half_the_time_is_twice_as_fast():
    slow, fast = samples(*[2] * 8), samples(*[1] * 8)
    assert ratio_interval(slow, fast) == Ratio(2.0, 2.0, 2.0, rounds=8)
    assert ratio_interval(slow, fast).verdict == "faster"
    assert ratio_interval(fast, slow).verdict == "slower"


def test_the_interval_is_that_of_the_median():
    # A resampled median of 1..25 is at most k when 13 of 25 draws are: a chance below 2.5 % for k = 7, above it for 8.
    found = ratio_interval(samples(*range(1, 26)), samples(*[1] * 25))
    assert (found.value, found.low, found.high) == pytest.approx((13, 8, 18))


def test_noise_that_both_arms_share_cancels():
    noise = [1, 9, 2, 30, 4, 11, 3]
    found = ratio_interval(samples(*(3 * value for value in noise)), samples(*noise))
    assert (found.low, found.high) == pytest.approx((3, 3))


def test_an_interval_around_one_is_no_verdict():
    a, b = samples(10, 11, 12, 13, 10, 12, 11, 13), samples(13, 10, 12, 11, 12, 10, 13, 11)
    found = ratio_interval(a, b)
    assert found.low < 1 < found.high
    assert found.verdict == "unsure"
    assert ratio_interval(a, a).verdict == "unsure"


def test_three_rounds_have_no_interval_and_four_have_one():
    few = ratio_interval(samples(*[20] * 3), samples(*[2] * 3))
    assert few == Ratio(10.0, None, None, rounds=3)
    assert few.verdict == "unsure"
    for rounds in (4, 5, 6, 7):
        assert ratio_interval(samples(*[20] * rounds), samples(*[2] * rounds)).verdict == "faster"


@pytest.mark.parametrize("rounds", [1, 3, 4, 5, 6, 9])
def test_a_verdict_follows_the_interval(rounds):
    generator = np.random.default_rng(rounds)
    for spread in (0.01, 0.3, 2):
        a, b = (samples(*np.exp(spread * generator.standard_normal(rounds))) for _ in range(2))
        found = ratio_interval(a, b)
        excluded = found.low is not None and not found.low <= 1 <= found.high
        assert (found.verdict != "unsure") == excluded
        assert found.low is None or found.low <= found.value <= found.high


def test_few_rounds_take_no_credit_for_pairs():
    """Four rounds whose ratios are all 1.1, under noise that both share: the rank-sum test sees two of a kind."""
    noise = [1, 9, 2, 30]
    found = ratio_interval(samples(*(1.1 * value for value in noise)), samples(*noise))
    assert found.verdict == "unsure"
    assert ratio_interval(samples(*(1.1 * value for value in noise * 2)), samples(*noise * 2)).verdict == "faster"

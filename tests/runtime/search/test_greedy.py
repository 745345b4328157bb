"""Greedy search on scripts whose answer can be worked out by hand."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scripted_step import Script, ScriptedStep, by_hand, from_seed, from_table, run

from seq2engine.errors import RequestError
from seq2engine.runtime.search.greedy import greedy_search
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step import Emitted, Hypothesis, Special, staying_rows

START, END, A, B = range(4)
SPECIAL = Special(start=START, end=END)
ONLY_A, ONLY_END = [0.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0]


def decode(
    *scripts: Script, max_length: int = 8, length_penalty: float = 1.0
) -> tuple[list[Hypothesis], list[Emitted], ScriptedStep]:
    step = ScriptedStep(scripts)
    options = SearchOptions(max_length=max_length, length_penalty=length_penalty)
    hypotheses, emitted = run(greedy_search(step, len(scripts), SPECIAL, options))
    assert [len(nbest) for nbest in hypotheses] == [1] * len(scripts)
    return [nbest[0] for nbest in hypotheses], emitted, step


def ends_after(words: int) -> Script:
    """A script that outputs A `words` times and then ends."""
    return from_table({(A,) * words: ONLY_END}, otherwise=ONLY_A)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_takes_the_likeliest_token_and_sums_log_probabilities(length_penalty: float) -> None:
    script = from_table({(): [0, 0.3, 0.5, 0.2], (A,): [0, 0.4, 0, 0.6]}, otherwise=[0, 0.9, 0.1, 0])
    (found,), emitted, _ = decode(script, length_penalty=length_penalty)
    assert found.tokens == (A, B, END)
    assert found.score == by_hand(math.log(0.5 * 0.6 * 0.9), 3)
    assert [(step.step, step.tokens.tolist(), step.parents.tolist()) for step in emitted] == [
        (0, [[A]], [[0]]),
        (1, [[B]], [[0]]),
        (2, [[END]], [[0]]),
    ]


def test_logits_need_not_be_normalised() -> None:
    (found,), _, _ = decode(lambda prefix: np.array([0.0, 105.0, 104.0, 0.0], dtype=np.float32))
    assert found.score == by_hand(-math.log(1 + math.exp(-1)), largest=105.0)


def test_the_end_token_may_come_first() -> None:
    (found,), emitted, _ = decode(ends_after(0))
    assert found == Hypothesis((END,), 0.0)
    assert len(emitted) == 1


def test_a_source_that_never_ends_stops_at_the_maximum_length() -> None:
    (found,), emitted, _ = decode(from_table({}, otherwise=ONLY_A), max_length=5)
    assert found.tokens == (A,) * 5
    assert len(emitted) == 5


def test_the_first_of_equal_tokens_wins() -> None:
    (found,), _, _ = decode(from_table({}, otherwise=[0, 0, 0.5, 0.5]), max_length=2)
    assert found.tokens == (A, A)


def test_an_empty_batch_asks_nothing() -> None:
    assert decode()[:2] == ([], [])


def test_finished_sources_leave() -> None:
    found, emitted, step = decode(*map(ends_after, [2, 0, 3, 0]))
    assert [len(hypothesis.tokens) for hypothesis in found] == [3, 1, 4, 1]
    assert step.kept == [[0, 2], [1]]
    assert step.batches == [4, 2, 2, 1]
    assert [emission.sources.tolist() for emission in emitted] == [[0, 1, 2, 3], [0, 2], [0, 2], [2]]


def test_finished_sources_leave_in_groups_and_are_fed_the_end_token() -> None:
    lengths = [0, 1, *[5] * 15]  # one of 17 is less than an eighth, and so are two; then all are done
    found, emitted, step = decode(*map(ends_after, lengths))
    assert [len(hypothesis.tokens) for hypothesis in found] == [length + 1 for length in lengths]
    assert all(hypothesis.score == 0 for hypothesis in found)
    assert step.kept == []
    assert [emission.tokens[0, 0] for emission in emitted] == [END] * 6


@pytest.mark.parametrize(
    ("batch", "finished", "leave"),
    [(1, 0, False), (1, 1, False), (2, 2, False), (8, 0, False), (8, 1, True), (9, 1, False), (9, 2, True)],
)
def test_when_leaving_is_worth_it(batch: int, finished: int, leave: bool) -> None:
    done = np.arange(batch) < finished
    rows = staying_rows(done)
    assert (rows is not None) == leave
    if rows is not None:
        assert rows.tolist() == list(range(finished, batch))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_refused(value: float) -> None:
    broken = np.array([0.0, 1.0, value, 0.0], dtype=np.float32)
    with pytest.raises(RequestError, match="source 1: the model's logits are not finite"):
        decode(ends_after(3), lambda prefix: broken)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=12), st.randoms())
def test_neighbours_and_order_do_not_matter(seeds: list[int], random: Random) -> None:
    alone = {seed: decode(from_seed(seed, vocab=4))[0][0] for seed in seeds}
    random.shuffle(seeds)
    found, _, _ = decode(*(from_seed(seed, vocab=4) for seed in seeds))
    assert found == [alone[seed] for seed in seeds]

"""Greedy search by steps that choose tokens themselves, several in a call: it finds what greedy search finds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rounding import of_written_logits
from support.scripted_choice import ScriptedChoice
from support.scripted_step import Script, ScriptedStep, by_hand, from_seed, from_table, run

from seq2engine.errors import RequestError
from seq2engine.runtime.search.ahead.greedy_plan import ChosenTokens, greedy_plan, unserved
from seq2engine.runtime.search.ahead.planned_greedy import planned_greedy_search
from seq2engine.runtime.search.greedy import greedy_search
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step import NO_TOKEN, Emitted, Hypothesis, Special, Start
from seq2engine.runtime.search.step_output import NotFiniteError

START, END, A, B = range(4)
SPECIAL = Special(start=START, end=END)
ONLY_A, ONLY_END = [0.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0]
Starts = list[Start]


def planned(
    scripts: list[Script], options: SearchOptions, steps: int, starts: Starts | None = None, vocab: int = 4
) -> tuple[list[list[Hypothesis]], list[Emitted], ScriptedChoice]:
    special = Special(START, NO_TOKEN if options.ignore_eos else END)
    assert not unserved(options, vocab + 2)
    plan = greedy_plan(options, special, starts or [], len(scripts), vocab, options.max_length + 3)
    step = ScriptedChoice(scripts, plan, steps, START)
    return *run(planned_greedy_search(step, len(scripts), special, options, starts or [])), step


def ends_after(words: int) -> Script:
    """A script that outputs A `words` times and then ends."""
    return from_table({(A,) * words: ONLY_END}, otherwise=ONLY_A)


@pytest.mark.parametrize("steps", [1, 2, 64])
def test_takes_the_likeliest_token_and_sums_log_probabilities(steps: int) -> None:
    script = from_table({(): [0, 0.3, 0.5, 0.2], (A,): [0, 0.4, 0, 0.6]}, otherwise=[0, 0.9, 0.1, 0])
    ((found,),), emitted, step = planned([script], SearchOptions(max_length=8), steps)
    assert found.tokens == (A, B, END)
    assert found.score == by_hand(math.log(0.5 * 0.6 * 0.9), 3)
    assert found.log_probs == by_hand([math.log(0.5), math.log(0.6), math.log(0.9)])
    assert step.ran == [1, 1, 1] if steps == 1 else [2, 1] if steps == 2 else [3]
    assert [one.step for one in emitted] == [sum(step.ran[: i + 1]) - 1 for i in range(len(step.ran))]
    assert emitted[-1].tokens.tolist() == [[END]]


def test_sources_leave_as_they_do_one_step_at_a_time() -> None:
    scripts = [ends_after(words) for words in (9, 1, 5, 5, 0, 9, 3, 9, 2, 7)]
    options = SearchOptions(max_length=10)
    hypotheses, emitted, step = planned(scripts, options, 64)
    assert [len(nbest[0].tokens) for nbest in hypotheses] == [10, 2, 6, 6, 1, 10, 4, 10, 3, 8]
    assert step.batches == sorted(step.batches, reverse=True)
    _, one_by_one = run(greedy_search(ScriptedStep(scripts), len(scripts), SPECIAL, options))
    batches = [[tuple(one.sources.tolist()) for one in found] for found in (emitted, one_by_one)]
    assert list(dict.fromkeys(batches[0])) == list(dict.fromkeys(batches[1]))


def test_what_is_emitted_has_no_logits() -> None:
    _, emitted, _ = planned([ends_after(2)], SearchOptions(max_length=8), 64)
    with pytest.raises(RequestError, match="were not kept"):
        _ = emitted[0].answer.logits


def test_hypotheses_of_sources_that_are_done_can_be_asked_for_meanwhile() -> None:
    scripts = [ends_after(1), *[ends_after(6)] * 5]
    _, emitted, _ = planned(scripts, SearchOptions(max_length=10), 64)
    first = emitted[0]
    assert np.flatnonzero(first.done).tolist() == [0]
    assert first.hypotheses(first.sources[first.done])[0][0].tokens == (A, END)


@pytest.mark.parametrize("steps", [1, 3, 64])
def test_the_source_whose_logits_are_no_numbers_is_named(steps: int) -> None:
    def broken(prefix: tuple[int, ...]) -> np.ndarray:
        return np.array([0, 0, np.nan if len(prefix) == 4 else 5, 0], dtype=np.float32)

    scripts = [ends_after(0), ends_after(9), ends_after(9), broken, ends_after(9)]
    with pytest.raises(NotFiniteError) as failed:
        planned(scripts, SearchOptions(max_length=8), steps)
    assert failed.value.source == 3, "by its number in the whole batch"


def test_log_probabilities_of_chosen_tokens() -> None:
    """Chosen logits 1 and 3, best ones 2 and 3, sums of exp(logit - best)."""
    found = ChosenTokens(
        np.array([[5, 6]]), *(np.array([row], dtype=np.float32) for row in ([2, 3], [1, 3], [1.5, 1.0]))
    )
    assert found.log_probs.tolist() == [[1 - (math.log(1.5) + 2), 0.0]]


VOCAB = 12
TOKENS = st.integers(2, VOCAB - 1)
OPTIONS = st.fixed_dictionaries(
    {"max_length": st.integers(4, 12)},
    optional={
        "min_length": st.integers(0, 4),
        "banned": st.lists(st.integers(2, 7), max_size=3, unique=True).map(
            lambda found: tuple((token,) for token in found)
        ),
        "first_banned": st.lists(st.integers(1, VOCAB - 1), max_size=3, unique=True).map(tuple),
        "ignore_eos": st.just(True),
        "scores": st.just(False),
        "forced_bos": st.integers(8, VOCAB - 1),
        "forced_eos": st.sampled_from([END, 9]),
    },
)


def likelier_end(script: Script, by: float) -> Script:
    def script_with_end(prefix: tuple[int, ...]) -> np.ndarray:
        logits = script(prefix)
        logits[END] += np.float32(by)
        return logits

    return script_with_end


@given(st.data(), OPTIONS, st.integers(1, 20), st.sampled_from([1, 2, 3, 64]), st.integers(0, 9999), st.booleans())
@settings(max_examples=150)
def test_finds_what_greedy_search_finds(
    data: st.DataObject, given_options: dict[str, Any], batch: int, steps: int, seed: int, prefixed: bool
) -> None:
    options = SearchOptions(**given_options)
    scripts = [likelier_end(from_seed(seed + row, VOCAB), 1.5) for row in range(batch)]
    starts: Starts = []
    if prefixed:
        prefixes = data.draw(st.lists(st.lists(TOKENS, max_size=3), min_size=batch, max_size=batch))
        starts = [Start(tuple(prefix) or options.forced_start) for prefix in prefixes]
    found, emitted, _ = planned(scripts, options, steps, starts, VOCAB)
    special = Special(START, NO_TOKEN if options.ignore_eos else END)
    expected, one_by_one = run(greedy_search(ScriptedStep(scripts, START), batch, special, options, (), starts))
    assert [nbest[0].tokens for nbest in found] == [nbest[0].tokens for nbest in expected]
    near = of_written_logits(VOCAB, 12.0)
    for mine, other in zip(found, expected, strict=True):
        if not options.unscored:
            assert mine[0].log_probs == pytest.approx(other[0].log_probs, rel=0, abs=near.log_prob)
        assert math.isnan(mine[0].score) == options.unscored
    assert emitted[-1].step == one_by_one[-1].step

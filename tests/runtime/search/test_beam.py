"""Beam search on scripts whose answer can be worked out by hand, and on all sequences of tiny vocabularies."""

from __future__ import annotations

import itertools
import math
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scripted_step import SEEDED, Script, ScriptedStep, by_hand, from_seed, from_table, run

from seq2engine.errors import RequestError
from seq2engine.runtime.search.beam import beam_search
from seq2engine.runtime.search.greedy import greedy_search
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step import Emitted, Hypothesis, Special

START, END, A, B = range(4)
SPECIAL = Special(start=START, end=END)
EARLY_STOPPING = [True, False, "never"]


def decode(
    *scripts: Script, end: int = END, **options: Any
) -> tuple[list[list[Hypothesis]], list[Emitted], ScriptedStep]:
    step = ScriptedStep(scripts, START)
    hypotheses, emitted = run(beam_search(step, len(scripts), Special(START, end), SearchOptions(**options)))
    return hypotheses, emitted, step


def best(script: Script, **options: Any) -> tuple[tuple[int, ...], float]:
    """Tokens and score of the best hypothesis of one source."""
    ((found, *_),), _, _ = decode(script, **options)
    return found.tokens, found.score


@pytest.mark.parametrize(
    ("penalty", "tokens", "score"),
    [
        (0.0, (END,), math.log(0.4)),  # -0.92 beats -1.02
        (1.0, (A, END), math.log(0.36) / 2),  # -0.92 loses to -0.51
        (-1.0, (END,), math.log(0.4)),
    ],
)
def test_length_penalty_changes_the_winner(penalty: float, tokens: tuple[int, ...], score: float) -> None:
    script = from_table({(): [0, 0.4, 0.6, 0]}, otherwise=[0, 0.6, 0.4, 0])
    found = best(script, beam=2, length_penalty=penalty, early_stopping=True)
    assert found == (tokens, by_hand(score, len(tokens)))


# Two beams, length penalty 1. After step 2 [END] log(.4) = -.92 and [A END] log(.6*.45)/2 = -.65 have ended and [A B]
# runs at log(.3)/2 = -.60: better than the worst of them, so only True stops. After step 3 [A B END] log(.27)/3 = -.44
# has pushed [END] out and [A B A] runs at log(.03)/3 = -1.17: False stops. Should it be certain of every token up to
# step 12, it would reach log(.03)/12 = -.29, so "never" goes on; and certain it is.
PATIENCE = from_table(
    {
        (): [0, 0.4, 0.6, 0],
        (A,): [0, 0.45, 0.05, 0.5],
        (A, B): [0, 0.9, 0.1, 0],
        (A, A): [0, 0.5, 0.5, 0],
    },
    otherwise=[0, 0, 1, 0],
)


@pytest.mark.parametrize(
    ("early_stopping", "tokens", "score", "steps"),
    [
        (True, (A, END), math.log(0.27) / 2, 2),
        (False, (A, B, END), math.log(0.27) / 3, 3),
        ("never", (A, B, *[A] * 10), math.log(0.03) / 12, 12),
    ],
)
def test_early_stopping_is_impatient_sensible_or_thorough(
    early_stopping: bool | str, tokens: tuple[int, ...], score: float, steps: int
) -> None:
    options: dict[str, Any] = {"beam": 2, "max_length": 12, "early_stopping": early_stopping}
    assert best(PATIENCE, **options) == (tokens, by_hand(score))
    assert len(decode(PATIENCE, **options)[1]) == steps


def test_never_hopes_for_no_more_length_where_length_is_punished() -> None:
    # Penalty -1 multiplies by the length. [END] log(.2) = -1.61 and [A END] 2 log(.245) = -2.81 have ended, [A B] runs
    # at 2 log(.42) = -1.74 and ends second: 3 log(.399) = -2.76. At length 8 it could hope for -6.9.
    script = from_table({(): [0, 0.2, 0.7, 0.1], (A,): [0, 0.35, 0.05, 0.6]}, otherwise=[0, 0.95, 0.05, 0])
    (found,), _, _ = decode(script, beam=2, nbest=2, max_length=8, length_penalty=-1.0, early_stopping="never")
    assert [hypothesis.tokens for hypothesis in found] == [(END,), (A, B, END)]


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
@pytest.mark.parametrize("beam", [1, 2, 3])
def test_the_end_token_may_come_first(beam: int, early_stopping: bool | str) -> None:
    script = from_table({(): [0, 0.97, 0.02, 0.01]}, otherwise=[0, 0.2, 0.4, 0.4])
    found = best(script, beam=beam, early_stopping=early_stopping, length_penalty=0.0)
    assert found == ((END,), by_hand(math.log(0.97)))


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
def test_a_source_that_never_ends_stops_at_the_maximum_length(early_stopping: bool | str) -> None:
    script = from_table({}, otherwise=[0, 0, 0.7, 0.3])
    ((first, second),), emitted, _ = decode(script, beam=2, nbest=2, max_length=3, early_stopping=early_stopping)
    assert (first.tokens, second.tokens) == ((A, A, A), (A, A, B))  # of its three equals the one from the best beam
    assert first.score == by_hand(math.log(0.7**3) / 3)
    assert second.score == by_hand(math.log(0.7**2 * 0.3) / 3)
    assert len(emitted) == 3


def test_at_the_maximum_length_running_beams_count_like_ended_ones() -> None:
    script = from_table({(): [0, 0.3, 0.7, 0]}, otherwise=[0, 0.1, 0.9, 0])
    ((first, second),), _, _ = decode(script, beam=2, nbest=2, max_length=2, length_penalty=0.0)
    assert (first.tokens, second.tokens) == ((A, A), (END,))  # .63 and .30 before [A END] .07


def test_an_end_token_past_the_first_k_candidates_is_ignored() -> None:
    # At step 1 the end token is third. [END] would win with log(.2) = -1.6; what beam 2 can see is .4 * .1.
    script = from_table({(): [0, 0.2, 0.4, 0.4]}, otherwise=[0.3, 0.1, 0.3, 0.3])
    tokens, _ = best(script, beam=2, max_length=3, length_penalty=0.0)
    assert tokens != (END,)


def test_nbest_is_in_order_and_a_prefix_of_a_larger_nbest() -> None:
    script = from_seed(3, vocab=6)
    wide = decode(script, beam=4, nbest=4)[0][0]
    scores = [hypothesis.score for hypothesis in wide]
    assert len(wide) == 4
    assert scores == sorted(scores, reverse=True)
    assert len({hypothesis.tokens for hypothesis in wide}) == 4
    for nbest in (1, 2, 3):
        assert decode(script, beam=4, nbest=nbest)[0][0] == wide[:nbest]


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_a_beam_wider_than_what_exists_gives_what_exists(early_stopping: bool | str, penalty: float) -> None:
    script = from_table({(): [0, 0.5, 0.5, 0], (A,): [0, 0.25, 0, 0.75]}, otherwise=[0, 1, 0, 0])
    (found,), emitted, _ = decode(
        script, beam=6, nbest=6, max_length=8, early_stopping=early_stopping, length_penalty=penalty
    )
    assert {hypothesis.tokens for hypothesis in found} == {(END,), (A, B, END), (A, END)}
    assert len(emitted) == 3  # then no beam is left


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
@pytest.mark.parametrize("vocab", [2, 3, 5])
def test_a_vocabulary_smaller_than_the_candidates(vocab: int, early_stopping: bool | str) -> None:
    (found,), _, _ = decode(from_seed(vocab, vocab), beam=4, nbest=4, max_length=5, early_stopping=early_stopping)
    assert 1 <= len(found) <= 4
    assert all(math.isfinite(hypothesis.score) for hypothesis in found)
    assert len({hypothesis.tokens for hypothesis in found}) == len(found)


@pytest.mark.parametrize(("end", "tokens"), [(0, (0,)), (7, (0, 0, 0))])
def test_a_vocabulary_of_one(end: int, tokens: tuple[int, ...]) -> None:
    ((found, *rest),), _, _ = decode(lambda prefix: np.zeros(1, np.float32), beam=3, nbest=3, max_length=3, end=end)
    assert (found.tokens, found.score, rest) == (tokens, 0.0, [])


def test_an_empty_batch_asks_nothing() -> None:
    assert decode(beam=2)[:2] == ([], [])


def test_finished_sources_leave_or_wait_and_are_fed_the_end_token() -> None:
    slow = from_table({}, otherwise=[0, 0, 0.6, 0.4])
    options: dict[str, Any] = {"beam": 2, "nbest": 2, "max_length": 4, "early_stopping": True}
    hypotheses, emitted, step = decode(slow, PATIENCE, slow, **options)
    assert hypotheses[1][0].tokens == (A, END)  # after two steps
    assert step.kept == [[0, 2]]
    assert step.batches == [3, 3, 2, 2]
    assert [emission.sources.tolist() for emission in emitted] == [[0, 1, 2], [0, 1, 2], [0, 2], [0, 2]]

    # One of nine waits, and however certain the script is of what follows, it is not heard any more.
    waiting, emitted, step = decode(PATIENCE, *[slow] * 8, **options)
    assert step.kept == []
    assert waiting[:2] == [hypotheses[1], hypotheses[0]]
    assert [emission.tokens[0].tolist() for emission in emitted[1:]] == [[END, END]] * 3
    assert [emission.parents[0].tolist() for emission in emitted[1:]] == [[0, 1]] * 3


def test_logits_that_are_no_numbers_are_refused() -> None:
    broken = from_table({(A,): [math.nan] * 4}, otherwise=[0, 0.2, 0.8, 0])
    with pytest.raises(RequestError, match="source 0: the model's logits are not finite"):
        decode(broken, beam=2)


@settings(max_examples=60, deadline=None)
@given(
    seeds=st.lists(st.integers(0, 1000), min_size=1, max_size=12),
    random=st.randoms(),
    beam=st.integers(1, 4),
    penalty=st.sampled_from([-1.0, 0.0, 0.6, 1.0, 2.0]),
    early_stopping=st.sampled_from(EARLY_STOPPING),
)
def test_neighbours_and_order_do_not_matter(
    seeds: list[int], random: Random, beam: int, penalty: float, early_stopping: bool | str
) -> None:
    options: dict[str, Any] = {"beam": beam, "nbest": beam, "length_penalty": penalty, "early_stopping": early_stopping}
    alone = {seed: decode(from_seed(seed, vocab=5), max_length=6, **options)[0][0] for seed in seeds}
    random.shuffle(seeds)
    found, _, _ = decode(*(from_seed(seed, vocab=5) for seed in seeds), max_length=6, **options)
    assert found == [alone[seed] for seed in seeds]


def test_neighbours_do_not_matter_to_the_last_bit_of_a_large_vocabulary() -> None:
    options = {"beam": 2, "nbest": 2, "max_length": 3}
    scripts = [from_seed(seed, vocab=20_011) for seed in range(3)]
    together = decode(*scripts, **options)[0]
    assert together == [decode(script, **options)[0][0] for script in scripts]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.integers(2, 3),
    length=st.integers(1, 4),
    penalty=st.sampled_from([-0.5, 0.0, 0.6, 1.0, 2.0]),
)
def test_a_huge_beam_finds_the_best_of_all_sequences(seed: int, vocab: int, length: int, penalty: float) -> None:
    script = from_seed(seed, vocab)

    def score(tokens: tuple[int, ...]) -> float:
        logits = [script(tokens[:place]).astype(np.float64) for place in range(len(tokens))]
        total = sum(row[token] - np.logaddexp.reduce(row) for row, token in zip(logits, tokens, strict=True))
        return total / len(tokens) ** penalty

    words = [token for token in range(vocab) if token != END]
    sequences = [(*stem, END) for size in range(length) for stem in itertools.product(words, repeat=size)]
    sequences += itertools.product(words, repeat=length)

    huge = vocab**length
    options: dict[str, Any] = {"max_length": length, "length_penalty": penalty, "early_stopping": "never"}
    (found,), _, _ = decode(script, beam=huge, nbest=huge, **options)
    ranking = [score(hypothesis.tokens) for hypothesis in found]
    summed = max(length, length ** (1 - penalty))  # tokens that rounding errors are summed up of
    assert ranking == by_hand(sorted(map(score, sequences), reverse=True), summed, **SEEDED)
    assert ranking == by_hand([hypothesis.score for hypothesis in found], summed, **SEEDED)
    assert {hypothesis.tokens for hypothesis in found} == set(sequences)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), vocab=st.integers(2, 6))
def test_a_beam_of_one_that_stops_at_once_is_greedy(seed: int, vocab: int) -> None:
    options = SearchOptions(max_length=8, length_penalty=0.0, early_stopping=True)
    script = from_seed(seed, vocab)
    (((greedy,),), _), (((beam,),), _) = (
        run(search(ScriptedStep([script]), 1, SPECIAL, options)) for search in (greedy_search, beam_search)
    )
    assert beam.tokens == greedy.tokens
    assert beam.score == by_hand(greedy.score, len(greedy.tokens), **SEEDED)

"""Greedy search by a chain of tiny graphs chooses what the loop over one step at a time chooses."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.device_graphs import OrtGraph, launches_of

from seq2engine.export.device_graphs.next_greedy import BAN_ROWS, RECORDED, next_greedy
from seq2engine.runtime.search.ahead.greedy_plan import ROWS, greedy_plan, hypothesis_lengths, unserved
from seq2engine.runtime.search.constraints.trie import trie_from_sequences
from seq2engine.runtime.search.greedy import greedy_search
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step import NO_TOKEN, Special, Start, drain
from seq2engine.runtime.search.step_output import StepOutput

VOCAB, LENGTH, SLOTS, COUNT = 12, 10, 13, 8
START, END = 0, 2


@cache
def graph(beams, scores):
    return OrtGraph(next_greedy(VOCAB, COUNT, SLOTS, LENGTH, beams, scores))


class TableStep:
    """The logits of a step are those of a table [B,T,V] at its number; the sources that stay keep their rows."""

    def __init__(self, table):
        self.table, self.number = table, 0

    def __call__(self, tokens, parents):
        self.number += 1
        return StepOutput(np.ascontiguousarray(self.table[:, self.number - 1][:, None]))

    def keep(self, rows):
        self.table = self.table[rows]


def chain(table, plan, beams, scores, late):
    """Decodes by the graph alone, `late` steps longer than needed; returns its last state."""
    batch = len(table)
    state = {"position": np.zeros(batch, dtype=np.int64), "done": np.zeros(batch, dtype=bool), "target": plan.target}
    state |= {name: np.full((batch, LENGTH), np.nan, dtype=np.float32) for name in RECORDED}
    fixed = dataclasses.asdict(plan)
    for number in range(LENGTH + late):
        logits = np.zeros((batch, beams, VOCAB), dtype=np.float32)
        logits[:, 0] = table[np.arange(batch), state["position"]]
        found = graph(beams, scores)(**{**fixed, **state}, logits=logits)
        state |= {name.removeprefix("new_"): array for name, array in found.items()}
        assert (state["position"] < plan.limit).all()
        going_on = ~state["done"]
        past = np.arange(SLOTS) <= state["position"][:, None]
        assert (state["self_mask"] == past[:, None]).all()
        np.testing.assert_array_equal(state["position"][going_on], number + 1)
        fed = state["target"][going_on, min(number, LENGTH - 1)]
        np.testing.assert_array_equal(state["tokens"][going_on], np.repeat(fed[:, None], beams, axis=1))
        assert ((state["tokens"] >= 0) & (state["tokens"] < VOCAB)).all()
    assert state["done"].all()
    return state


def starts_of(rng, batch, max_length):
    return [Start(tuple(rng.integers(0, VOCAB, rng.integers(0, max_length)).tolist())) for _ in range(batch)]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    batch=st.integers(1, 4),
    beams=st.sampled_from((1, 4)),
    scores=st.booleans(),
    max_length=st.integers(1, LENGTH),
    min_length=st.integers(0, LENGTH),
    forced=st.tuples(st.none() | st.just(5), st.none() | st.just(END)),
    banned=st.lists(st.integers(0, VOCAB - 1), max_size=2, unique=True),
    first_banned=st.lists(st.integers(0, VOCAB - 1), max_size=2, unique=True),
    ignore_eos=st.booleans(),
    prefixed=st.booleans(),
    steps=st.sampled_from((3, 1000)),  # so few different logits: ties
)
def test_the_chain_is_greedy_search(
    seed, batch, beams, scores, max_length, min_length, forced, banned, first_banned, ignore_eos, prefixed, steps
):
    rng = np.random.default_rng(seed)
    table = (rng.integers(0, steps, (batch, LENGTH, VOCAB)) * np.float32(4 / steps)).astype(np.float32)
    table[..., END] += rng.choice([-3, 0, 3])
    options = SearchOptions(
        max_length=max_length,
        min_length=min(min_length, max_length),
        forced_bos=forced[0],
        forced_eos=forced[1],
        banned=tuple((token,) for token in banned if token != 5),
        first_banned=tuple(first_banned),
        ignore_eos=ignore_eos,
        scores=scores,
    )
    special = Special(START, NO_TOKEN if ignore_eos else END)
    starts = starts_of(rng, batch, max_length) if prefixed else []
    assert not unserved(options, COUNT)
    expected = [nbest[0] for nbest in drain(greedy_search(TableStep(table), batch, special, options, (), starts))]

    plan = greedy_plan(options, special, starts, batch, VOCAB, LENGTH)
    state = chain(table, plan, beams, scores, late=int(rng.integers(0, 4)))
    lengths = hypothesis_lengths(state["target"], special.end, plan.limit)
    for row, (found, length) in enumerate(zip(expected, lengths.tolist(), strict=True)):
        assert found.tokens == tuple(state["target"][row, :length].tolist())
        assert np.isfinite(state["top_logits"][row, :length]).all()
        if scores:
            kept = {name: state[name][row, :length].astype(np.float64) for name in RECORDED}
            log_probs = kept["chosen_logits"] - (kept["top_logits"] + np.log(kept["exp_sums"]))
            # Sums of twelve exponentials in fp32, in another order.
            np.testing.assert_allclose(log_probs, found.log_probs, rtol=0, atol=2 * VOCAB * 2.0**-24)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("scores", [True, False])
def test_logits_that_are_not_numbers_show_in_the_record_and_feed_some_token(bad, scores):
    table = np.zeros((2, LENGTH, VOCAB), dtype=np.float32)
    table[1, 0] = bad
    plan = greedy_plan(SearchOptions(max_length=1), Special(START, END), (), 2, VOCAB, LENGTH)
    state = chain(table, plan, 1, scores, late=1)
    shown = state["exp_sums" if scores else "top_logits"][:, 0]
    assert np.isfinite(shown).tolist() == [True, False]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"beam": 4}, "beam search"),
        ({"beam_style": "ctranslate2"}, "beam search"),
        ({"sample": True}, "sampling"),
        ({"alternatives": True, "nbest": 2}, "alternatives"),
        ({"alignments": True}, "alignments"),
        ({"shortlist": (3, 4)}, "shortlist"),
        ({"allowed": (3, 4)}, "list what is allowed"),
        ({"no_repeat_ngram": 2}, "read the output"),
        ({"repetition_penalty": 1.5}, "read the output"),
        ({"phrases": ((3, 4),)}, "list what is allowed"),
        ({"trie": trie_from_sequences([(3, 4)])}, "list what is allowed"),
        ({"banned": ((3, 4),)}, "read the output"),
        ({"banned": tuple((token,) for token in range(3, 10))}, "ban 7 tokens, more than 6"),
    ],
)
def test_what_the_device_cannot_search_with_is_named(changes, why):
    assert why in unserved(SearchOptions(**changes), COUNT)


def test_both_sides_count_the_same_rows_of_bans():
    assert ROWS == BAN_ROWS


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize(("scores", "launches"), [(True, 6), (False, 4)])
def test_tensorrt_launches_few_kernels(beams, scores, launches):
    made = next_greedy(32_000, 8, 256 * beams, 256, beams, scores)
    assert launches_of(made, *({"B": batch} for batch in (1, 8, 32))) == launches

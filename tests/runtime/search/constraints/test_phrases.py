"""Phrases: the automaton against plain tuples, outputs that always contain them, and the best of all such outputs."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scripted_step import SEEDED, ScriptedStep, by_hand, from_seed, from_table, run

from seq2engine.runtime.search.beam import beam_search
from seq2engine.runtime.search.constraints.phrases import contains, phrase_table
from seq2engine.runtime.search.greedy import greedy_search
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step import Special

SPECIAL = Special(start=0, end=1)
END = SPECIAL.end
PHRASES = st.lists(st.lists(st.integers(2, 5), min_size=1, max_size=3).map(tuple), min_size=1, max_size=3).map(tuple)


@settings(deadline=None)
@given(phrases=PHRASES, text=st.lists(st.integers(0, 6), max_size=8))
def test_missing_phrases_fit_in_the_needed_tokens(phrases: tuple[tuple[int, ...], ...], text: list[int]) -> None:
    table = phrase_table(phrases)
    missing = table.needed_after(text)
    outputs = [contains(tuple(text), phrase) for phrase in phrases]
    assert (missing == 0) == all(outputs)
    assert missing <= sum(len(phrase) for phrase, there in zip(phrases, outputs, strict=True) if not there)
    if missing:  # some token brings it down, by as much as it is worth
        assert min(table.needed_after([*text, token]) for token in table.alphabet.tolist()) < missing
    while missing:
        best = min(table.alphabet.tolist(), key=lambda token: table.needed_after([*text, token]))
        text, missing = [*text, best], missing - 1
    assert all(contains(tuple(text), phrase) for phrase in phrases)


@settings(max_examples=80, deadline=None)
@given(
    phrases=PHRASES,
    seed=st.integers(0, 1000),
    beam=st.sampled_from([1, 2, 3, 5]),
    beam_style=st.sampled_from(["huggingface", "ctranslate2"]),
    batch=st.integers(1, 9),
    room=st.integers(0, 4),
)
def test_outputs_contain_every_phrase(
    phrases: tuple[tuple[int, ...], ...], seed: int, beam: int, beam_style: str, batch: int, room: int
) -> None:
    """However little room the maximum length leaves; in a batch, each as if it were alone."""
    length = phrase_table(phrases).total + room
    options = (
        SearchOptions(
            max_length=length, beam=beam, nbest=(beam + 1) // 2, phrases=phrases, beam_style=beam_style, min_length=2
        )
        if length > 1
        else SearchOptions(max_length=length, beam=beam, phrases=phrases, beam_style=beam_style)
    )
    search = greedy_search if options.greedy else beam_search
    scripts = [from_seed(seed + row, vocab=8) for row in range(batch)]
    found, _ = run(search(ScriptedStep(scripts), batch, SPECIAL, options))
    for row, hypotheses in enumerate(found):
        assert hypotheses
        assert all(contains(found.tokens, phrase) for found in hypotheses for phrase in phrases)
        assert all(END not in found.tokens[:-1] for found in hypotheses)
        ((*alone,),), _ = run(search(ScriptedStep([scripts[row]]), 1, SPECIAL, options))
        assert alone == hypotheses


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000))
def test_a_wide_beam_finds_the_best_output_there_is(seed: int) -> None:
    """Of all texts of up to 4 of 4 tokens that contain both phrases, by trying them."""
    phrases, length = ((2, 3), (3,), (2,)), 4
    script = from_seed(seed, vocab=4)
    logs: dict[tuple[int, ...], np.ndarray] = {}

    def price(text: tuple[int, ...]) -> float:
        total = 0.0
        for i, token in enumerate(text):
            if text[:i] not in logs:
                logits = script(text[:i]).astype(np.float64)
                logs[text[:i]] = logits - np.log(np.exp(logits).sum())
            total += logs[text[:i]][token]
        return total

    texts = [(*words, END) for n in range(length) for words in itertools.product((0, 2, 3), repeat=n)]
    texts += list(itertools.product((0, 2, 3), repeat=length))
    best = max((text for text in texts if contains(text, (2, 3))), key=price)
    options = SearchOptions(max_length=length, beam=60, length_penalty=0.0, phrases=phrases, early_stopping="never")
    ((found, *_),), _ = run(beam_search(ScriptedStep([script]), 1, SPECIAL, options))
    assert found.tokens == best
    assert found.score == by_hand(price(best), len(best), **SEEDED)


def test_greedy_search_outputs_a_phrase_where_it_would_end_by_hand() -> None:
    script = from_table(
        {(): [0, 0.2, 0.7, 0.06, 0.04], (2,): [0, 0.8, 0.1, 0.02, 0.08], (2, 4): [0, 0.9, 0.05, 0.03, 0.02]},
        otherwise=[0, 0.9, 0.04, 0.03, 0.03],
    )
    options = SearchOptions(max_length=9, phrases=((3,), (4, 3)))
    ((found,),), _ = run(greedy_search(ScriptedStep([script]), 1, SPECIAL, options))
    assert found.tokens == (2, 4, 3, END)
    assert found.log_probs == by_hand(np.log([0.7, 0.08, 0.03, 0.9]))


def test_beams_are_kept_for_an_unlikely_phrase_by_hand() -> None:
    """Without beams of their own the phrase's tokens, at 0.01, would never be among the best continuations."""
    table = {(): [0, 0.01, 0.5, 0.48, 0.01]}
    otherwise = [0, 0.6, 0.2, 0.19, 0.01]
    script = from_table(table, otherwise)
    options = SearchOptions(max_length=30, beam=2, phrases=((4,),), length_penalty=0.0)
    ((found, *_),), emitted = run(beam_search(ScriptedStep([script]), 1, SPECIAL, options))
    assert found.tokens == (4, END)
    assert found.score == by_hand(np.log(0.01 * 0.6), 2)
    assert len(emitted) < 30


@pytest.mark.parametrize("beam", [1, 4])
def test_a_prefix_may_complete_phrases(beam: int) -> None:
    options: dict[str, Any] = {"max_length": 4, "beam": beam, "prefix": (3, 4)}
    script = from_seed(1, vocab=8)
    search = greedy_search if beam == 1 else beam_search
    ((found, *_),), _ = run(search(ScriptedStep([script]), 1, SPECIAL, SearchOptions(phrases=((4, 5, 6),), **options)))
    assert found.tokens == (3, 4, 5, 6)
    free, _ = run(search(ScriptedStep([script]), 1, SPECIAL, SearchOptions(**options)))
    outputs, _ = run(search(ScriptedStep([script]), 1, SPECIAL, SearchOptions(phrases=((3, 4),), **options)))
    assert outputs[0][0].tokens[:2] == free[0][0].tokens[:2] == (3, 4)

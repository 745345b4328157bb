"""Tries: the flat arrays against sets of tuples, and outputs that are always one of the given sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scripted_step import ScriptedStep, by_hand, from_seed, from_table, run

from seq2engine.errors import ConfigError, RequestError
from seq2engine.runtime.search.beam import beam_search
from seq2engine.runtime.search.constraints.trie import FAR, trie_from_sequences
from seq2engine.runtime.search.greedy import greedy_search
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.sampling import sampling_search
from seq2engine.runtime.search.step import Special

SPECIAL = Special(start=0, end=1)
END = SPECIAL.end
SEQUENCES = st.lists(st.lists(st.integers(2, 6), min_size=1, max_size=4).map(tuple), min_size=1, max_size=8)


@settings(deadline=None)
@given(sequences=SEQUENCES, barred=st.frozensets(st.integers(2, 6), max_size=3))
def test_the_tree_holds_the_sequences_and_nothing_else(
    sequences: list[tuple[int, ...]], barred: frozenset[int]
) -> None:
    trie = trie_from_sequences(sequences)
    prefixes = {words[:i] for words in sequences for i in range(len(words) + 1)}
    places = {prefix: trie.walked(prefix) for prefix in prefixes}
    assert sorted(places.values()) == list(range(len(trie.ends)))
    assert {prefix for prefix in prefixes if trie.ends[places[prefix]]} == set(sequences)
    assert trie.longest == max(map(len, sequences))
    nodes = np.array(list(places.values()))
    rows, edges = trie.children(nodes)
    found = {(list(places)[row], token) for row, token in zip(rows, trie.tokens_of(edges).tolist(), strict=True)}
    assert found == {(prefix[:-1], prefix[-1]) for prefix in prefixes if prefix}
    for prefix, place in places.items():
        rests = [words[len(prefix) :] for words in sequences if words[: len(prefix)] == prefix]
        open_ = [len(rest) for rest in rests if not barred & set(rest)]
        assert trie.least(barred)[place] == min(open_, default=FAR)
        assert trie.walked((*prefix, 9)) == -1
    assert (trie.after(np.array([-1, 0]), np.array([2, 99])) == -1).all()


def test_what_is_no_trie() -> None:
    with pytest.raises(ConfigError, match="a trie with an empty sequence, expected at least one token in each"):
        trie_from_sequences([(3,), ()])
    with pytest.raises(ConfigError, match="a trie with token -3, expected token ids from 0"):
        trie_from_sequences([(3,), (4, -3)])


@settings(max_examples=60, deadline=None)
@given(
    sequences=SEQUENCES,
    seed=st.integers(0, 1000),
    kind=st.sampled_from(["greedy", "beam", "sample"]),
    beam_style=st.sampled_from(["huggingface", "ctranslate2"]),
    batch=st.integers(1, 9),
    room=st.integers(0, 3),
)
def test_outputs_are_sequences_of_the_trie(
    sequences: list[tuple[int, ...]], seed: int, kind: str, beam_style: str, batch: int, room: int
) -> None:
    """However short the maximum length, as long as one sequence fits; in a batch, each as if it were alone."""
    shortest = min(map(len, sequences))
    values: dict[str, Any] = {"max_length": shortest + room, "beam_style": beam_style}
    if kind == "sample":
        values |= {"sample": True, "nbest": 2, "seed": 3}
    elif kind == "beam":
        values |= {"beam": 3, "nbest": 3}
    options = SearchOptions(trie=trie_from_sequences(sequences), **values)
    search = sampling_search if kind == "sample" else greedy_search if options.greedy else beam_search
    texts = [[row] for row in range(batch)]
    scripts = [from_seed(seed + row, vocab=8) for row in range(batch)]
    found, _ = run(search(ScriptedStep(scripts), batch, SPECIAL, options, texts))
    for row, hypotheses in enumerate(found):
        assert hypotheses
        for hypothesis in hypotheses:
            output = hypothesis.tokens[:-1] if hypothesis.tokens[-1] == END else hypothesis.tokens
            assert output in sequences
        ((*alone,),), _ = run(search(ScriptedStep([scripts[row]]), 1, SPECIAL, options, [texts[row]]))
        assert alone == hypotheses


def test_the_best_sequence_wins_by_hand() -> None:
    """3 5 has 0.1 * 0.9, 4 6 has 0.3 * 0.2; greedily 4 looks better."""
    script = from_table(
        {(): [0, 0.4, 0.2, 0.1, 0.3, 0, 0], (3,): [0, 0, 0.1, 0, 0, 0.9, 0], (4,): [0, 0.7, 0, 0.1, 0, 0, 0.2]},
        otherwise=[0, 1, 0, 0, 0, 0, 0],
    )
    trie = trie_from_sequences([(3, 5), (4, 6)])
    options = SearchOptions(max_length=4, beam=2, trie=trie, length_penalty=0.0)
    ((best, *_),), _ = run(beam_search(ScriptedStep([script]), 1, SPECIAL, options))
    assert best.tokens == (3, 5, END)
    assert best.score == by_hand(np.log(0.1 * 0.9), 2)
    ((greedy,),), _ = run(greedy_search(ScriptedStep([script]), 1, SPECIAL, SearchOptions(max_length=4, trie=trie)))
    assert greedy.tokens == (4, 6, END)
    assert greedy.log_probs == by_hand(np.log([0.3, 0.2, 1.0]))


def test_a_trie_begins_behind_the_forced_token_and_holds_a_prefix() -> None:
    trie = trie_from_sequences([(3, 5), (4, 6), (4, 7)])
    script = [from_seed(4, vocab=8)]
    options = SearchOptions(max_length=5, forced_bos=2, trie=trie)
    ((found,),), _ = run(greedy_search(ScriptedStep(script), 1, SPECIAL, options))
    assert found.tokens[0] == 2
    assert found.tokens[1:3] in [(3, 5), (4, 6), (4, 7)]
    options = SearchOptions(max_length=5, forced_bos=2, prefix=(2, 4), trie=trie, banned=((6,),))
    ((found,),), _ = run(greedy_search(ScriptedStep(script), 1, SPECIAL, options))
    assert found.tokens == (2, 4, 7, END)


def test_rules_that_bar_every_way_on_are_refused() -> None:
    options = SearchOptions(max_length=4, trie=trie_from_sequences([(3, 3)]), no_repeat_ngram=1)
    with pytest.raises(RequestError, match="forbid every token of the vocabulary; allow some"):
        run(greedy_search(ScriptedStep([from_seed(0, vocab=6)]), 1, SPECIAL, options))

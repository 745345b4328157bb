"""Error rates: against an independent count, closest reference, with and without stress."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seq2engine.errors import RequestError
from seq2engine.runtime.quality.metrics import (
    ErrorRates,
    edit_distance,
    quality_from_dict,
    quality_from_outputs,
    quality_head,
    quality_row,
    references_from_file,
)

tokens = st.lists(st.sampled_from("abc"), max_size=7)


def distance_by_definition(a, b):
    @cache
    def between(i, j):
        if i == len(a) or j == len(b):
            return len(a) - i + len(b) - j
        if a[i] == b[j]:
            return between(i + 1, j + 1)
        return 1 + min(between(i + 1, j), between(i, j + 1), between(i + 1, j + 1))

    return between(0, 0)


@given(tokens, tokens)
def test_edit_distance(a, b):
    assert edit_distance(a, b) == distance_by_definition(tuple(a), tuple(b))


def test_rates_by_hand():
    """Five phonemes right but one (a stress mark), two of two lines: the closer reference counts."""
    references = {"read": ["R EH1 D", "R IY1 D"], "a": ["AH0"], "the": ["DH AH0"]}
    outputs = {"read": "R IY0 D", "a": "AH0", "the": "DH"}
    quality = quality_from_outputs("greedy", outputs, references)
    assert quality.marked == ErrorRates(2 / 6, 2 / 3)
    assert quality.unmarked == ErrorRates(1 / 6, 1 / 3)
    assert quality_head([quality]) == ("search", "PER", "WER", "PER, no stress", "WER, no stress")
    assert quality_row(quality) == ("greedy", "33.33%", "66.67%", "16.67%", "33.33%")
    assert quality_from_dict(dataclasses.asdict(quality)) == quality


def test_a_word_error_rate_counts_words():
    """Two sentences of 4 and 5 words: one word substituted, one inserted, one deleted; CO2 is no phoneme."""
    references = {"s1": ["the CO2 is high"], "s2": ["a dog sat on mats"], "s3": ["yes"]}
    quality = quality_from_outputs(
        "greedy", {"s1": "the CO2 was so high", "s2": "a dog sat mats", "s3": "yes"}, references
    )
    assert quality.marked == ErrorRates(3 / 10, 2 / 3)
    assert quality.unmarked is None
    assert quality_head([quality]) == ("search", "WER", "lines wrong")
    assert quality_row(quality) == ("greedy", "30.00%", "66.67%")


def test_phonemes_of_a_sentence_have_no_word_error_rate():
    quality = quality_from_outputs("greedy", {"a word": "AH0 W"}, {"a word": ["AH0 W"]})
    assert quality.names == ("PER", "lines wrong")


def test_of_equally_close_references_the_shorter_counts():
    quality = quality_from_outputs("greedy", {"x": "a b"}, {"x": ["a b c", "a"]})
    assert quality.marked.tokens == 1.0
    assert quality.unmarked is None


def test_a_file_of_references(tmp_path):
    path = tmp_path / "test.tsv"
    path.write_text("b\tB 1\nb\tB 2\n" + "".join(f"w{i}\tW\n" for i in range(9)))
    assert references_from_file(path)["b"] == ["B 1", "B 2"]
    assert list(references_from_file(path, 5)) == ["b", "w1", "w3", "w5", "w7"]
    assert len(references_from_file(path, 100)) == 10
    with pytest.raises(RequestError, match="0 references asked for"):
        references_from_file(path, 0)
    path.write_text("")
    with pytest.raises(RequestError, match="holds no references"):
        references_from_file(path)

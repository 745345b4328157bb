"""Paths and medians are those of Hugging Face's code; words are cut, timed and punctuated as openai-whisper does it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.speech_models import LETTERS, WINDOW, sound, speech_model
from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter

from seq2engine.runtime.speech.alignment import cheapest_path, evidence, median_filtered
from seq2engine.runtime.speech.features import RATE
from seq2engine.runtime.speech.words import (
    Timed,
    merge_punctuation,
    shorten_after_pause,
    shorten_at_sentence_ends,
    split_words,
    usual_duration,
    whole_characters,
)
from seq2engine.runtime.translator import load


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 9), st.integers(1, 14), st.integers(0, 2**31), st.booleans())
def test_the_cheapest_path_is_the_library_s(height, width, seed, ties):
    cost = np.random.default_rng(seed).normal(size=(height, width))
    cost = np.round(cost) if ties else cost
    for found, expected in zip(cheapest_path(cost), _dynamic_time_warping(cost), strict=True):
        np.testing.assert_array_equal(found, expected)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20), st.sampled_from([1, 3, 7]), st.integers(0, 2**31))
def test_the_median_is_the_library_s(length, width, seed):
    values = np.random.default_rng(seed).normal(size=(2, 3, 4, length)).astype(np.float32)
    expected = _median_filter(torch.from_numpy(values), width)
    np.testing.assert_array_equal(median_filtered(values, width), expected.numpy())


def test_evidence_of_weights_that_are_all_alike_is_nothing():
    assert not evidence(np.full((2, 3, 10), 0.1, dtype=np.float32)).any()


class Letters:
    """A decoder that only knows text: tokens are bytes."""

    def text(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("text", "language", "words"),
    [
        (" Hello, world", "en", [" Hello", ",", " world"]),
        ("end.", None, ["end", "."]),
        ("你好", "zh", ["你", "好"]),
        (" é à", "fr", [" é", " à"]),
    ],
)
def test_words(text, language, words):
    found = split_words(Letters(), list(text.encode()), language)
    assert [Letters().text(ids) for ids in found] == words


def test_bytes_that_are_no_character_are_a_word_of_their_own():
    assert whole_characters(Letters(), [97, 0xFF, 98, 0xE4]) == [[97], [0xFF], [98], [0xE4]]


def words(*texts: str, length: float = 0.2) -> list[Timed]:
    return [Timed(text, place * length, (place + 1) * length, 0.5) for place, text in enumerate(texts)]


def test_punctuation_joins_its_word():
    made = words(" (", "Yes", ",", " no", ".", ")", ' "', "so")
    merge_punctuation(made)
    assert [one.text for one in made if one.text] == [" (Yes,", " no.)", ' "so']


def test_a_pause_is_no_part_of_a_word():
    made = words("a", ".", " b", " c")
    made[2].start, made[2].end = 0.4, 5.0
    assert usual_duration(made) == pytest.approx(0.2)
    shorten_at_sentence_ends(made, 0.4)
    assert made[2].start == pytest.approx(4.6)
    late = words(" a", " b")
    late[0].end = late[1].start = 9.0
    late[1].end = 9.2
    shorten_after_pause(late, 0.2, 0.0)
    assert late[0].start == pytest.approx(8.6)


def test_words_have_times_and_all_of_the_text(tmp_path_factory):
    small = speech_model(tmp_path_factory.mktemp("words"))
    plain = {"temperatures": (0.0,), "no_speech": None}
    with load(small.bundle, threads=1, attention=True) as model:
        for seed in range(3):
            found = model.transcribe(sound(2 * WINDOW, seed), words=True, **plain)
            assert found.segments
            for segment in found.segments:
                assert "".join(word.text for word in segment.words) == segment.text
                starts = [word.start for word in segment.words]
                assert starts == sorted(starts)
                for word in segment.words:
                    assert 0 <= word.start <= word.end <= 2 * WINDOW / RATE + 0.01
                    assert 0 < word.probability <= 1
                    assert set(word.text.replace(" ", "Ġ")) <= set(LETTERS)

"""Words of segments and their times, from where the tokens are in the audio."""

from __future__ import annotations

import itertools
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from seq2engine.model.speech import SECONDS_PER_TIMESTAMP

from .alignment import token_times
from .features import FRAMES_PER_SECOND
from .transcript import Segment, Word

if TYPE_CHECKING:
    from .decoding import Window, WindowDecoder

UNSPACED = ("zh", "ja", "th", "lo", "my", "yue")  # languages that put no spaces between words
BEFORE, BEHIND = "\"'“¿([{-", "\"'.。,，!！?？:：”)]}、"  # punctuation that belongs to the next or the previous word
SENTENCE_ENDS = ".。!！?？"
UNFINISHED = "\ufffd"  # what incomplete bytes of a character become
LONGEST = 0.7  # seconds that the usual word takes at most


@dataclass
class Timed:
    """A mutable word, until punctuation and pauses are assigned."""

    text: str
    start: float
    end: float
    probability: float


def words_of_segments(
    decoder: WindowDecoder, window: Window, segments: Sequence[Segment], frames: int, spoken: float
) -> tuple[list[Segment], float]:
    """The segments of a window with their words, and when the last one ends; `spoken` is when the last before ended."""
    texts = [[token for token in segment.tokens if token < decoder.config.end_id] for segment in segments]
    if not any(texts):
        return list(segments), spoken
    timed = timed_words(decoder, window, texts, frames)
    every = [one for words in timed for one in words]
    usual = usual_duration(every)
    shorten_at_sentence_ends(every, 2 * usual)
    result = []
    for segment, words in zip(segments, timed, strict=True):
        merge_punctuation(words)
        made = with_words(segment, [one for one in words if one.text], usual, spoken)
        spoken = made.end if made.words else spoken
        result.append(made)
    return result, spoken


def timed_words(
    decoder: WindowDecoder, window: Window, texts: Sequence[Sequence[int]], frames: int
) -> list[list[Timed]]:
    """The words of every text; a word never reaches from one into the next."""
    starts, probabilities = token_times(decoder, window, [token for text in texts for token in text], frames)
    times = window.first / FRAMES_PER_SECOND + starts * SECONDS_PER_TIMESTAMP
    found, first = [], 0
    for text in texts:
        words = []
        for ids in split_words(decoder, text, window.language):
            end = first + len(ids)
            likely = float(np.mean(probabilities[first:end]))
            words.append(Timed(decoder.text(ids), float(times[first]), float(times[end]), likely))
            first = end
        found.append(words)
    return found


def split_words(decoder: WindowDecoder, tokens: Sequence[int], language: str | None) -> list[list[int]]:
    """Tokens of text -> those of each word."""
    characters = whole_characters(decoder, tokens)
    if language in UNSPACED:
        return characters
    words: list[list[int]] = []
    for ids in characters:
        text = decoder.text(ids)
        begins = text.startswith(" ") or text.strip() in string.punctuation
        if begins or not words:
            words.append(list(ids))
        else:
            words[-1] += ids
    return words


def whole_characters(decoder: WindowDecoder, tokens: Sequence[int]) -> list[list[int]]:
    """The fewest tokens in a row that are whole characters; a character may be of several tokens."""
    full = decoder.text(tokens)
    found, held, offset = [], [], 0
    for token in tokens:
        held.append(token)
        text = decoder.text(held)
        place = text.find(UNFINISHED)
        if place < 0 or full[offset + place : offset + place + 1] == UNFINISHED:  # the model itself emitted such bytes
            found.append(held)
            offset += len(text)
            held = []
    return [*found, held] if held else found


def usual_duration(words: Sequence[Timed]) -> float:
    lengths = [one.end - one.start for one in words if one.end != one.start]
    return min(LONGEST, float(np.median(lengths))) if lengths else 0.0


def shorten_at_sentence_ends(words: Sequence[Timed], longest: float) -> None:
    """A pause between sentences is not part of a word."""
    for before, one in itertools.pairwise(words):
        if longest and one.end - one.start > longest:
            if one.text in SENTENCE_ENDS:
                one.end = one.start + longest
            elif before.text in SENTENCE_ENDS:
                one.start = one.end - longest


def merge_punctuation(words: Sequence[Timed]) -> None:
    """Punctuation becomes part of its word; its own place is left empty."""
    following = len(words) - 1
    for place in range(len(words) - 2, -1, -1):
        if words[place].text.startswith(" ") and words[place].text.strip() in BEFORE:
            words[following].text, words[place].text = words[place].text + words[following].text, ""
        else:
            following = place
    previous = 0
    for place in range(1, len(words)):
        if not words[previous].text.endswith(" ") and words[place].text in BEHIND:
            words[previous].text, words[place].text = words[previous].text + words[place].text, ""
        else:
            previous = place


def with_words(segment: Segment, words: list[Timed], usual: float, spoken: float) -> Segment:
    """A segment with its words. If their times differ by much, the segment's are kept; else the words'."""
    if not words:
        return segment
    shorten_after_pause(words, usual, spoken)
    first, last = words[0], words[-1]
    start, end = segment.start, segment.end
    if start < first.end and start - 0.5 > first.start:
        first.start = max(0.0, min(first.end - usual, start))
    else:
        start = first.start
    if end > last.start and end + 0.5 < last.end:
        last.end = max(last.start + usual, end)
    else:
        end = last.end
    made = tuple(Word(one.text, round(one.start, 2), round(one.end, 2), one.probability) for one in words)
    return replace(segment, start=round(start, 2), end=round(end, 2), words=made)


def shorten_after_pause(words: Sequence[Timed], usual: float, spoken: float) -> None:
    """The first word after a pause, and the second, take at most twice the usual time."""
    first, longest = words[0], 2 * usual
    second = words[1] if len(words) > 1 else None
    if first.end - spoken <= 4 * usual:
        return
    long_pair = second is not None and second.end - first.start > 2 * longest
    if first.end - first.start > longest or long_pair:
        if second is not None and second.end - second.start > longest:
            first.end = second.start = max(second.end / 2, second.end - longest)
        first.start = max(0.0, first.end - longest)

"""Timestamp tokens of speech models: where they may and must occur, by the rules of OpenAI's Whisper.

    <|0.00|> text <|2.40|><|2.40|> text <|5.12|>     in pairs; the first and the last may stand alone, times never fall

A timestamp is chosen wherever all of them together are likelier than the likeliest other token. Shapes: B sources,
K beams, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Timestamps:
    """The tokens from `first` (0.00 s) to the end of the vocabulary are timestamps; the one before asks for none.

    The first timestamp of an output is at most `latest` steps after 0.00 s (None: any).
    """

    first: int
    latest: int | None = None


class TimestampConstraint:
    """Leaves the tokens that may come next; the state of a beam is what its last two tokens and last timestamp were."""

    def __init__(self, timestamps: Timestamps, end: int):
        self.first, self.latest, self.end = timestamps.first, timestamps.latest, end
        self.is_time: np.ndarray = np.zeros((0, 0), dtype=bool)  # [B, K] whether the last token is a timestamp,
        self.was_time: np.ndarray = np.zeros((0, 0), dtype=bool)  # and the one before
        self.time: np.ndarray = np.zeros((0, 0), dtype=np.int64)  # the last timestamp, -1 for none

    def follow(self, tokens: np.ndarray, parents: np.ndarray, length: int) -> None:
        if length == 1:
            self.is_time = np.zeros(tokens.shape, dtype=bool)
            self.was_time = np.ones(tokens.shape, dtype=bool)  # so that a timestamp that comes first closes a pair
            self.time = np.full(tokens.shape, -1, dtype=np.int64)
            return
        if length > 2:
            self.was_time = np.take_along_axis(self.is_time, parents, axis=1)
        self.is_time = tokens >= self.first
        self.time = np.where(self.is_time, tokens, np.take_along_axis(self.time, parents, axis=1))

    def limit(self, logits: np.ndarray, length: int) -> np.ndarray:
        text, times = logits[..., : self.first], logits[..., self.first :]  # views
        text[..., -1] = -np.inf
        times[self.is_time & self.was_time] = -np.inf  # a pair is complete: text or the end
        lone = self.is_time & ~self.was_time
        text[..., : self.end][lone] = -np.inf  # a timestamp after text: its twin or the end
        earliest = np.where(self.time < 0, 0, self.time - self.first + ~lone)  # a segment is longer than 0 s
        times[np.arange(times.shape[-1]) < earliest[..., None]] = -np.inf
        if length == 1:
            text[...] = -np.inf
            if self.latest is not None:
                times[..., self.latest + 1 :] = -np.inf
        text[all_of(times) > text.max(axis=-1)] = -np.inf
        return logits

    def keep(self, rows: np.ndarray) -> None:
        self.is_time, self.was_time, self.time = self.is_time[rows], self.was_time[rows], self.time[rows]


def all_of(logits: np.ndarray) -> np.ndarray:
    """Logits [B,K,T] -> log of the sum of their exponentials [B,K]; -inf where all are."""
    best = logits.max(axis=-1)
    shift = np.where(np.isfinite(best), best, 0)
    with np.errstate(divide="ignore"):
        return shift + np.log(np.exp(logits - shift[..., None]).sum(axis=-1))

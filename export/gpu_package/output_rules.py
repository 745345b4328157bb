"""Which tokens may come next: the model's own rules, from package.json's "decode"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def forced_token(decode: Any, length: int) -> int | None:
    """The forced token of every output at a length, counted from 1; None where search chooses."""
    if length == decode["max_length"] and decode["forced_eos"] is not None:
        return int(decode["forced_eos"])
    return int(decode["forced_start"][length - 1]) if length <= len(decode["forced_start"]) else None


def allowed_logits(
    decode: Any, source: Sequence[int], output: list[int], logits: np.ndarray, length: int, normaliser: float = 0.0
) -> np.ndarray:
    """A copy of logits [V] with what may not follow `output`, which begins with the start token, at -inf.

    With a `normaliser` (log-sum-exp of the logits) the repetition penalty is one of log-probabilities.
    """
    end, found = decode["end"], logits.copy()
    if decode["repetition_penalty"] != 1.0:
        emitted, penalty = np.unique(output), decode["repetition_penalty"]
        values = found[emitted] - normaliser
        found[emitted] = np.where(values < 0, values * penalty, values / penalty) + normaliser
    for text, size in ((output, decode["no_repeat_ngram"]), (list(source), decode["source_no_repeat_ngram"])):
        found[completing(output, text, size)] = -np.inf
    for *before, last in decode["banned"]:
        # A ban of the end token alone is none: a decode must end.
        if output[len(output) - len(before) :] == before and (before or last != end):
            found[last] = -np.inf
    if decode["allowed"] is not None:
        barred = np.ones(len(found), dtype=bool)
        barred[[*decode["allowed"], end]] = False
        found[barred] = -np.inf
    if length == len(decode["forced_start"]) + 1:
        found[decode["first_banned"]] = -np.inf
    if length < decode["min_length"]:
        found[end] = -np.inf
    return found


def completing(output: list[int], text: list[int], size: int) -> list[int]:
    """Tokens that would complete an n-gram of a text after an output; none if size is 0."""
    if not size or len(output) < size - 1:
        return []
    ending = output[len(output) - (size - 1) :]
    return [text[i + size - 1] for i in range(len(text) - size + 1) if text[i : i + size - 1] == ending]

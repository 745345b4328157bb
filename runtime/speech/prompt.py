"""What the decoder is fed before it decodes: the previous text, the start token, language, task and no-timestamps.

A prompt is not part of the output: it is not searched and has no score or length. The logits after the start token give
the probability of no speech, and the language.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from seq2engine.model.speech import SpeechConfig


def prompt_tokens(
    speech: SpeechConfig,
    start: int,
    room: int,
    language: str | None,
    task: str,
    timestamps: bool,
    previous: Sequence[int] = (),
) -> list[int]:
    """The prompt of one window. Of the text before it, as many tokens are kept as leave half of the `room`."""
    asked = [start, *speech.prompt(language, task, timestamps)]
    kept = list(previous)[-(room // 2 - 1) :] if room // 2 > 1 else []
    return [speech.start_of_previous, *kept, *asked] if kept else asked


def probability_of(logits: np.ndarray, token: int) -> float:
    """Logits [V] -> the probability of one token, in fp64."""
    exact = logits.astype(np.float64)
    likely = np.exp(exact - exact.max())
    return float(likely[token] / likely.sum())


def likeliest_language(logits: np.ndarray, speech: SpeechConfig) -> tuple[str, float]:
    """The logits [V] after the start token -> the code of the language, and its probability among all languages."""
    codes = list(speech.languages)
    own = logits[[speech.languages[code] for code in codes]].astype(np.float64)
    likely = np.exp(own - own.max())
    best = int(own.argmax())
    return codes[best], float(likely[best] / likely.sum())

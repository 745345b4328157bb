"""Decodes windows of audio: search at temperature 0, and sampling where its output is rejected.

window -> prompt, search -> too repetitive or too unlikely? -> the next temperature
                         -> no speech? -> nothing
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from seq2engine.errors import RequestError
from seq2engine.model.speech import SpeechConfig
from seq2engine.model.tokenizers.base import Coder

from ..encoder_inputs import FeatureSource, encoder_inputs
from ..requests import problems_with_limits
from ..search.constraints.timestamps import Timestamps
from ..search.options import SearchOptions
from ..search.step import Hypothesis
from ..session import Session, State
from ..steps.tree_cache import TreeStep
from ..text.running_batch import Source
from .options import TranscribeOptions
from .prompt import likeliest_language, probability_of, prompt_tokens


@dataclass(frozen=True, eq=False)
class Window:
    """One window: features [mels,frames], the first frame's number, and the text before it."""

    features: np.ndarray = field(repr=False)
    first: int
    language: str | None
    timestamps: bool
    previous: tuple[int, ...] = ()


@dataclass(frozen=True)
class WindowOutput:
    """Tokens of a window without the end token, and the statistics that decide whether to trust them."""

    tokens: tuple[int, ...]
    text: str
    log_prob: (
        float  # the mean of its tokens' log-probabilities among those that the rules allow, the end token included
    )
    no_speech: float  # probability of no speech
    temperature: float

    @property
    def compression_ratio(self) -> float:
        """Bytes of the text to those of the compressed text: large if it repeats itself."""
        raw = self.text.encode("utf-8")
        return len(raw) / len(zlib.compress(raw))

    def fails(self, options: TranscribeOptions) -> bool:
        """Whether the next temperature should be tried."""
        if self.is_silence(options):
            return False
        repeats = options.compression_ratio is not None and self.compression_ratio > options.compression_ratio
        return repeats or self.is_unlikely(options)

    def is_unlikely(self, options: TranscribeOptions) -> bool:
        return options.log_prob is not None and self.log_prob < options.log_prob

    def is_silence(self, options: TranscribeOptions) -> bool:
        likely = options.log_prob is not None and self.log_prob > options.log_prob
        return options.no_speech is not None and self.no_speech > options.no_speech and not likely


class WindowDecoder:
    """How windows of any audio are decoded with one session (by window_batches.py)."""

    def __init__(self, session: Session, tokenizer: Coder, speech: SpeechConfig, options: TranscribeOptions):
        self.session, self.tokenizer, self.speech, self.options = session, tokenizer, speech, options
        self.config = session.config
        self.room = min(session.config.max_target, session.limits.target)
        self.latest: tuple[np.ndarray, State] | None = None  # features of a window that was encoded alone
        search = self.search_options(options.temperatures[0], True, self.room // 2)
        problems = problems_with_limits(session.limits, session.config, search)
        if options.words and not session.limits.attention:
            problems.append("times of words need cross-attention weights; open the model with attention=True")
        if problems:
            raise RequestError("; ".join(problems))

    def source(self, number: int, window: Window, temperature: float) -> Source:
        """A window as a source of a batch; the logits after the start token are requested."""
        prompt = self.prompt(window)
        most = min(self.options.max_length or self.room // 2, self.room - len(prompt))
        if most < 1:
            raise RequestError(
                f"a prompt of {len(prompt)} tokens leaves no room, the model takes {self.room}; shorten it"
            )
        options = self.search_options(temperature, window.timestamps, most)
        audio = FeatureSource(window.features, self.config.max_source)
        return Source(number, audio, options, prompt=prompt, asked=prompt.index(self.config.start_id))

    def output(self, hypotheses: Sequence[Hypothesis], at_start: np.ndarray, temperature: float) -> WindowOutput:
        """The hypotheses and the logits [V] after the start token -> the output of a window."""
        found = likeliest(hypotheses)
        tokens = found.tokens[:-1] if found.tokens[-1] == self.config.end_id else found.tokens
        mean = sum(found.log_probs) / len(found.log_probs)
        no_speech = probability_of(at_start, self.speech.no_speech)
        return WindowOutput(tokens, self.text(tokens).strip(), mean, no_speech, temperature)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special tokens and timestamps, whose ids all follow those of text."""
        return self.tokenizer.decode_target([token for token in tokens if token < self.config.end_id])

    def prompt(self, window: Window) -> list[int]:
        asked = window.language, self.options.task, window.timestamps, window.previous
        return prompt_tokens(self.speech, self.config.start_id, self.room, *asked)

    def encode(self, audios: Sequence[Sequence[int]]) -> State:
        """The state of windows. That of a single one is kept until the next is encoded: a language, other temperatures
        and words are of the same window. So one decode is done with it before the next asks for it."""
        features = [audio.features for audio in audios if isinstance(audio, FeatureSource)]
        if self.latest is not None and len(features) == 1 and self.latest[0] is features[0]:
            return self.latest[1]
        self.latest = None
        state = self.session.encode(*encoder_inputs(audios, self.config))
        if len(features) == 1:
            self.latest = features[0], state
        return state

    def encoded(self, window: Window) -> State:
        return self.encode([FeatureSource(window.features, self.config.max_source)])

    def language_of(self, window: Window) -> tuple[str, float]:
        """The likeliest language of a window, and its probability among all languages."""
        step = TreeStep(self.session, self.encoded(window), 1, 1, 1)
        answer = step(np.array([[self.config.start_id]]), np.zeros((1, 1), dtype=np.int64))
        return likeliest_language(answer.logits[0, 0], self.speech)

    def search_options(self, temperature: float, timestamps: bool, most: int) -> SearchOptions:
        own, speech = self.options, self.speech
        fields: dict[str, Any] = {"beam": own.beam, "length_penalty": own.length_penalty}
        if temperature > 0:
            samples = own.best_of if self.session.limits.beam is None else min(own.best_of, self.session.limits.beam)
            seed = own.seed * 10_000 + round(1000 * temperature)  # a different seed for each temperature
            fields = {"sample": True, "temperature": temperature, "nbest": samples, "seed": seed}
        return SearchOptions(
            max_length=most,
            banned=tuple((token,) for token in speech.suppressed),
            first_banned=speech.first_suppressed,
            timestamps=Timestamps(speech.first_timestamp, speech.latest_first_timestamp) if timestamps else None,
            allowed_log_probs=True,
            **fields,
        )


def likeliest(found: Sequence[Hypothesis]) -> Hypothesis:
    """Of a beam search's hypotheses the first; of samples the one with the largest mean log-probability."""
    return found[0] if len(found) == 1 else max(found, key=lambda one: sum(one.log_probs) / len(one.log_probs))

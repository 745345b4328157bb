"""Windows of audio become tokens: search at temperature 0, and sampling where its output cannot be right.

windows -> prompt, search -> too repetitive or too unlikely? -> the next temperature, for those windows only
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

from ..generate import form_from_options, search_over
from ..requests import problems_with_limits
from ..search.constraints.timestamps import Timestamps
from ..search.options import SearchOptions
from ..search.step import Hypothesis, drain
from ..session import Session, State
from ..tree_cache import TreeStep
from .options import TranscribeOptions
from .prompt import PromptedStep, likeliest_language, probabilities_of, prompt_tokens


@dataclass(frozen=True, eq=False)
class Window:
    """What the model hears at once: features [mels,frames], the first frame's number, and the text before it."""

    features: np.ndarray = field(repr=False)
    first: int
    language: str | None
    timestamps: bool
    previous: tuple[int, ...] = ()


@dataclass(frozen=True)
class WindowOutput:
    """Tokens of a window without the end token, and what says whether they can be right."""

    tokens: tuple[int, ...]
    text: str
    log_prob: (
        float  # the mean of its tokens' log-probabilities among those that the rules allow, the end token included
    )
    no_speech: float  # the probability that nobody speaks
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
    """Decodes windows of any audio with one session. The latest single window stays encoded."""

    def __init__(self, session: Session, tokenizer: Coder, speech: SpeechConfig, options: TranscribeOptions):
        self.session, self.tokenizer, self.speech, self.options = session, tokenizer, speech, options
        self.config = session.config
        self.room = min(session.config.max_target, session.limits.target)
        self.latest: tuple[Window, State] | None = None
        search = self.search_options(options.temperatures[0], True, self.room // 2)
        problems = problems_with_limits(session.limits, session.config, search)
        if options.words and not session.limits.attention:
            problems.append("times of words need cross-attention weights; open the model with attention=True")
        if problems:
            raise RequestError("; ".join(problems))

    def decode(self, windows: Sequence[Window]) -> list[WindowOutput]:
        """The best output of every window, all of them decoded together."""
        found: dict[int, WindowOutput] = {}
        places = list(range(len(windows)))
        for temperature in self.options.temperatures:
            for timestamps in (False, True):
                alike = [place for place in places if windows[place].timestamps == timestamps]
                if alike:
                    tried = self.decode_at([windows[place] for place in alike], temperature)
                    found.update(zip(alike, tried, strict=True))
            places = [place for place in places if found[place].fails(self.options)]
            if not places:
                break
        return [found[place] for place in range(len(windows))]

    def decode_at(self, windows: Sequence[Window], temperature: float) -> list[WindowOutput]:
        prompts = [self.prompt(window) for window in windows]
        longest = max(map(len, prompts))
        most = min(self.options.max_length or self.room // 2, self.room - longest)
        if most < 1:
            raise RequestError(f"a prompt of {longest} tokens leaves no room, the model takes {self.room}; shorten it")
        options = self.search_options(temperature, windows[0].timestamps, most)
        form = form_from_options(options, self.config)
        state = self.encoded(windows)
        tree = TreeStep(self.session, state, len(windows), options.width, options.max_length, form)
        step = PromptedStep(tree, prompts, self.config.start_id)
        keys = [[window.first, round(1000 * temperature)] for window in windows]  # what draws depend on
        best = [likeliest(found) for found in drain(search_over(step, keys, self.config, options))]
        assert step.at_start is not None
        silent = probabilities_of(step.at_start, self.speech.no_speech)
        return [self.output(one, float(none), temperature) for one, none in zip(best, silent, strict=True)]

    def output(self, found: Hypothesis, no_speech: float, temperature: float) -> WindowOutput:
        tokens = found.tokens[:-1] if found.tokens[-1] == self.config.end_id else found.tokens
        mean = sum(found.log_probs) / len(found.log_probs)
        return WindowOutput(tokens, self.text(tokens).strip(), mean, no_speech, temperature)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones and timestamps left out: they all come behind those of text."""
        return self.tokenizer.decode_target([token for token in tokens if token < self.config.end_id])

    def prompt(self, window: Window) -> list[int]:
        asked = window.language, self.options.task, window.timestamps, window.previous
        return prompt_tokens(self.speech, self.config.start_id, self.room, *asked)

    def encoded(self, windows: Sequence[Window]) -> State:
        if self.latest is not None and [self.latest[0]] == list(windows):
            return self.latest[1]
        self.latest = None
        features = np.stack([window.features for window in windows])
        state = self.session.encode(features, np.ones((len(features), self.config.max_source), dtype=bool))
        if len(windows) == 1:
            self.latest = windows[0], state
        return state

    def language_of(self, window: Window) -> tuple[str, float]:
        """The likeliest language of a window, and its probability among all languages."""
        step = TreeStep(self.session, self.encoded([window]), 1, 1, 1)
        answer = step(np.array([[self.config.start_id]]), np.zeros((1, 1), dtype=np.int64))
        return likeliest_language(answer.logits[0, 0], self.speech)

    def search_options(self, temperature: float, timestamps: bool, most: int) -> SearchOptions:
        own, speech = self.options, self.speech
        fields: dict[str, Any] = {"beam": own.beam, "length_penalty": own.length_penalty}
        if temperature > 0:
            samples = own.best_of if self.session.limits.beam is None else min(own.best_of, self.session.limits.beam)
            fields = {"sample": True, "temperature": temperature, "nbest": samples, "seed": own.seed}
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

"""What search is: the one thing it sees of a model, what it may be asked for, and what it gives back.

Greedy and beam search are generators over a `Step`. They know nothing of engines, caches or text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..errors import ConfigError


class Step(Protocol):
    """One decoder step for K beams of B sources.

    A call takes the tokens just chosen [B,K] and, for each, the beam [B,K] of the previous call that it continues
    (ignored in the first call), and returns the next token's logits [B,K,V], which stay valid until the next call.
    """

    def __call__(self, tokens: np.ndarray, parents: np.ndarray) -> np.ndarray: ...

    def keep(self, rows: np.ndarray) -> None:
        """From the next call on only these sources (indices into the current B) are decoded."""


@dataclass(frozen=True)
class SearchOptions:
    """How to decode, in the words of Hugging Face `generate`.

    `max_length` and `min_length` count new tokens, the end token too. `forced_bos` is what every output begins with
    (the target language, in models that have several), `forced_eos` what it ends with when it is cut off at the maximum
    length. `banned` are tokens, and sequences of tokens, that are never said. A repeated n-gram is one that the output
    has said before, or, for `source_no_repeat_ngram`, one that stands in the source; 0 allows them.
    """

    max_length: int = 64
    beam: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False  # True, False or "never"
    nbest: int = 1
    min_length: int = 0
    start: int | None = None  # what the decoder is fed first; None: the model's own start token
    forced_bos: int | None = None
    forced_eos: int | None = None
    banned: tuple[tuple[int, ...], ...] = ()
    no_repeat_ngram: int = 0
    source_no_repeat_ngram: int = 0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        problems = []
        if self.max_length < 1:
            problems.append(f"max length {self.max_length}, expected at least 1")
        if self.beam < 1:
            problems.append(f"beam {self.beam}, expected at least 1")
        if not 1 <= self.nbest <= max(self.beam, 1):
            problems.append(f"nbest {self.nbest}, expected 1 to the beam size {self.beam}")
        if self.early_stopping not in (True, False, "never"):
            problems.append(f"early stopping {self.early_stopping!r}, expected true, false or never")
        if not 0 <= self.min_length <= max(self.max_length, 1):
            problems.append(f"min length {self.min_length}, expected 0 to the max length {self.max_length}")
        for name in ("no_repeat_ngram", "source_no_repeat_ngram"):
            if getattr(self, name) < 0:
                problems.append(f"{name.replace('_', ' ')} {getattr(self, name)}, expected 0 (none) or more")
        if not self.repetition_penalty > 0:
            problems.append(f"repetition penalty {self.repetition_penalty}, expected more than 0")
        if not all(self.banned):
            problems.append("a banned sequence is empty, expected at least one token")
        if problems:
            raise ConfigError("search options: " + "; ".join(problems))

    def unknown_tokens(self, vocab: int) -> list[int]:
        """Token ids asked for that a vocabulary of this size does not have."""
        named = [token for token in (self.start, self.forced_bos, self.forced_eos) if token is not None]
        named += [token for words in self.banned for token in words]
        return [token for token in named if not 0 <= token < vocab]


def options_from_values(values: Mapping[str, Any], longest: int, where: str, **given: Any) -> SearchOptions:
    """A model's own way of decoding, as JSON has it, with what a user asked for instead (None: nothing).

    `longest` is the most a session can decode. The model's own lengths give way to it, and to the user's; what the
    user asks for is taken at its word.
    """
    known = {field.name for field in dataclasses.fields(SearchOptions)}
    if unknown := sorted(values.keys() - known):
        raise ConfigError(f"{where}: unknown field {unknown[0]!r}; expected fields of SearchOptions")
    merged = {"max_length": longest, **values}
    merged["max_length"] = min(merged["max_length"], longest)
    merged["banned"] = tuple(tuple(words) for words in merged.get("banned", ()))
    merged.update({name: value for name, value in given.items() if value is not None})
    if given.get("min_length") is None:
        merged["min_length"] = min(merged.get("min_length", 0), merged["max_length"])
    return SearchOptions(**merged)


@dataclass(frozen=True)
class Special:
    """The token ids a search must know."""

    start: int
    end: int


@dataclass(frozen=True)
class Hypothesis:
    """One output: tokens without the start token, with the end token if it was reached, and its score."""

    tokens: tuple[int, ...]
    score: float


@dataclass(frozen=True)
class Emitted:
    """What one step of a search did: the sources it worked on, its choice, and the logits it chose from.

    `sources` [B] are indices into the original batch, `tokens` and `parents` [B,K] the beams that go on, `logits`
    [B,K,V] the model's answer (valid until the search goes on), `done` [B] the sources that need no more steps.
    """

    step: int
    sources: np.ndarray
    tokens: np.ndarray
    parents: np.ndarray
    logits: np.ndarray
    done: np.ndarray


Search = Generator[Emitted, None, list[list[Hypothesis]]]  # returns n-best hypotheses of every source, best first

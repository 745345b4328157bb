"""What search is: the one thing it sees of a model, what it may be asked for, and what it gives back.

Greedy search, beam search and sampling are generators over a `Step`. They know nothing of engines, caches or text.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..errors import ConfigError
from .answers import Answer

SEMANTICS = ("huggingface", "fairseq", "ctranslate2", "marian")  # whose beam search; semantics.py says what they mean


class Step(Protocol):
    """One decoder step for K beams of B sources.

    A call takes the tokens just chosen [B,K] and, for each, the beam [B,K] of the previous call that it continues
    (ignored in the first call), and returns the answer for the next token, which stays valid until the next call.
    """

    def __call__(self, tokens: np.ndarray, parents: np.ndarray) -> Answer: ...

    def keep(self, rows: np.ndarray) -> None:
        """From the next call on only these sources (indices into the current B) are decoded."""


@dataclass(frozen=True)
class SearchOptions:
    """How to decode, in the words of Hugging Face `generate`.

    `max_length` and `min_length` count new tokens, the end token too. `forced_bos` is what every output begins with
    (the target language, in models that have several), `forced_eos` what it ends with when it is cut off at the maximum
    length. `prefix` are the tokens that every output begins with; they are forced like `forced_bos`, cost beam search
    nothing, and count as said. `banned` are tokens, and sequences of tokens, that are never said; `first_banned` tokens
    that may not come first, after what is forced; `allowed`, where given, the only ones that may be said beside the end
    token. `shortlist`, where given, is all the vocabulary there is beside the end token: others are not only never
    said, as with `allowed`, but have no probability, and need not be computed. A repeated n-gram is one that the
    output has said before, or, for `source_no_repeat_ngram`, one that stands in the source; 0 allows them.

    With `sample`, tokens are drawn, and `nbest` counts independent outputs of a source: from the `top_k` likeliest (0:
    all), and of those from as few as make up `top_p`, after division of the logits by `temperature`. A `seed` gives a
    source the same outputs again, whatever its neighbours (None: others every time).

    `semantics` names the library whose beam search this is. `early_stopping` is Hugging Face's and means nothing to the
    others; `patience` is CTranslate2's: so many times the beam must end before a source is done.
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
    prefix: tuple[int, ...] = ()
    banned: tuple[tuple[int, ...], ...] = ()
    first_banned: tuple[int, ...] = ()
    allowed: tuple[int, ...] | None = None
    shortlist: tuple[int, ...] | None = None
    no_repeat_ngram: int = 0
    source_no_repeat_ngram: int = 0
    repetition_penalty: float = 1.0
    sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    semantics: str = "huggingface"
    patience: float = 1.0

    def __post_init__(self) -> None:
        if problems := [*self._problems_of_numbers(), *self._problems_of_sampling(), *self._problems_of_tokens()]:
            raise ConfigError("search options: " + "; ".join(problems))

    @property
    def greedy(self) -> bool:
        """Whether greedy search will do: with one beam, only Hugging Face has rules of its own for that."""
        return self.beam == 1 and self.semantics == "huggingface"

    @property
    def width(self) -> int:
        """How many sequences of a source are decoded side by side: K."""
        return self.nbest if self.sample else self.beam

    @property
    def forced_start(self) -> tuple[int, ...]:
        """What every output begins with, whatever the model makes of it."""
        return self.prefix or (() if self.forced_bos is None else (self.forced_bos,))

    @property
    def always_banned(self) -> frozenset[int]:
        """Single tokens that are banned wherever they stand; a ban of the end token is no ban, as a search must end."""
        return frozenset(words[0] for words in self.banned if len(words) == 1)

    @property
    def _lists(self) -> dict[str, frozenset[int]]:
        """The only tokens that may be said beside the end token, where such are given."""
        lists = {"allowed": self.allowed, "in the shortlist": self.shortlist}
        return {what: frozenset(tokens) for what, tokens in lists.items() if tokens is not None}

    def _problems_of_numbers(self) -> Iterator[str]:
        if self.max_length < 1:
            yield f"max length {self.max_length}, expected at least 1"
        if self.beam < 1:
            yield f"beam {self.beam}, expected at least 1"
        if not self.sample and not 1 <= self.nbest <= max(self.beam, 1):
            yield f"nbest {self.nbest}, expected 1 to the beam size {self.beam}"
        if self.sample and self.nbest < 1:
            yield f"nbest {self.nbest}, expected at least 1 sample"
        if self.early_stopping not in (True, False, "never"):
            yield f"early stopping {self.early_stopping!r}, expected true, false or never"
        if not 0 <= self.min_length <= max(self.max_length, 1):
            yield f"min length {self.min_length}, expected 0 to the max length {self.max_length}"
        for name in ("no_repeat_ngram", "source_no_repeat_ngram", "top_k"):
            if getattr(self, name) < 0:
                yield f"{name.replace('_', ' ')} {getattr(self, name)}, expected 0 (none) or more"
        if not self.repetition_penalty > 0:
            yield f"repetition penalty {self.repetition_penalty}, expected more than 0"
        if self.semantics not in SEMANTICS:
            yield f"semantics {self.semantics!r}, expected one of {', '.join(SEMANTICS)}"
        if self.patience != 1.0 and self.semantics != "ctranslate2":
            yield f"patience {self.patience}, expected 1, unless semantics are ctranslate2"
        elif self.patience != 1.0 and not self.beam * self.patience + 0.5 >= self.nbest:
            yield f"patience {self.patience}, expected at least nbest {self.nbest} / beam {self.beam}"

    def _problems_of_sampling(self) -> Iterator[str]:
        if not 0 < self.temperature < math.inf:
            yield f"temperature {self.temperature}, expected more than 0"
        if not 0 < self.top_p <= 1:
            yield f"top p {self.top_p}, expected more than 0 and at most 1"
        if self.seed is not None and self.seed < 0:
            yield f"seed {self.seed}, expected 0 or more"
        if self.sample and self.beam > 1:
            yield f"beam {self.beam} together with sample, expected beam 1 (nbest counts samples)"
        idle = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": None}
        if not self.sample and (set_ := [name for name, value in idle.items() if getattr(self, name) != value]):
            yield f"{', '.join(set_).replace('_', ' ')} without sample, expected it with sample only"

    def _problems_of_tokens(self) -> Iterator[str]:
        """Wishes that cannot all be met, as far as they can be told without a model."""
        if not all(self.banned):
            yield "a banned sequence is empty, expected at least one token"
        if self._lists and not frozenset.intersection(*self._lists.values()) - self.always_banned:
            yield "no token is allowed, expected one at least that is not banned"
        if len(self.prefix) > self.max_length:
            yield f"a prefix of {len(self.prefix)} tokens, expected at most the max length {self.max_length}"
        elif self.forced_eos is not None and len(self.prefix) == self.max_length:
            yield f"a prefix of {len(self.prefix)} tokens leaves no room for forced eos, expected fewer"
        if self.prefix and self.forced_bos not in (None, self.prefix[0]):
            yield f"prefix begins with {self.prefix[0]}, but forced bos is {self.forced_bos}; begin the prefix with it"
        forced = self.forced_start
        name = "prefix" if self.prefix else "forced bos"
        for words in self.banned:
            if words and any(forced[i : i + len(words)] == words for i in range(len(forced))):
                yield f"{name} has {' '.join(map(str, words))}, which is banned"
        for what, tokens in self._lists.items():
            if barred := [token for token in forced if token not in tokens]:
                yield f"{name} has {' '.join(map(str, barred))}, which is not {what}"

    def problems_with(self, vocab: int, end: int) -> list[str]:
        """What a model with this vocabulary and this end token cannot do; nothing where all is well."""
        problems = []
        if unknown := self.unknown_tokens(vocab):
            problems.append(f"token {', '.join(map(str, unknown))} asked for, but the vocabulary has 0 to {vocab - 1}")
        if end in self.prefix:
            problems.append(f"the prefix has the end token {end}, expected it nowhere in a prefix")
        last = self.forced_eos
        if last not in (None, end):
            if last in self.always_banned:
                problems.append(f"forced eos is {last}, which is banned")
            barred = [what for what, tokens in self._lists.items() if last not in tokens]
            problems += [f"forced eos is {last}, which is not {what}" for what in barred]
        return problems

    def unknown_tokens(self, vocab: int) -> list[int]:
        """Token ids asked for that a vocabulary of this size does not have."""
        named = [token for token in (self.start, self.forced_bos, self.forced_eos) if token is not None]
        named += [token for words in self.banned for token in words]
        named += [*self.prefix, *self.first_banned, *(self.allowed or ()), *(self.shortlist or ())]
        return sorted({token for token in named if not 0 <= token < vocab})


TOKEN_LISTS = ("prefix", "first_banned", "allowed", "shortlist")  # fields that JSON has as lists


def options_from_values(values: Mapping[str, Any], longest: int, where: str, **given: Any) -> SearchOptions:
    """A model's own way of decoding, as JSON has it, with what a user asked for instead (None: nothing).

    `longest` is the most a session can decode. The model's own lengths give way to it, and to the user's, and its own
    beams to sampling; what the user asks for is taken at its word.
    """
    known = {field.name for field in dataclasses.fields(SearchOptions)}
    if unknown := sorted(values.keys() - known):
        raise ConfigError(f"{where}: unknown field {unknown[0]!r}; expected fields of SearchOptions")
    merged = {"max_length": longest, **values}
    merged["max_length"] = min(merged["max_length"], longest)
    merged["banned"] = tuple(tuple(words) for words in merged.get("banned", ()))
    merged.update({name: tuple(merged[name]) for name in TOKEN_LISTS if merged.get(name) is not None})
    if given.get("sample"):
        merged["beam"] = 1
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
    """What one step of a search did: the sources it worked on, its choice, and the answer it chose from.

    `sources` [B] are indices into the original batch, `tokens` and `parents` [B,K] the beams that go on, `answer` is
    the model's (valid until the search goes on), `done` [B] the sources that need no more steps.
    """

    step: int
    sources: np.ndarray
    tokens: np.ndarray
    parents: np.ndarray
    answer: Answer
    done: np.ndarray


Search = Generator[Emitted, None, list[list[Hypothesis]]]  # returns n-best hypotheses of every source, best first

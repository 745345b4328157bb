"""What search is: the one thing it sees of a model, what it may be asked for, and what it gives back.

Greedy search, beam search and sampling are generators over a `Step`. They know nothing of engines, caches or text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from seq2engine.errors import ConfigError, UsageError

from .option_checks import problems_of, problems_with_model
from .step_output import Answer
from .trie import Trie, trie_from_sequences


class Step(Protocol):
    """One decoder step for K beams of B sources.

    A call takes the tokens just chosen [B,K] and, for each, the beam [B,K] of the previous call that it continues
    (ignored in the first call), and returns the answer for the next token, which stays valid until the next call.
    """

    def __call__(self, tokens: np.ndarray, parents: np.ndarray) -> Answer: ...

    def keep(self, rows: np.ndarray) -> None:
        """From the next call on only these sources (indices into the current B) are decoded."""

    def attention(self) -> np.ndarray:
        """Where the beams of the latest call looked: [B,K,S], 0 for padding. Only where the session keeps it."""


LEAST_CANDIDATES = 2  # of one beam: its best and, in case that is the end token, the next


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

    `coverage_penalty` lowers a beam hypothesis's score, once it has ended, by as much as it looked past the source:
    beta * sum over source tokens of log(min(what all steps looked at it, 1)) (Wu et al. 2016). `alignments` asks for
    the source token that each output token looked at most. Both read the last decoder layer's cross-attention, the mean
    of all its heads, and need a session that keeps it (`open_session(..., attention=True)`).

    Without `scores`, greedy search need not compute the probabilities it adds up, and where a session has a shortcut to
    the best token (`Session.unscored`) it says the same tokens sooner; scores are NaN then. Others need them anyway.

    Every one of `phrases` is in the output. A `trie` (of `trie_from_sequences`) has all outputs there are: after each
    of its prefixes only what it goes on with, the end token where a sequence ends. It begins behind `forced_bos`.

    With `alternatives`, the `nbest` likeliest tokens that come next, after the prefix, each begin one hypothesis, which
    greedy or beam search completes; none for tokens less likely than `min_alternative_expansion_prob`. Their score is
    the token's log-probability plus the score of what follows, as in CTranslate2.
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
    coverage_penalty: float = 0.0
    phrases: tuple[tuple[int, ...], ...] = ()
    trie: Trie | None = None
    alternatives: bool = False
    min_alternative_expansion_prob: float = 0.0
    alignments: bool = False
    scores: bool = True

    def __post_init__(self) -> None:
        if problems := problems_of(self):
            raise ConfigError("search options: " + "; ".join(problems))

    @property
    def greedy(self) -> bool:
        """Whether greedy search will do: with one beam, only Hugging Face has rules of its own for that."""
        return self.beam == 1 and self.semantics == "huggingface"

    @property
    def unscored(self) -> bool:
        """Whether nothing is asked for but the likeliest tokens."""
        return not self.scores and self.greedy and not self.sample and not self.alternatives

    @property
    def unruled(self) -> bool:
        """Whether every token may come next, any time, as the model has it."""
        forced = self.forced_start or self.forced_eos is not None or self.alternatives
        return not forced and self.candidates == LEAST_CANDIDATES

    @property
    def candidates(self) -> int:
        """How many of the likeliest tokens are sure to have one that may come next; 0 if no number is.

        Rules that bar some tokens by name bar no more than these, and a forced one needs no candidates at all.
        """
        listed = self.allowed is not None or self.phrases or self.trie is not None
        repeating = self.no_repeat_ngram or self.source_no_repeat_ngram or self.repetition_penalty != 1.0
        if listed or repeating or any(len(words) > 1 for words in self.banned):
            return 0
        return LEAST_CANDIDATES + len(self.banned) + len(self.first_banned) + (self.min_length > 1)

    @property
    def width(self) -> int:
        """How many sequences of a source are decoded side by side: K."""
        return self.beam * (self.nbest if self.sample or self.alternatives else 1)

    @property
    def kept(self) -> int:
        """How many hypotheses one search gives back: every alternative is a search of its own."""
        return 1 if self.alternatives else self.nbest

    @property
    def needs_attention(self) -> bool:
        return self.alignments or self.coverage_penalty != 0.0

    @property
    def forced_start(self) -> tuple[int, ...]:
        """What every output begins with, whatever the model makes of it."""
        return self.prefix or (() if self.forced_bos is None else (self.forced_bos,))

    @property
    def always_banned(self) -> frozenset[int]:
        """Single tokens that are banned wherever they stand; a ban of the end token is no ban, as a search must end."""
        return frozenset(words[0] for words in self.banned if len(words) == 1)

    def problems_with(self, vocab: int, end: int) -> list[str]:
        """What a model with this vocabulary and this end token cannot do; nothing where all is well."""
        return problems_with_model(self, vocab, end)


TOKEN_LISTS = ("prefix", "first_banned", "allowed", "shortlist")  # fields that JSON has as lists
SEQUENCE_LISTS = ("banned", "phrases")  # and as lists of lists


def options_from_values(
    values: Mapping[str, Any],
    longest: int,
    where: str,
    also: Callable[[SearchOptions], list[str]] = lambda options: [],
    **given: Any,
) -> SearchOptions:
    """A model's own way of decoding, as JSON has it, with what a user asked for instead (None: nothing).

    `longest` is the most a session can decode. The model's own lengths give way to it, and to the user's, and its own
    beams to sampling; what the user asks for is taken at its word. `also` says what else is wrong with options, which
    may be wrong already: those who will run them have more to hold against them, and a user wants to hear it all.
    """
    known = {field.name for field in dataclasses.fields(SearchOptions)}
    if unknown := sorted(values.keys() - known):
        raise ConfigError(f"{where}: unknown field {unknown[0]!r}; expected fields of SearchOptions")
    merged = {"max_length": longest, **values}
    merged["max_length"] = min(merged["max_length"], longest)
    merged.update({name: tuple(tuple(words) for words in merged.get(name, ())) for name in SEQUENCE_LISTS})
    if merged.get("trie") is not None:
        merged["trie"] = trie_from_sequences(merged["trie"])
    merged.update({name: tuple(merged[name]) for name in TOKEN_LISTS if merged.get(name) is not None})
    if given.get("sample"):
        merged["beam"] = 1
    merged.update({name: value for name, value in given.items() if value is not None})
    if given.get("min_length") is None:
        merged["min_length"] = min(merged.get("min_length", 0), merged["max_length"])
    unchecked = unchecked_options(merged)
    if problems := [*problems_of(unchecked), *also(unchecked)]:
        own = unchecked_options({name: value for name, value in merged.items() if given.get(name) is None})
        kind = UsageError if problems_of(unchecked) and not problems_of(own) else ConfigError
        raise kind("search options: " + "; ".join(problems))
    return SearchOptions(**merged)


def unchecked_options(values: Mapping[str, Any]) -> SearchOptions:
    """Options that may be wrong, only to ask what is wrong with them."""
    options = object.__new__(SearchOptions)
    for one in dataclasses.fields(SearchOptions):
        object.__setattr__(options, one.name, values.get(one.name, one.default))
    return options


@dataclass(frozen=True)
class Special:
    """The token ids a search must know."""

    start: int
    end: int


@dataclass(frozen=True)
class Start:
    """What one source's output begins with: a prefix, and then, if it is an alternative, its so manieth best token."""

    prefix: tuple[int, ...] = ()
    rank: int | None = None  # 0 is the best


@dataclass(frozen=True)
class Hypothesis:
    """One output: tokens without the start token, with the end token if it was reached, and its score.

    `log_probs` are its tokens' log-probabilities as the model has them, forced ones too, so that they are what
    `score_targets` says of these tokens. `alignments` are, where asked for, the places in the source that each of them
    looked at most. Two hypotheses are the same if they say the same at the same score. One without a score has NaN.
    """

    tokens: tuple[int, ...]
    score: float
    log_probs: tuple[float, ...] = field(default=(), compare=False, repr=False)
    alignments: tuple[int, ...] = field(default=(), compare=False, repr=False)


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

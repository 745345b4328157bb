"""How to decode: the search options, and the model's own defaults merged with what a user asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from seq2engine.errors import ConfigError, UsageError

from .option_checks import problems_of
from .option_fields import OptionFields
from .trie import trie_from_sequences


@dataclass(frozen=True)
class SearchOptions(OptionFields):
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

    def __post_init__(self) -> None:
        if problems := problems_of(self):
            raise ConfigError("search options: " + "; ".join(problems))


TOKEN_LISTS = ("prefix", "first_banned", "allowed", "shortlist")  # fields that JSON has as lists


SEQUENCE_LISTS = ("banned", "phrases")  # and as lists of lists


def options_from_values(
    values: Mapping[str, Any],
    longest: int,
    where: str,
    also: Callable[[OptionFields], list[str]] = lambda options: [],
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
    unchecked = OptionFields(**merged)
    if problems := [*problems_of(unchecked), *also(unchecked)]:
        own = OptionFields(**{name: value for name, value in merged.items() if given.get(name) is None})
        kind = UsageError if problems_of(unchecked) and not problems_of(own) else ConfigError
        raise kind("search options: " + "; ".join(problems))
    return SearchOptions(**merged)

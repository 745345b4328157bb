"""How to decode: the search options, and the model's own defaults merged with what a user asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from seq2engine.common.json_files import fields_from_json, hints_of
from seq2engine.errors import ConfigError, UsageError

from .constraints.trie import trie_from_sequences
from .option_checks import problems_of
from .option_fields import OptionFields


@dataclass(frozen=True)
class SearchOptions(OptionFields):
    """How to decode, in the words of Hugging Face `generate`.

    `max_length` and `min_length` count new tokens, the end token included. `forced_bos` is the token that every output
    begins with (the target language, in models that have several), `forced_eos` the one it ends with if it is cut at
    the maximum length. `prompt` are tokens that the decoder is fed after its start token, before it emits anything:
    they are read at once and are not part of the output. `prefix` are tokens that every output begins with; they are
    forced like `forced_bos`, cost beam search nothing, and are part of the output. `banned` are tokens, and
    sequences of tokens, that never occur;
    `first_banned` tokens that may not come first, after the forced ones; `allowed`, if given, the only ones beside the
    end token. `shortlist`, if given, is the whole vocabulary beside the end token: other tokens are not only forbidden,
    as with `allowed`, but have no probability, and need not be computed. A repeated n-gram is one that the output
    already has or, for `source_no_repeat_ngram`, one of the source; 0 allows them.

    With `sample`, tokens are drawn, and `nbest` counts independent outputs of a source: from the `top_k` likeliest (0:
    all), and of those from the fewest whose probabilities sum to `top_p`, after division of the logits by
    `temperature`. With a `seed`, a source gets the same outputs again, whatever the rest of the batch (None: different
    ones every time).

    `beam_style` names the library whose beam search this is: "huggingface" or "ctranslate2". `early_stopping` is an
    option of Hugging Face's, `patience` one of CTranslate2's: beam * patience hypotheses must finish before a source is
    done.

    `coverage_penalty` (beta) lowers the score of a finished hypothesis by how much of the source it left unattended:
    beta * sum over source tokens of log(min(attention summed over steps, 1)) (Wu et al. 2016). `alignments` asks for
    the source position with the largest weight, for each output token. Both read the last decoder layer's
    cross-attention weights, the mean of its heads, and need a session that keeps them (`open_session(...,
    attention=True)`).

    With `ignore_eos` the end token is a token like any other, as in vLLM: every output has `max_length` tokens, so that
    decodes of one length can be timed.

    Without `scores`, greedy search need not compute probabilities: a session with a faster path to the best token
    takes it and returns the same tokens, and scores are NaN. Other searches compute them anyway.

    Constrained decoding: every one of `phrases` is in the output. A `trie` (from `trie_from_sequences`) holds all
    possible outputs: after each of its prefixes only tokens that continue it are allowed, and the end token where a
    sequence ends. It starts after `forced_bos`.

    `timestamps` are tokens in pairs around pieces of text, by the rules of Whisper (timestamps.py). With
    `allowed_log_probs`, the log-probabilities of a hypothesis are those among the tokens that the rules leave, not the
    model's own; beam search still adds up the model's own.

    With `alternatives`, each of the `nbest` likeliest tokens after the prefix begins one hypothesis, which greedy or
    beam search completes; none for tokens less likely than `min_alternative_expansion_prob`. The score is the token's
    log-probability plus the score of what follows, as in CTranslate2.
    """

    def __post_init__(self) -> None:
        if problems := problems_of(self):
            raise ConfigError("search options: " + "; ".join(problems))


# The types of the fields in JSON: as they are here, but a trie is the list of its sequences.
KINDS: dict[str, Any] = {**hints_of(OptionFields), "trie": tuple[tuple[int, ...], ...] | None, "timestamps": None}
FORMER_NAMES = {"semantics": "beam_style"}  # in generation.json of bundles written before the field was renamed


def checked_values(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Fields of search options from parsed JSON; one error lists everything that is of a wrong type."""
    try:
        return fields_from_json(KINDS, {FORMER_NAMES.get(name, name): value for name, value in values.items()})
    except ValueError as error:
        raise ConfigError(f"{where}: {error}; expected fields of SearchOptions") from error


def options_from_values(
    values: Mapping[str, Any],
    longest: int,
    where: str,
    also: Callable[[OptionFields], list[str]] = lambda options: [],
    **given: Any,
) -> SearchOptions:
    """The model's own decoding options, as parsed JSON, overridden by those a user has `given` (None: not given).

    `longest` is the most tokens a session can decode. The model's own lengths are cut to it, and its own beam to 1 when
    sampling; what the user gives is taken as it is. `also` returns further problems of options, for example those of a
    session: all problems are raised together.
    """
    merged: dict[str, Any] = {"max_length": longest, **checked_values(values, where)}
    merged["max_length"] = min(merged["max_length"], longest)
    if merged.get("trie") is not None:
        merged["trie"] = trie_from_sequences(merged["trie"])
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

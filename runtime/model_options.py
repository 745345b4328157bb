"""The search options of a decode: the model's own defaults, with what is asked for in their place.

`run`, the Translator, parity and the benchmark all get their options from here.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypedDict

from seq2engine.errors import UsageError

from .search.constraints.timestamps import Timestamps
from .search.constraints.trie import Trie
from .search.option_fields import OptionFields
from .search.options import SearchOptions, options_from_values

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from seq2engine.model.tokenizers.base import Coder

    from .session import Session


class SearchFields(TypedDict, total=False):
    """The fields of SearchOptions as keyword arguments, such as `translate(texts, beam=4)`. None is the model's own."""

    max_length: int | None
    beam: int | None
    length_penalty: float | None
    early_stopping: bool | str | None
    nbest: int | None
    min_length: int | None
    start: int | None
    forced_bos: int | None
    forced_eos: int | None
    prompt: tuple[int, ...] | None
    prefix: tuple[int, ...] | None
    banned: tuple[tuple[int, ...], ...] | None
    first_banned: tuple[int, ...] | None
    allowed: tuple[int, ...] | None
    shortlist: tuple[int, ...] | None
    no_repeat_ngram: int | None
    source_no_repeat_ngram: int | None
    repetition_penalty: float | None
    sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None
    beam_style: str | None
    patience: float | None
    coverage_penalty: float | None
    phrases: tuple[tuple[int, ...], ...] | None
    trie: Trie | None
    timestamps: Timestamps | None
    alternatives: bool | None
    min_alternative_expansion_prob: float | None
    alignments: bool | None
    scores: bool | None
    allowed_log_probs: bool | None
    ignore_eos: bool | None


def options_from_session(
    session: Session,
    also: Callable[[OptionFields], list[str]] = lambda options: [],
    longest: int | None = None,
    **given: Unpack[SearchFields],
) -> SearchOptions:
    """The model's own search options, with the fields that are given in their place (None: the model's own).

    `longest` caps the model's own maximum length (None: the most that the session decodes). `also` is as in
    `options_from_values`.
    """
    check_fields(given)
    asked = given.get("prompt")
    prompt = session.defaults.prompt if asked is None else asked  # it takes positions, too
    most = max(1, session.limits.target - len(prompt)) if longest is None else longest
    return options_from_values(session.defaults.values, most, session.defaults.where, also, **given)


def check_fields(names: Iterable[str]) -> None:
    """Refuses a name that is not a field of SearchOptions, and suggests the one that may have been meant."""
    known = [field.name for field in dataclasses.fields(SearchOptions)]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(known)}"
            raise UsageError(f"unknown search option {name}; {hint}")


def measured_options(
    session: Session, beam: int, longest: int | None = None, forced_bos: int | None = None
) -> SearchOptions:
    """How parity, error rates and the benchmark decode: the model's own options with this beam, for one output.

    `forced_bos` is the token of the target language that is asked for (None: the model's own first token). Nothing is
    sampled, and the coverage penalty is left out, because these sessions keep no cross-attention weights.
    """
    return options_from_session(
        session,
        longest=longest,
        beam=beam,
        forced_bos=forced_bos,
        nbest=1,
        sample=False,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        alternatives=False,
        min_alternative_expansion_prob=0.0,
        coverage_penalty=0.0,
        alignments=False,
        scores=False,
    )


def options_left_out(session: Session) -> tuple[str, ...]:
    """Which of the model's own options `measured_options` leaves out, in words."""
    values = session.defaults.values
    named = {"sample": "sampling", "alternatives": "alternatives", "coverage_penalty": "coverage penalty"}
    return tuple(words for name, words in named.items() if values.get(name))


def first_token(session: Session, tokenizer: Coder, target_language: str | None) -> int | None:
    """The token that every output begins with: of the target language if one is asked for, else the model's own."""
    if target_language is not None:
        return tokenizer.language_id(target_language)
    return session.defaults.values.get("forced_bos")

"""The options a decode runs with: the model's own defaults, and what is asked for instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .search.option_fields import OptionFields
from .search.options import SearchOptions, options_from_values

if TYPE_CHECKING:
    from seq2engine.model.tokenizers.base import Coder

    from .session import Session


def options_from_session(
    session: Session,
    also: Callable[[OptionFields], list[str]] = lambda options: [],
    longest: int | None = None,
    **given: Any,
) -> SearchOptions:
    """The model's own options, with fields of SearchOptions that are asked for instead (None: the model's own).

    `longest` caps the model's own maximum length (None: the most that the session decodes). `also` is as in
    `options_from_values`.
    """
    most = session.limits.target if longest is None else longest
    return options_from_values(session.defaults.values, most, session.defaults.where, also, **given)


def measured_options(session: Session, beam: int, longest: int | None = None) -> SearchOptions:
    """How parity and error rates decode: as the model does by default, but with so many beams, for one output.

    Nothing is drawn at random, and the coverage penalty is left out, because these sessions keep no cross-attention.
    """
    return options_from_session(
        session,
        longest=longest,
        beam=beam,
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


def first_token(session: Session, tokenizer: Coder, target_language: str | None) -> int | None:
    """What every output begins with: the token of the language that is asked for, else the model's own, if any."""
    if target_language is not None:
        return tokenizer.language_id(target_language)
    return session.defaults.values.get("forced_bos")

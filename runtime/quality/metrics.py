"""Error rates of outputs against references: word error rate (WER), phoneme error rate (PER), and lines wrong.

    WER          words substituted, deleted or inserted / words of the references
    PER          the same over phonemes, for grapheme-to-phoneme models; there a source is one word, and the WER is the
                 share of words with any phoneme wrong, as in published results
    lines wrong  outputs that differ from their reference / outputs

Words are separated by spaces. A source may have several references; the closest one counts. Where phonemes carry stress
marks (`AH0`), rates are also counted without the marks, as published results on the CMU dictionary are.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seq2engine.errors import RequestError, missing_package
from seq2engine.model.pairs import read_pairs
from seq2engine.model.tokenizers.base import Tokenizer

from ..model_options import first_token, measured_options
from ..session import Session
from ..text.translate import translate_texts

References = Mapping[str, Sequence[str]]  # source text -> its right outputs
Words = Mapping[str, Sequence[str]]  # source text -> an output, split at spaces
RightWords = Mapping[str, Sequence[Sequence[str]]]  # source text -> its references, split at spaces
PHONEME = re.compile(r"[A-Z]+[012]?")  # of the CMU dictionary
STRESSED = re.compile(r"[A-Z]+[012]")


@dataclass(frozen=True)
class ErrorRates:
    """Shares of 1: edits per word (or phoneme) of the references, and wrong lines per line."""

    tokens: float
    lines: float


@dataclass(frozen=True)
class Quality:
    """Error rates of one search; `names` are what its two rates are called."""

    search: str  # greedy, beam 5
    sources: int
    marked: ErrorRates
    unmarked: ErrorRates | None  # without stress marks, where there are any
    names: tuple[str, str] = ("WER", "lines wrong")


def references_from_file(path: Path, most: int | None = None) -> dict[str, list[str]]:
    """The references of each source of a TSV (a source with several has several lines), at most `most` sources.

    Fewer are taken evenly from the whole file, because files are often sorted.
    """
    found: dict[str, list[str]] = {}
    for source, target in read_pairs(path):
        found.setdefault(source, []).append(target)
    if not found:
        raise RequestError(f"{path} holds no references; expected lines of source<TAB>target")
    if most is None or most >= len(found):
        return found
    if most < 1:
        raise RequestError(f"{most} references asked for, expected at least 1")
    sources = list(found)
    return {source: found[source] for source in (sources[i * len(sources) // most] for i in range(most))}


def quality_from_outputs(search: str, outputs: Mapping[str, str], references: References) -> Quality:
    """The output of every source of the references -> its error rates."""
    given = {source: outputs[source].split() for source in references}
    right = words_of(references)
    unmarked = error_rates(unstressed(given), unstressed_references(right)) if has_stress(right) else None
    return Quality(search, len(references), error_rates(given, right), unmarked, rate_names(right))


def quality_of_session(
    session: Session,
    tokenizer: Tokenizer,
    references: References,
    beam: int,
    batch: int = 64,
    source_language: str | None = None,
    target_language: str | None = None,
) -> Quality:
    """Decodes the texts of the references and counts."""
    options = measured_options(session, beam, forced_bos=first_token(session, tokenizer, target_language))
    texts = list(references)
    found = translate_texts(session, tokenizer, texts, options, batch, language=source_language)
    outputs = dict(zip(texts, found, strict=True))
    return quality_from_outputs("greedy" if beam == 1 else f"beam {beam}", outputs, references)


def words_of(references: References) -> dict[str, list[list[str]]]:
    return {source: [target.split() for target in targets] for source, targets in references.items()}


def has_stress(right: RightWords) -> bool:
    """Whether the references are phonemes with stress marks: one word such as CO2 among others is not a phoneme."""
    tokens = {token for targets in right.values() for target in targets for token in target}
    return all(PHONEME.fullmatch(token) for token in tokens) and any(STRESSED.fullmatch(token) for token in tokens)


def rate_names(right: RightWords) -> tuple[str, str]:
    """What the rate over tokens and the rate over lines are called."""
    if not has_stress(right):
        return "WER", "lines wrong"
    return "PER", "WER" if all(len(source.split()) == 1 for source in right) else "lines wrong"


def unstressed(given: Words) -> dict[str, list[str]]:
    return {source: without_marks(tokens) for source, tokens in given.items()}


def unstressed_references(right: RightWords) -> dict[str, list[list[str]]]:
    return {source: [without_marks(target) for target in targets] for source, targets in right.items()}


def without_marks(tokens: Sequence[str]) -> list[str]:
    return [token.rstrip("012") for token in tokens]


def error_rates(given: Words, right: RightWords) -> ErrorRates:
    errors, tokens, lines = (sum(column) for column in zip(*error_counts(given, right), strict=True))
    return ErrorRates(errors / max(tokens, 1), lines / len(right))


def error_counts(given: Words, right: RightWords) -> list[tuple[int, int, int]]:
    """For every source: edits, tokens of the closest reference, and 1 if there is any edit."""
    found = []
    for source, targets in right.items():
        errors, length = min((edit_distance(given[source], target), len(target)) for target in targets)
        found.append((errors, length, int(errors > 0)))
    return found


def edit_distance(given: Sequence[str] | Sequence[int], right: Sequence[str] | Sequence[int]) -> int:
    """Fewest substitutions, deletions and insertions that turn one sequence into the other (Levenshtein)."""
    return 0 if given == right else levenshtein().distance(given, right)


def levenshtein() -> Any:
    """rapidfuzz's module of that name."""
    try:
        return importlib.import_module("rapidfuzz.distance.Levenshtein")
    except ModuleNotFoundError as error:
        if missing := missing_package(error, "counting errors"):
            raise missing from error
        raise


def quality_head(found: Sequence[Quality]) -> tuple[str, ...]:
    """The head of a table of `quality_row`s, all of the same references."""
    names = found[0].names
    marked = found[0].unmarked is not None
    return ("search", *names, *(f"{name}, no stress" for name in names if marked))


def quality_row(quality: Quality) -> tuple[str, ...]:
    both = [rates for rates in (quality.marked, quality.unmarked) if rates is not None]
    return (quality.search, *(f"{rate:.2%}" for rates in both for rate in (rates.tokens, rates.lines)))


def quality_from_dict(values: dict[str, Any]) -> Quality:
    """A quality from parsed JSON; older files have no names, and are all of the shipped model."""
    marked, unmarked = values["marked"], values["unmarked"]
    first, second = values.get("names", ("PER", "WER"))
    return Quality(
        values["search"],
        values["sources"],
        ErrorRates(**marked),
        None if unmarked is None else ErrorRates(**unmarked),
        (first, second),
    )

"""How good what a model says is, counted against references: token error rate and line error rate.

A source may have several right answers; the one closest to the output counts. Where tokens are phonemes with stress
marks (`AH0`), both rates are also counted without the marks, as published results on the CMU dictionary are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seq2engine.errors import RequestError
from seq2engine.model.pairs import read_pairs
from seq2engine.model.tokenizers.base import Tokenizer

from ..model_options import measured_options
from ..session import Session
from ..text.translate import translate

References = Mapping[str, Sequence[str]]  # source text -> its right outputs
STRESSED = re.compile(r"[A-Z]+[012]")


@dataclass(frozen=True)
class ErrorRates:
    """Shares of 1: wrong tokens (substituted, missing or too many) per reference token, and wrong lines per line."""

    tokens: float
    lines: float


@dataclass(frozen=True)
class Quality:
    search: str  # greedy, beam 5
    sources: int
    marked: ErrorRates
    unmarked: ErrorRates | None  # without stress marks, where there are any


def references_from_file(path: Path, most: int | None = None) -> dict[str, list[str]]:
    """The right outputs of each source of a TSV (a source with several has several lines), at most `most` sources.

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
    said = {source: outputs[source].split() for source in references}
    right = {source: [target.split() for target in targets] for source, targets in references.items()}
    marked = any(STRESSED.fullmatch(token) for targets in right.values() for target in targets for token in target)
    return Quality(
        search,
        len(references),
        error_rates(said, right),
        error_rates(
            {source: unstressed(tokens) for source, tokens in said.items()},
            {source: [unstressed(target) for target in targets] for source, targets in right.items()},
        )
        if marked
        else None,
    )


def quality_of_session(
    session: Session, tokenizer: Tokenizer, references: References, beam: int, batch: int = 64
) -> Quality:
    """Decodes the texts of the references and counts."""
    options = measured_options(session, beam)
    texts = list(references)
    outputs = dict(zip(texts, translate(session, tokenizer, texts, options, batch), strict=True))
    return quality_from_outputs("greedy" if beam == 1 else f"beam {beam}", outputs, references)


def unstressed(tokens: Sequence[str]) -> list[str]:
    return [token.rstrip("012") for token in tokens]


def error_rates(said: Mapping[str, Sequence[str]], right: Mapping[str, Sequence[Sequence[str]]]) -> ErrorRates:
    errors, tokens, lines = (sum(column) for column in zip(*error_counts(said, right), strict=True))
    return ErrorRates(errors / max(tokens, 1), lines / len(right))


def error_counts(
    said: Mapping[str, Sequence[str]], right: Mapping[str, Sequence[Sequence[str]]]
) -> list[tuple[int, int, int]]:
    """Of every source: wrong tokens, tokens of the reference that is closest, and 1 if any is wrong."""
    found = []
    for source, targets in right.items():
        errors, length = min((edit_distance(said[source], target), len(target)) for target in targets)
        found.append((errors, length, int(errors > 0)))
    return found


def edit_distance(said: Sequence[str] | Sequence[int], right: Sequence[str] | Sequence[int]) -> int:
    """Fewest tokens to change, drop or add to make one of the other."""
    if said == right:
        return 0
    row = list(range(len(right) + 1))
    for i, token in enumerate(said, start=1):
        before, row[0] = row[0], i
        for j, wanted in enumerate(right, start=1):
            before, row[j] = row[j], min(before + (token != wanted), row[j] + 1, row[j - 1] + 1)
    return row[-1]


def quality_row(quality: Quality) -> tuple[str, ...]:
    """search, PER, WER, PER and WER without stress: as they stand in tables, under QUALITY_HEAD."""
    unmarked = quality.unmarked or quality.marked
    rates = (quality.marked.tokens, quality.marked.lines, unmarked.tokens, unmarked.lines)
    return (quality.search, *(f"{rate:.2%}" for rate in rates))


QUALITY_HEAD = ("search", "token errors (PER)", "line errors (WER)", "PER, no stress", "WER, no stress")


def quality_from_dict(values: dict[str, Any]) -> Quality:
    """A quality from parsed JSON."""
    marked, unmarked = values["marked"], values["unmarked"]
    return Quality(
        values["search"], values["sources"], ErrorRates(**marked), None if unmarked is None else ErrorRates(**unmarked)
    )

"""Lengths of requests: sources by the tokenizer, outputs by a decode of some of them, or by a ratio."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil

from seq2engine.common.progress import Progress, silent
from seq2engine.errors import RequestError
from seq2engine.model.tokenizers.base import Coder

from ..generate import generate
from ..search.options import SearchOptions
from ..session import Session
from .batching import BATCH
from .lines import Line


def sources_of_lines(tokenizer: Coder, lines: Iterable[Line], language: str | None = None) -> list[list[int]]:
    """The ids of every line that is not empty; a line that cannot be read is an error."""
    sources = []
    for line in lines:
        if line.error is not None:
            raise RequestError(f"line {line.number}: {line.error}")
        if line.text.strip():
            try:
                sources.append(tokenizer.encode_source(line.text, language))
            except RequestError as error:
                raise RequestError(f"line {line.number}: {error}") from error
    return sources


def lengths_by_ratio(sources: Sequence[Sequence[int]], ratio: float, most: int) -> list[tuple[int, int]]:
    """(source, output) tokens of every source, if an output is `ratio` times as long, up to `most`."""
    if not 0 < ratio < float("inf"):
        raise RequestError(f"ratio {ratio}, expected output tokens per source token such as 1.2")
    return [(len(source), min(max(ceil(len(source) * ratio), 1), most)) for source in sources]


def lengths_by_decoding(
    session: Session,
    sources: Sequence[Sequence[int]],
    options: SearchOptions,
    count: int,
    progress: Progress = silent,
) -> list[tuple[int, int]]:
    """(source, output) tokens of every source: `count` of all lengths are decoded, the longest among them.

    The others get the largest ratio found, because an output that is longer than planned does not fit.
    """
    if count < 1:
        raise RequestError(f"{count} lines to decode, expected at least 1; or give a ratio instead")
    known: dict[int, int] = {}
    fitting = [i for i, source in enumerate(sources) if len(source) <= session.limits.source]
    chosen = evenly(sorted(fitting, key=lambda i: len(sources[i])), count)
    for start in range(0, len(chosen), BATCH):
        places = chosen[start : start + BATCH]
        found = generate(session, [sources[i] for i in places], options)
        known |= {i: max(len(best.tokens) for best in every) for i, every in zip(places, found, strict=True)}
        progress("plan: decode", (start + len(places)) / len(chosen))
    ratio = max((known[i] / len(sources[i]) for i in known), default=1.0)
    estimated = lengths_by_ratio(sources, ratio, session.limits.target)
    return [(source, known.get(i, target)) for i, (source, target) in enumerate(estimated)]


def evenly(places: Sequence[int], count: int) -> list[int]:
    """`count` of the places at equal distances, the last among them."""
    if len(places) <= count:
        return list(places)
    return [places[len(places) - 1 - i * len(places) // count] for i in range(count)]

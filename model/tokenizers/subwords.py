"""Words to subwords by merge codes as subword-nmt and fastBPE write them: a pair a line, the first learned first."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

GOES_ON = "@@"  # at the end of every subword of a word but its last
WORD_END = "</w>"
CACHED = 1 << 16  # cached words; limits the memory of a serving process


@dataclass(frozen=True)
class MergeCodes:
    text: str = field(repr=False)  # of the codes file
    ranks: dict[tuple[str, str], int] = field(init=False, compare=False, repr=False)
    split: Callable[[str], tuple[str, ...]] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        version, lines = version_and_lines(self.text)
        ranks: dict[tuple[str, str], int] = {}
        for number, line in enumerate(lines):
            parts = line.strip("\r ").split(" ")
            # fastBPE adds how often it saw the pair
            if len(parts) not in (2, 3):
                raise ValueError(f"merge {number + 1} of the codes is {line[:40]!r}, expected two subwords")
            ranks.setdefault((parts[0], parts[1]), number)
        ended = version == "0.1"  # version 0.1 has a separate end-of-word symbol; later the last letter carries it
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "split", lru_cache(CACHED)(lambda word: subwords_of(word, ranks, ended)))


def version_and_lines(text: str) -> tuple[str, list[str]]:
    lines = text.rstrip("\n").split("\n")
    if lines[0].startswith("#version:"):
        version = re.sub(r"(\.0+)*$", "", lines[0].split()[-1])
        if version not in ("0.1", "0.2"):
            raise ValueError(f"codes of version {version!r}, expected 0.1 or 0.2")
        return version, lines[1:]
    return ("0.2" if len(lines[0].split()) == 3 else "0.1"), lines  # fastBPE's files have no header


def subwords_of(word: str, ranks: dict[tuple[str, str], int], ended: bool) -> tuple[str, ...]:
    """The subwords of a word, all but the last marked with @@. The pair learned first is merged first, everywhere."""
    if len(word) == 1:
        return (word,)
    parts = [*word, WORD_END] if ended else [*word[:-1], word[-1] + WORD_END]
    while len(parts) > 1:
        pairs = set(pairwise(parts))
        known = [pair for pair in pairs if pair in ranks]
        if not known:
            break
        parts = merged(parts, min(known, key=ranks.__getitem__))
    if parts[-1] == WORD_END:
        parts.pop()
    else:
        parts[-1] = parts[-1].removesuffix(WORD_END)
    return (*(part + GOES_ON for part in parts[:-1]), parts[-1])


def merged(parts: list[str], pair: tuple[str, str]) -> list[str]:
    """The parts with every occurrence of a pair put together, from the left: a a a becomes aa a."""
    result: list[str] = []
    i = 0
    while i < len(parts):
        if parts[i] == pair[0] and i + 1 < len(parts) and parts[i + 1] == pair[1]:
            result.append(pair[0] + pair[1])
            i += 2
        else:
            result.append(parts[i])
            i += 1
    return result

"""Ways to divide sources into batches. Every function takes lengths and returns batches as lists of indices.
Which sources are encoded in one call is decided by `groups_by_padding` (encoder_inputs.py).

batches_by_length    decoding and scoring: neighbours in length, so that little is padded
mixed_batches        parity: every batch has short and long sources, so that padding is tested
corpus_batches       parity on many sources: one mixed batch, the others by length
"""

from __future__ import annotations

from collections.abc import Sequence

BATCH = 32  # sources decoded together, by default
MANY = 8  # batches from which on one mixed batch is enough


def batches_by_length(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Batches of at most `most` neighbours in length, the shortest first."""
    places = sorted(range(len(lengths)), key=lambda place: lengths[place])
    return [places[start : start + most] for start in range(0, len(places), most)]


def mixed_batches(count: int, most: int) -> list[list[int]]:
    """Batches of at most `most` that each reach over the whole list: sorted sources still get padding."""
    batches = -(-count // most)
    return [list(range(first, count, batches)) for first in range(batches)]


def corpus_batches(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Mixed batches of few sources. Of many, the first batch reaches over all lengths and the others are by length:
    one mixed batch finds what several would, and padding is a third of the work.
    """
    mixed = mixed_batches(len(lengths), most)
    if len(mixed) < MANY:
        return mixed
    by_length = sorted(range(len(lengths)), key=lambda place: lengths[place])
    first = [by_length[place] for place in mixed[0]]
    rest = sorted(set(by_length) - set(first), key=lambda place: (lengths[place], place))
    return [first, *([rest[i] for i in batch] for batch in batches_by_length([lengths[i] for i in rest], most))]

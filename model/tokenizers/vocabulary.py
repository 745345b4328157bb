"""Pieces and their ids in a few arrays: 65,000 of them take 3 MB, and 15 MB as dicts each way.

    text     ",▁the▁of."            all pieces one after another; `starts` is where each begins
    hashes   in ascending order     with `places`: which piece has that hash
    ids      in ascending order     with `named`: which piece has that id

Looking up one takes one or two microseconds.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from typing import Any


class Vocabulary(Mapping[str, int]):
    def __init__(self, ids: Mapping[str, int]):
        """Two pieces may have one id; the later one is then its name."""
        import numpy as np  # imported late: other tokenizers need none

        count = len(ids)
        try:
            numbers = np.fromiter(ids.values(), np.int64, count)
        except OverflowError as error:
            raise ValueError(f"an id is {max(ids.values(), key=abs)}, expected less than 2^63") from error
        hashes = np.fromiter(map(hash, ids), np.int64, count)
        places, named = np.argsort(hashes), np.argsort(numbers, kind="stable")
        self.text = "".join(ids)
        self.starts = array("i", [0])
        self.starts.frombytes(np.cumsum(np.fromiter(map(len, ids), np.int32, count), dtype=np.int32).tobytes())
        self.hashes, self.ids = array("q", hashes[places].tobytes()), array("q", numbers[named].tobytes())
        self.places, self.named = (array("i", order.astype(np.int32).tobytes()) for order in (places, named))
        self.numbers = array("q", numbers.tobytes())

    def __getitem__(self, piece: str) -> int:
        wanted = hash(piece)
        found = bisect_left(self.hashes, wanted)
        while found < len(self.hashes) and self.hashes[found] == wanted:
            place = self.places[found]
            if self.at(place) == piece:
                return self.numbers[place]
            found += 1
        raise KeyError(piece)

    def __iter__(self) -> Iterator[str]:
        return map(self.at, range(len(self)))

    def __len__(self) -> int:
        return len(self.places)

    def __reduce__(self) -> tuple[Any, ...]:
        return Vocabulary, (dict(self),)  # hashes are those of this process

    def at(self, place: int) -> str:
        return self.text[self.starts[place] : self.starts[place + 1]]

    def piece(self, number: int) -> str | None:
        """The piece with that id."""
        found = bisect_right(self.ids, number) - 1
        return self.at(self.named[found]) if found >= 0 and self.ids[found] == number else None

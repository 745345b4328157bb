"""Greedy decoding over the engines: the likeliest token that the model's own rules allow, every time.

Options are package.json's "decode": start token, forced tokens, banned tokens, lengths. Ids in, ids out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from engine_steps import room_for, run
from model_engines import ModelEngines
from output_rules import allowed_logits, forced_token
from package_files import PackageError

NOTHING_LEFT = "the model's own rules forbid every token of the vocabulary; export it with others"


def check_decode(package: Any) -> Any:
    """package["decode"]; raises if the model's own decoding options are not supported here."""
    decode = package["decode"]
    if decode["refused"]:
        raise PackageError(f"this model's own decoding asks for {decode['refused']}, which decode.py does not do")
    return decode


def decoded(
    model: ModelEngines, sources: Sequence[Sequence[int]], first: int | None = None, longest: int | None = None
) -> Iterator[list[int]]:
    """The output of every source, its end token included, as many at a time as the engines take.

    `first` is the token every output begins with instead of the model's own (a language), `longest` a maximum length.
    """
    decode = decode_for(model.package, 1, first, longest)
    most = model.package["ranges"][0]["batch"]["max"]
    for place in range(0, len(sources), most):
        yield from decoded_batch(model, sources[place : place + most], decode)


def decode_for(package: Any, beams: int, first: int | None, longest: int | None) -> Any:
    """package["decode"] with the given options in place of its own, for this many beams."""
    decode = dict(check_decode(package))
    most = min(decode["max_length"], room_for(package, beams))
    if longest is not None and longest > most:
        raise PackageError(f"length {longest}, at most {most} are supported")
    decode["max_length"] = longest or most
    decode["min_length"] = min(decode["min_length"], decode["max_length"])
    if first is not None:
        decode["forced_start"] = [first, *decode["forced_start"][1:]]
    return decode


def decoded_batch(model: ModelEngines, sources: Sequence[Sequence[int]], decode: Any) -> list[list[int]]:
    outputs = [Output(decode, source) for source in sources]

    def choose(logits: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = [[output.chosen(row[0], length)] for output, row in zip(outputs, logits, strict=True)]
        return np.array(tokens), np.zeros((len(tokens), 1), dtype=np.int64)

    run(model, sources, 1, decode["start"], decode["max_length"], choose, lambda: all(one.done for one in outputs))
    return [output.tokens[1:] for output in outputs]


class Output:
    """One source's output so far; `tokens` begins with the start token."""

    def __init__(self, decode: Any, source: Sequence[int]):
        self.decode, self.source = decode, source
        self.tokens: list[int] = [decode["start"]]
        self.done = False

    def chosen(self, logits: np.ndarray, length: int) -> int:
        """The token to emit at this length [V] -> id; of an output that has ended, the end token."""
        end = self.decode["end"]
        if self.done:
            return int(end)
        token = forced_token(self.decode, length)
        if token is None:
            allowed = allowed_logits(self.decode, self.source, self.tokens, logits, length)
            token = int(allowed.argmax())
            if allowed[token] == -np.inf:
                raise PackageError(NOTHING_LEFT)
        self.tokens.append(token)
        self.done = token == end or length == self.decode["max_length"]
        return token

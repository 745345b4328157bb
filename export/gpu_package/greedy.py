"""Greedy decoding over the engines: the likeliest token that the model's own rules allow, every time.

package.json says under "decode" how: start token, forced tokens, banned tokens, lengths. Ids in, ids out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from model_engines import Cache, ModelEngines
from package_files import PackageError


def check_decode(package: Any) -> Any:
    """package["decode"], unless the model's own way of decoding is one that is not done here."""
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
    decode = dict(check_decode(model.package))
    if longest is not None and longest > decode["max_length"]:
        raise PackageError(f"length {longest}, at most {decode['max_length']} are supported")
    decode["max_length"] = longest or decode["max_length"]
    decode["min_length"] = min(decode["min_length"], decode["max_length"])
    if first is not None:
        decode["forced_start"] = [first, *decode["forced_start"][1:]]
    most = model.package["ranges"][0]["batch"]["max"]
    for place in range(0, len(sources), most):
        yield from decoded_batch(model, sources[place : place + most], decode)


def decoded_batch(model: ModelEngines, sources: Sequence[Sequence[int]], decode: Any) -> list[list[int]]:
    rules = [Rules(decode, source) for source in sources]

    def choose(logits: np.ndarray, length: int) -> np.ndarray:  # logits [N,V] of the real sources -> tokens [N]
        return np.array([rule.chosen(row, length) for rule, row in zip(rules, logits, strict=True)])

    run(model, sources, decode["start"], decode["max_length"], choose, lambda: all(rule.done for rule in rules))
    return [rule.said[1:] for rule in rules]


def run(
    model: ModelEngines,
    sources: Sequence[Sequence[int]],
    start: int,
    steps: int,
    choose: Callable[[np.ndarray, int], np.ndarray],
    finished: Callable[[], bool] = lambda: False,
) -> None:
    """Encoder and decoder steps of one batch: `choose` makes tokens of the logits of each step, counted from 1.

    Engines that take no single source or beam get copies of the last source and of the first beam. Copies of a beam see
    what that beam sees; what they write into a static cache the next step overwrites.
    """
    widest = model.package["ranges"][0]
    count, beams = len(sources), widest["beam"]["min"]
    rows = [*sources, *[sources[-1]] * (widest["batch"]["min"] - count)]
    ids, mask = padded(rows, model.package["model"]["pad_id"], widest["source"]["min"])
    encoded = model.encode(ids, mask)
    cache = Cache(model, len(rows), beams, steps)
    stride = 1 if cache.static else beams  # slots from one step to the next
    tokens = np.full(len(rows), start, dtype=np.int64)
    seen = np.zeros((len(rows), beams, cache.length), dtype=bool)
    for step in range(steps):
        seen[:, :, stride * step] = True
        given = {
            "tokens": np.repeat(tokens[:, None], beams, axis=1),
            "position": np.full(len(rows), step, dtype=np.int64),
            "write_index": np.full(len(rows), stride * step, dtype=np.int64),
            "self_mask": np.ascontiguousarray(seen[:, :, : cache.attended]),
        }
        logits = model.step(encoded, cache, given)[:, 0]  # [B,K,V] -> [B,V]
        if not np.isfinite(logits[:count].max(axis=-1)).all():
            raise PackageError(f"the engines' logits of step {step + 1} are no numbers; see: python verify.py")
        chosen = choose(logits[:count], step + 1)
        if finished():
            return
        tokens = np.concatenate((chosen, np.repeat(chosen[-1:], len(rows) - count)))


def padded(sources: Sequence[Sequence[int]], pad: int, least: int) -> tuple[np.ndarray, np.ndarray]:
    """Ragged sources -> ids int64 and mask bool, both [B, longest, but at least `least`]."""
    lengths = np.array([len(source) for source in sources])
    mask = np.arange(max(int(lengths.max()), least)) < lengths[:, None]
    ids = np.full(mask.shape, pad, dtype=np.int64)
    ids[mask] = np.concatenate([np.asarray(source, dtype=np.int64) for source in sources])
    return ids, mask


class Rules:
    """What one source's output may say next; `said` begins with the start token."""

    def __init__(self, decode: Any, source: Sequence[int]):
        self.decode, self.source = decode, list(source)
        self.said: list[int] = [decode["start"]]
        self.done = False

    def chosen(self, logits: np.ndarray, length: int) -> int:
        """The token to say at this length [V] -> id; of an output that has ended, the end token."""
        end = self.decode["end"]
        if self.done:
            return end
        token = self.forced(length)
        if token is None:
            allowed = self.allowed(logits, length)
            token = int(allowed.argmax())
            if allowed[token] == -np.inf:
                raise PackageError("the model's own rules forbid every token of the vocabulary; export it with others")
        self.said.append(token)
        self.done = token == end or length == self.decode["max_length"]
        return token

    def forced(self, length: int) -> int | None:
        decode = self.decode
        if length == decode["max_length"] and decode["forced_eos"] is not None:
            return int(decode["forced_eos"])
        return int(decode["forced_start"][length - 1]) if length <= len(decode["forced_start"]) else None

    def allowed(self, logits: np.ndarray, length: int) -> np.ndarray:
        """A copy of logits [V] with what may not be said at -inf."""
        decode, end, found = self.decode, self.decode["end"], logits.copy()
        if decode["repetition_penalty"] != 1.0:
            heard = np.unique(self.said)
            penalty = decode["repetition_penalty"]
            found[heard] = np.where(found[heard] < 0, found[heard] * penalty, found[heard] / penalty)
        for text, size in ((self.said, decode["no_repeat_ngram"]), (self.source, decode["source_no_repeat_ngram"])):
            found[self.completing(text, size)] = -np.inf
        for *before, last in decode["banned"]:
            # A ban of the end token alone is none: a decode must end.
            if self.said[len(self.said) - len(before) :] == before and (before or last != end):
                found[last] = -np.inf
        if decode["allowed"] is not None:
            barred = np.ones(len(found), dtype=bool)
            barred[[*decode["allowed"], end]] = False
            found[barred] = -np.inf
        if length == len(decode["forced_start"]) + 1:
            found[decode["first_banned"]] = -np.inf
        if length < decode["min_length"]:
            found[end] = -np.inf
        return found

    def completing(self, text: list[int], size: int) -> list[int]:
        """Tokens that would complete an n-gram of a text after what was said; none if size is 0."""
        if not size or len(self.said) < size - 1:
            return []
        ending = self.said[len(self.said) - (size - 1) :]
        return [text[i + size - 1] for i in range(len(text) - size + 1) if text[i : i + size - 1] == ending]

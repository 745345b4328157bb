"""Beam search over the engines in the style of the model's library; plain numpy, one source at a time.

Every step ranks the best 2K continuations of a source. End tokens among the first K end a hypothesis, the first K
others run on. The score of a hypothesis is its log-probability / length ** length_penalty; ties rank by lower beam,
then lower token. package.json's "decode" names the library whose search it is, and its options.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from engine_steps import room_for, run
from greedy import NOTHING_LEFT, check_decode, decode_for, decoded
from model_engines import ModelEngines
from output_rules import allowed_logits, forced_token
from package_files import PackageError


def beams_for(package: Any, asked: int | None) -> tuple[int, str]:
    """How many beams to decode with, and a note on it: by default the model's own, if the engines serve it."""
    decode, most = check_decode(package), package["ranges"][0]["beam"]["max"]
    if asked is not None and not 1 <= asked <= most:
        raise PackageError(f"beam {asked}, the engines take 1 to {most}; package the model with a wider --beam")
    beams, note = asked or decode["own_beam"], ""
    if beams > most:
        beams, note = 1, f"decoding greedily: the model's own default is {beams} beams, the engines take {most}"
    if beams > 1 and decode["beam_refused"]:
        refused = f"this model's own beam search asks for {decode['beam_refused']}, which decode.py does not do"
        raise PackageError(f"{refused}; decode greedily with: --beam 1")
    if (room := room_for(package, beams)) < decode["max_length"]:
        slots = f"the engines' {package['slots']} cache slots"
        note = f"outputs have at most {room} tokens: {slots} hold no more of {beams} beams"
    return beams, note


def decoded_by_beam(
    model: ModelEngines,
    sources: Sequence[Sequence[int]],
    beams: int,
    first: int | None = None,
    longest: int | None = None,
) -> Iterator[list[int]]:
    """The best output of every source, as `greedy.decoded`, which serves where one beam has no rules of its own."""
    decode = decode_for(model.package, beams, first, longest)
    if beams == 1 and decode["beam_style"] == "huggingface":
        yield from decoded(model, sources, first, longest)
        return
    most = model.package["ranges"][0]["batch"]["max"]
    for place in range(0, len(sources), most):
        batch = [Beams(decode, source, beams) for source in sources[place : place + most]]

        def choose(logits: np.ndarray, length: int, batch: list[Beams] = batch) -> tuple[np.ndarray, np.ndarray]:
            pairs = [one.chosen(rows, length) for one, rows in zip(batch, logits, strict=True)]
            return np.array([tokens for tokens, _ in pairs]), np.array([parents for _, parents in pairs])

        def finished(batch: list[Beams] = batch) -> bool:
            return all(one.done for one in batch)

        rows = sources[place : place + most]
        run(model, rows, beams, decode["start"], decode["max_length"], choose, finished)
        yield from (one.best() for one in batch)


class Beams:
    """The beams of one source: the tokens of each, from the start token on, and the K best that have ended."""

    def __init__(self, decode: Any, source: Sequence[int], beams: int):
        self.decode, self.source, self.beams = decode, source, beams
        self.renormalises = decode["beam_style"] == "ctranslate2"  # log-probabilities of the tokens that rules leave
        self.outputs = [[decode["start"]] for _ in range(beams)]
        self.running = np.full(beams, -np.inf)
        self.running[0] = 0.0  # the beams are still identical: only the first may be continued
        self.ended: list[tuple[float, list[int]]] = []  # scores and outputs, best first
        self.count = 0  # of all that have ended, the K best or not
        self.topped = False  # whether the best candidate of a step has ever been among them
        self.done = False

    def best(self) -> list[int]:
        if not self.ended:
            raise PackageError(NOTHING_LEFT)
        return self.ended[0][1]

    def chosen(self, logits: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Logits [K,V] -> the tokens that run on and the beams they continue, [K]; once done, end tokens."""
        own = np.arange(self.beams)
        if not self.done:
            tokens, parents = self.advance(logits, length)
        if self.done:
            return np.full(self.beams, self.decode["end"]), own
        self.outputs = [[*self.outputs[parent], token] for token, parent in zip(tokens.tolist(), parents, strict=True)]
        return tokens, parents

    def advance(self, logits: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        last = length == self.decode["max_length"]
        scores, tokens, parents = self.continuations(logits, length)
        stops = np.ones(len(tokens), dtype=bool) if last else tokens == self.decode["end"]
        ended = stops & (scores > -np.inf)
        ended[self.beams :] = False  # candidates past the first K only keep K beams running
        self.end(np.flatnonzero(ended), scores, tokens, parents, length)
        go_on = np.argsort(stops, kind="stable")[: self.beams]  # those that do not end, still best first
        self.running = np.where(stops, -np.inf, scores)[go_on]
        self.done = last or self.running[0] == -np.inf or (bool(self.ended) and self.settled(length))
        return tokens[go_on], parents[go_on]

    def end(self, which: np.ndarray, scores: np.ndarray, tokens: np.ndarray, parents: np.ndarray, length: int) -> None:
        """These candidates are hypotheses that have ended."""
        worth = scores / length ** self.decode["length_penalty"]
        new = [(float(worth[i]), [*self.outputs[parents[i]][1:], int(tokens[i])]) for i in which]
        self.count += len(new)
        self.topped |= 0 in which
        self.ended = sorted(self.ended + new, key=lambda one: -one[0])[: self.beams]  # the sort is stable

    def settled(self, length: int) -> bool:
        """Whether no more steps are needed, of a source of which some hypothesis has ended."""
        decode = self.decode
        if decode["beam_style"] == "ctranslate2":
            if decode["length_penalty"] == 0:
                return self.topped
            return self.count >= (1 if self.beams == 1 else math.floor(self.beams * decode["patience"] + 0.5))
        if len(self.ended) < self.beams:
            return False
        if decode["early_stopping"] is True:
            return True
        hopeful = decode["early_stopping"] == "never" and decode["length_penalty"] > 0
        reach = self.running[0] / (decode["max_length"] if hopeful else length) ** decode["length_penalty"]
        return bool(reach <= self.ended[-1][0])

    def continuations(self, logits: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Scores, tokens and beams [C] of the best continuations, best first, up to 2K."""
        normaliser = log_sum_exp(logits)  # [K]
        allowed = self.allowed(logits, normaliser, length)
        if self.renormalises:
            dead = allowed.max(axis=-1) == -np.inf
            normaliser = log_sum_exp(np.where(dead[:, None], logits, allowed))
        columns = [best_columns(row, self.beams + 1) for row in allowed]
        parents = np.repeat(np.arange(self.beams), [len(found) for found in columns])
        tokens = np.concatenate(columns)
        scores = allowed[parents, tokens].astype(np.float64) + (self.running - normaliser)[parents]
        best = np.argsort(-scores, kind="stable")[: 2 * self.beams]
        return scores[best], tokens[best], parents[best]

    def allowed(self, logits: np.ndarray, normaliser: np.ndarray, length: int) -> np.ndarray:
        """Logits [K,V] as the rules leave them; a forced token costs nothing."""
        shift = np.zeros_like(normaliser) if self.renormalises else normaliser
        if (forced := forced_token(self.decode, length)) is not None:
            found = np.full_like(logits, -np.inf)
            found[:, forced] = shift
            return found
        rows = zip(self.outputs, logits, shift, strict=True)
        found = np.stack(
            [allowed_logits(self.decode, self.source, output, row, length, by) for output, row, by in rows]
        )
        if found.max() == -np.inf:
            raise PackageError(NOTHING_LEFT)
        return found


def log_sum_exp(logits: np.ndarray) -> np.ndarray:
    """[K,V] -> [K] in fp64."""
    best = logits.max(axis=-1, keepdims=True)
    return np.log(np.exp(logits - best).sum(axis=-1).astype(np.float64)) + best[:, 0].astype(np.float64)


def best_columns(row: np.ndarray, count: int) -> np.ndarray:
    """The columns of the largest values of a row, larger first, then lower column."""
    count = min(count, len(row))
    cut = np.partition(row, len(row) - count)[len(row) - count]
    columns = np.flatnonzero(row >= cut)
    return columns[np.argsort(-row[columns], kind="stable")[:count]]

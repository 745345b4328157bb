"""Scores of given targets: log-probabilities, token by token, by teacher forcing, on any backend."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from seq2engine.errors import RequestError
from seq2engine.model.tokenizers.base import Coder, unknown_text

from ..encoder_inputs import check_takes_text, listed_sources, padded
from ..numerics.teacher_forcing import ForcedRun, forced_tokens, log_probs_of
from ..requests import check_request
from ..search.options import SearchOptions
from ..session import Session
from .batching import BATCH, batches_by_length
from .lines import Line, windows_of
from .translate import WINDOW


@dataclass(frozen=True)
class TargetScore:
    """A target's tokens and the natural logarithm of each one's probability, given the source and those before it."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]

    @property
    def total(self) -> float:
        return math.fsum(self.log_probs)

    @property
    def perplexity(self) -> float:
        return perplexity_of(self.total, len(self.tokens))


def perplexity_of(total: float, tokens: int) -> float:
    """exp(-mean log-probability), from the sum of the log-probabilities and the number of tokens."""
    with np.errstate(over="ignore"):  # too large for a float is infinite
        return float(np.exp(np.float64(-total / tokens)))


def score_targets(
    session: Session,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    batch: int = BATCH,
    start: int | None = None,
) -> list[TargetScore]:
    """Scores one target of every source, in batches of like length.

    All tokens of a target count, also its end token and forced ones such as a language. So the total of an output of
    greedy search is its score, and of an output of beam search its score times length ** length_penalty, where nothing
    was forced. `start` is the first token of the decoder's input; None: the model's own.
    """
    start = session.defaults.start if start is None else start
    sources = listed_sources(sources, session.config)
    check_targets(session, sources, targets, batch, start)
    most = batch if session.limits.batch is None else min(batch, session.limits.batch)
    found: dict[int, TargetScore] = {}
    for places in batches_by_length([len(target) for target in targets], most):
        rows = _log_probs(session, [sources[i] for i in places], [tuple(targets[i]) for i in places], start)
        found |= {i: TargetScore(tuple(targets[i]), row) for i, row in zip(places, rows, strict=True)}
        if wrong := [i for i in places if any(map(math.isnan, found[i].log_probs))]:
            raise RequestError(
                f"source {min(wrong)}: the model's logits are not finite, expected numbers; "
                "look for the first bad layer with: seq2engine parity BUNDLE"
            )
    return [found[place] for place in range(len(targets))]


def check_targets(
    session: Session,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    batch: int,
    start: int | None,
) -> None:
    """Raises a RequestError for targets that cannot be scored, before anything runs."""
    if batch < 1:
        raise RequestError(f"batch {batch}, expected at least 1")
    if len(sources) != len(targets):
        raise RequestError(f"{len(sources)} sources but {len(targets)} targets, expected one of each")
    for row, target in enumerate(targets):
        if problem := problem_with("target", target, session.limits.target, session.config.target_vocab):
            raise RequestError(f"row {row}: {problem}")
    if sources:
        options = SearchOptions(max_length=max(map(len, targets)), start=start, prompt=session.defaults.prompt)
        limits = dataclasses.replace(session.limits, batch=None)
        check_request(limits, session.config, sources, options)


def problem_with(side: str, ids: Sequence[int], longest: int, vocab: int) -> str | None:
    if not ids:
        return f"the {side} is empty"
    if len(ids) > longest:
        return f"the {side} has {len(ids):,} tokens, at most {longest:,} are supported; shorten it"
    if wrong := [token for token in ids if not 0 <= token < vocab]:
        return f"the {side} has token {wrong[0]}, but the vocabulary has 0 to {vocab - 1}"
    return None


def _log_probs(
    session: Session, sources: Sequence[Sequence[int]], targets: Sequence[tuple[int, ...]], start: int | None
) -> list[tuple[float, ...]]:
    """One batch, by teacher forcing: the decoder is fed the target instead of its own output."""
    fed, _ = forced_tokens(targets, session.config, start)
    scored, _ = padded(targets, session.config.end_id)
    run = ForcedRun(session, sources, fed.shape[1], session.defaults.prompt)
    steps = [
        log_probs_of(run.step(fed[:, step]).astype(np.float64), scored[:, step]) for step in range(fed.shape[1])
    ]  # T times [B]
    return [tuple(row[: len(target)].tolist()) for row, target in zip(np.stack(steps, axis=1), targets, strict=True)]


@dataclass(frozen=True)
class ScoredLine:
    """A line of source<TAB>target with its score or its error; an empty line has neither.

    `unknown` are the characters or words, of both sides, that the model has no token for: they were scored as <unk>.
    """

    line: Line
    score: TargetScore | None = None
    error: str | None = None
    unknown: tuple[str, ...] = ()


def score_lines(
    session: Session,
    tokenizer: Coder,
    lines: Iterable[Line],
    batch: int = BATCH,
    language: str | None = None,
    first: Sequence[int] = (),
    start: int | None = None,
    strict: bool = False,
) -> Iterator[ScoredLine]:
    """The score or the error of every line, in the order of the lines.

    `language` is the source's, `first` the tokens before the text of every target, such as the target language. If
    `strict`, a character that the model has no token for is an error of its line.
    """
    check_takes_text(session.config)
    check_targets(session, [], [], batch, start)
    for window in windows_of(lines, WINDOW * batch):
        ready: dict[int, ScoredLine] = {}
        pairs: dict[int, tuple[list[int], list[int]]] = {}
        unknowns: dict[int, tuple[str, ...]] = {}
        for place, line in enumerate(window):
            if line.error is not None or not line.text.strip():
                ready[place] = ScoredLine(line, error=line.error)
                continue
            try:
                pairs[place] = pair_from_line(session, tokenizer, line, language, first)
            except RequestError as error:
                ready[place] = ScoredLine(line, error=str(error))
                continue
            if unknown := unknown_of(tokenizer, line):
                unknowns[place] = unknown
                if strict:
                    del pairs[place]
                    ready[place] = ScoredLine(line, error=unknown_text(unknown), unknown=unknown)
        sources, targets = ([pair[side] for pair in pairs.values()] for side in (0, 1))
        scores = score_targets(session, sources, targets, batch, start)
        ready |= {
            place: ScoredLine(window[place], score, unknown=unknowns.get(place, ()))
            for place, score in zip(pairs, scores, strict=True)
        }
        yield from (ready[place] for place in range(len(window)))


def unknown_of(tokenizer: Coder, line: Line) -> tuple[str, ...]:
    """Characters or words of a line of source<TAB>target that the model has no token for, each once."""
    source, target = line.text.split("\t")
    return tuple(dict.fromkeys((*tokenizer.unknown_source(source), *tokenizer.unknown_target(target))))


def pair_from_line(
    session: Session, tokenizer: Coder, line: Line, language: str | None, first: Sequence[int]
) -> tuple[list[int], list[int]]:
    """The ids of source and target; raises a RequestError if they cannot be scored."""
    sides = line.text.split("\t")
    if len(sides) != 2:
        raise RequestError(f"{len(sides)} columns, expected source<TAB>target")
    if not sides[0].strip():
        raise RequestError("the source is empty")
    source, target = tokenizer.encode_source(sides[0], language), [*first, *tokenizer.encode_target(sides[1])]
    limits, config = session.limits, session.config
    problems = (
        problem_with("source", source, limits.source, config.source_vocab),
        problem_with("target", target, limits.target, config.target_vocab),
    )
    if any(problems):
        raise RequestError("; ".join(filter(None, problems)))
    return source, target

"""Teacher forcing: the same tokens fed to several sessions, so that their logits can be compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from seq2engine.model.config import ModelConfig

from ..encoder_inputs import encoder_inputs, padded
from ..search.step_output import StepOutput
from ..session import Session
from ..steps.tree_cache import TreeStep
from .error_scale import EPSILON, error_spread, row_scales, upper_logits, upper_spread

Tokens = tuple[int, ...]

LARGEST_TIE = 1 / 16  # of the spread of a row's best logits


class ForcedRun:
    """One session with one beam per source, fed given tokens. The state lives as long as the run.

    A `prompt` is read after the first token that is fed: it is not a step of the run.
    """

    def __init__(self, session: Session, sources: Sequence[Sequence[int]], steps: int, prompt: Sequence[int] = ()):
        self.session = session
        self.state = session.encode(*encoder_inputs(sources, session.config))
        self.tree = TreeStep(session, self.state, len(sources), 1, steps)
        self.prompt = tuple(prompt)

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """tokens [B] -> logits [B,V], valid until the next step."""
        if self.prompt:
            self.tree.feed(np.arange(len(tokens)), [(token, *self.prompt) for token in tokens.tolist()])
            self.prompt = ()
        return self.tree(tokens[:, None], np.zeros((len(tokens), 1), dtype=np.int64)).logits[:, 0]

    def tensor(self, name: str) -> np.ndarray:
        return self.session.tensor(self.state, name)


class ForcedRuns:
    """Several sessions as one `Step`: all get the tokens that a search chooses from the first one's logits.

    So the first session's own outputs are forced through the others, and it computes each step only once.
    """

    def __init__(self, sessions: Sequence[Session], sources: Sequence[Sequence[int]], steps: int):
        self.runs = [ForcedRun(session, sources, steps) for session in sessions]
        self.answers: list[np.ndarray] = []  # of the latest step, [B,V] each

    def __call__(self, tokens: np.ndarray, parents: np.ndarray) -> StepOutput:
        answers = [run.tree(tokens, parents) for run in self.runs]
        self.answers = [answer.logits[:, 0] for answer in answers]
        return answers[0]

    def keep(self, rows: np.ndarray) -> None:
        for run in self.runs:
            run.tree.keep(rows)

    def attention(self) -> np.ndarray:
        return self.runs[0].tree.attention()

    def tensors(self, name: str) -> list[np.ndarray]:
        return [run.tensor(name) for run in self.runs]


def forced_tokens(
    targets: Sequence[Tokens], config: ModelConfig, start: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Decoder inputs for these targets, int64 [B,T]: shifted right by one; and which positions count, bool [B,T].

    `start` is fed first; None: the model's own start token.
    """
    labels, counts = padded(targets, config.end_id)
    first = np.full((len(labels), 1), config.start_id if start is None else start, dtype=np.int64)
    return np.hstack([first, labels[:, :-1]]), counts


def normalisers_of(logits: np.ndarray) -> np.ndarray:
    """Logits [B,V] in fp64 -> their log-sum-exp [B]; NaN where logits are not finite."""
    with np.errstate(invalid="ignore"):
        most = logits.max(axis=1, keepdims=True)
        return most[:, 0] + np.log(np.exp(logits - most).sum(axis=1))


def log_probs_of(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Logits [B,V] in fp64 and tokens [B] -> the tokens' log-probabilities [B]; NaN where logits are not finite."""
    with np.errstate(invalid="ignore"):
        return np.take_along_axis(logits, tokens[:, None], axis=1)[:, 0] - normalisers_of(logits)


@dataclass(frozen=True)
class Scored:
    """Forced tokens: the oracle's log-probability of each, and the spread of PyTorch's error there."""

    tokens: Tokens
    log_probs: np.ndarray = field(repr=False)  # [T]
    spreads: np.ndarray = field(repr=False)  # [T]
    top_two: np.ndarray = field(repr=False)  # [T]: the oracle's margin between its two best tokens
    normalisers: np.ndarray = field(repr=False, default_factory=lambda: np.zeros(0))  # [T]: log-sum-exp of its logits

    def with_repetition_penalty(self, penalty: float, start: int, greedy: bool) -> Scored:
        """The tokens scored as a search with this penalty does (see search/rules.py): greedy search compares logits,
        beam search log-probabilities. An error of a penalised value grows as the value does."""
        if penalty == 1.0:
            return self
        values = self.log_probs + self.normalisers if greedy else self.log_probs
        before = (start, *self.tokens)
        seen = np.array([token in before[: step + 1] for step, token in enumerate(self.tokens)], dtype=bool)
        values = np.where(seen, np.where(values < 0, values * penalty, values / penalty), values)
        spreads = np.where(seen, self.spreads * max(penalty, 1 / penalty), self.spreads)
        return dataclasses.replace(self, log_probs=values, spreads=spreads)


def scored(
    oracle: Session,
    reference: Session,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Tokens],
    batch: int,
    usual: float = 0.0,
) -> list[Scored]:
    """Scores one target of every source, in batches. No spread counts as less than `usual`.

    Targets of a source that differ only in their last token have the same decoder inputs and are run once.
    """
    alike: dict[tuple[Tokens, Tokens], list[int]] = {}
    for place, (source, target) in enumerate(zip(sources, targets, strict=True)):
        alike.setdefault((tuple(source), target[:-1]), []).append(place)
    groups = list(alike.values())
    found: dict[int, Scored] = {}
    for first in range(0, len(groups), batch):
        places = groups[first : first + batch]
        rows = [[targets[place] for place in group] for group in places]
        made = _scored_batch(oracle, reference, [sources[group[0]] for group in places], rows, usual)
        found.update(
            (place, one)
            for group, ones in zip(places, made, strict=True)
            for place, one in zip(group, ones, strict=True)
        )
    return [found[place] for place in range(len(targets))]


def spreads_of(exact: np.ndarray, rounded: np.ndarray, precision: str, usual: float = 0.0) -> np.ndarray:
    """Logits [B,V] of the oracle and of PyTorch -> the margin [B] between two tokens that PyTorch's error may overturn.

    At least one unit in the last place; otherwise at most a small part of the spread of the row's best logits: two
    tokens that clearly differ are not a tie, however large PyTorch's error.
    """
    ulp = EPSILON[precision] * row_scales(upper_logits(exact))
    most = LARGEST_TIE * upper_spread(exact)
    return np.maximum(np.minimum(np.maximum(error_spread(exact, rounded), usual), most), ulp)


def _scored_batch(
    oracle: Session,
    reference: Session,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[Tokens]],
    usual: float,
) -> list[list[Scored]]:
    """For every source some targets that differ only in their last token."""
    firsts = [same[0] for same in targets]
    fed, _ = forced_tokens(firsts, oracle.config, oracle.defaults.start)
    labels, _ = padded(firsts, oracle.config.end_id)
    prompt = oracle.defaults.prompt
    runs = [ForcedRun(session, sources, fed.shape[1], prompt) for session in (oracle, reference)]
    log_probs, spreads, top_two, normalisers = (np.zeros(fed.shape) for _ in range(4))
    lasts: list[np.ndarray] = [np.zeros(0)] * len(targets)  # log-probabilities of the last tokens
    for step in range(fed.shape[1]):
        exact, rounded = (run.step(fed[:, step]).astype(np.float64) for run in runs)  # [B, V]
        log_probs[:, step] = log_probs_of(exact, labels[:, step])
        spreads[:, step] = spreads_of(exact, rounded, reference.precision, usual)
        normalisers[:, step] = normalisers_of(exact)
        top_two[:, step] = np.ptp(np.partition(exact, -2, axis=1)[:, -2:], axis=1)
        for row, same in enumerate(targets):
            if step == len(same[0]) - 1:
                lasts[row] = log_probs_of(exact[[row] * len(same)], np.array([target[-1] for target in same]))
    return [
        [
            Scored(
                target,
                np.append(log_probs[row, : n - 1], last),
                spreads[row, :n],
                top_two[row, :n],
                normalisers[row, :n],
            )
            for target, last in zip(same, lasts[row], strict=True)
        ]
        for row, (same, n) in enumerate((same, len(same[0])) for same in targets)
    ]

"""Beam search, as Hugging Face `generate` or as CTranslate2 does it (beam_styles.py).

    logits [B,K,V] -> the 2K best continuations of a source --+-- end token --> the K best finished hypotheses
                                                              +-- any other --> the K running beams -> next step

Shapes: B sources still in the batch, K beams, C = 2K candidates, V vocab.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .beam_styles import STYLES, BeamProgress
from .constraints.phrases import banked_continuations
from .coverage import Coverage
from .finished import Continuations, Finished, Index, Record
from .options import SearchOptions
from .rules import Rules
from .step import Hypothesis, Search, Special, Start, Step, searched
from .step_output import Candidates, StepOutput, finite


def beam_search(
    step: Step,
    batch: int,
    special: Special,
    options: SearchOptions,
    texts: Sequence[Sequence[int]] = (),
    starts: Sequence[Start] = (),
) -> Search:
    """Decodes `batch` sources to up to `nbest` hypotheses each, best first; scores are length-normalised.

    `texts` are the source tokens, for rules that read them. `starts` are what each output begins with (none: what the
    options force). The length and the score of an alternative are those of the tokens after its own first one, whose
    log-probability is added; an alternative that does not exist has no hypothesis.

    In Hugging Face's style the result is that of
    `generate(num_beams=K, num_return_sequences=nbest, max_length=max_length + 1)` for each source alone: the other
    sources of a batch change nothing. A source that is done leaves the batch; until then it emits, and is fed, end
    tokens. Candidates with equal scores rank by lower beam, then lower token.

    A source has fewer than `nbest` hypotheses if fewer than K sequences exist (a vocabulary no larger than the beam);
    Hugging Face fills up with copies whose sum of log-probabilities is -1e9.
    """
    return searched(step, batch, BeamState(batch, special, options, texts, starts))


class BeamState:
    """The state of a beam search between two steps: a row for every source that is still in the batch.

    `sources` are their numbers in the whole batch, and `here` the same as an index.
    """

    def __init__(
        self,
        batch: int,
        special: Special,
        options: SearchOptions,
        texts: Sequence[Sequence[int]],
        starts: Sequence[Start],
    ):
        beam = options.beam
        self.options, self.style, self.beam = options, STYLES[options.beam_style], beam
        self.least_finished = self.style.least_finished(options)
        self.end = np.array(special.end)  # a numpy scalar: numpy would convert a Python int in every step
        self.rules = Rules(options, special, texts, starts)
        self.coverage = Coverage(texts, options) if options.needs_attention else None
        self.record, self.finished = Record(options.max_length, batch, beam), Finished(batch, beam)
        # For alternatives, of the whole batch: tokens up to the differing one, and their log-probability.
        self.uncounted = np.array([0 if one.rank is None else len(one.prefix) + 1 for one in starts] or [0] * batch)
        self.opening = np.zeros(batch)

        self.length = 0
        self.sources, self.row = np.arange(batch), np.arange(batch)[:, None]
        self.here: Index = slice(None)  # a slice makes views, as long as no source has left
        self.done, self.done_count = np.zeros(batch, dtype=bool), 0
        self.tokens = np.full((batch, beam), special.start, dtype=np.int64)
        self.unmoved = np.arange(beam)  # parents of beams that do not switch
        self.parents = np.tile(self.unmoved, (batch, 1))
        self.scores = np.full((batch, beam), -np.inf)
        self.scores[:, :1] = 0.0  # the K beams are still identical: only the first may be continued

    @property
    def all_done(self) -> bool:
        return self.done_count == len(self.done)

    @property
    def last(self) -> bool:
        return self.length == self.options.max_length

    def advance(self, step: Step) -> StepOutput:
        """One step: the tokens, parents and scores of the beams that run on, and the hypotheses that finish."""
        answer = step(self.tokens, self.parents)
        self.length += 1
        if self.coverage is not None:
            self.coverage.add(step.attention(), self.parents)
            self.record.attended[self.length - 1, self.here] = self.coverage.places
        running = self.running(self.continuations(answer))
        self.tokens, self.parents, self.scores = running.tokens, running.parents, running.scores
        if self.options.alternatives:
            self.note_openings()
        self.mark_done()
        self.record.add(self.length - 1, self.here, self.tokens, self.parents, running.log_probs)
        return answer

    def continuations(self, answer: StepOutput) -> Continuations:
        """The 2K best continuations of every source that the rules allow."""
        allowed, normaliser, own_normaliser = self.allowed(answer)
        if self.rules.phrases is None:
            scores, tokens, parents, logits = best_continuations(allowed.candidates, self.scores, normaliser, self.row)
        else:
            scores, tokens, parents, logits = banked_continuations(
                self.rules.phrases, allowed.logits, allowed.candidates.tokens, self.scores, normaliser
            )
        if self.options.allowed_log_probs:
            own_normaliser = with_dead_ends(allowed, answer).normaliser
        elif not allowed.own:  # rules may have changed logits
            logits = answer.logits_of(tokens, parents)
        return Continuations(scores, tokens, parents, logits - own_normaliser[self.row, parents])

    def allowed(self, answer: StepOutput) -> tuple[StepOutput, np.ndarray, np.ndarray]:
        """The logits that rules leave, the normaliser [B,K] of the scores, and that of the model's own logits."""
        given = (answer, self.tokens, self.parents, self.length)
        if self.style.renormalises:
            allowed = self.rules.answer(*given)
            normaliser = finite(with_dead_ends(allowed, answer).normaliser, self.sources)
            own = normaliser if allowed is answer else finite(answer.normaliser, self.sources)
        else:
            own = normaliser = finite(answer.normaliser, self.sources)
            allowed = self.rules.answer(*given, normaliser)
        return self.rules.opened(allowed, normaliser, self.length), normaliser, own

    def running(self, found: Continuations) -> Continuations:
        """Finishes what ends; the best K of the others run on."""
        stops = np.ones(found.tokens.shape, dtype=bool) if self.last else found.tokens == self.end  # [B, C]
        if not np.count_nonzero(stops) and self.rules.phrases is None:
            return found.first(self.beam)
        self.finish(found, stops)
        scores = np.where(stops, -np.inf, found.scores)
        going = np.argsort(stops, axis=1, kind="stable")[:, : self.beam]  # those that do not end, still best first
        if self.rules.phrases is not None:  # phrases keep beams regardless of their score
            going = by_score(scores, going)
        return found._replace(scores=scores).at(self.row, going)

    def finish(self, found: Continuations, stops: np.ndarray) -> None:
        """Candidates past the first K only keep K beams running: an end token there finishes nothing."""
        counts = stops & ~self.done[:, None]
        counts[:, self.beam :] = False
        length = np.maximum(self.length - self.uncounted[self.here], 1)
        paid = self.opening[self.here, None]
        scores = (found.scores - paid) / length[:, None] ** self.options.length_penalty + paid
        if self.coverage is not None:
            scores = scores + self.coverage.penalty()[self.row, found.parents]
        self.finished.add(self.here, np.where(counts, scores, -np.inf), self.length, found)

    def note_openings(self) -> None:
        """Records the log-probability of an alternative once its differing token is chosen."""
        apart = (self.uncounted[self.here] == self.length) & (self.scores[:, 0] > -np.inf)
        self.opening[self.here] = np.where(apart, self.scores[:, 0], self.opening[self.here])

    def mark_done(self) -> None:
        """Which sources need no more steps; those are fed end tokens until they leave."""
        done = self.done
        if self.last:
            done = np.ones_like(done)
        elif -math.inf in self.scores[:, 0].tolist():
            done = done | np.isinf(self.scores[:, 0])
        if self.finished.most >= self.least_finished:
            done = done | self.style.is_done(self.progress(), self.options)
        if done is not self.done:
            self.done, self.done_count = done, int(np.count_nonzero(done))
        if self.done_count:
            self.tokens[self.done], self.parents[self.done] = self.end, self.unmoved

    def hypotheses(self, sources: np.ndarray) -> list[list[Hypothesis]]:
        """Of sources that are done, by their numbers in the whole batch."""
        return self.finished.hypotheses(sources, self.record, self.options.kept, self.options.alignments)

    def progress(self) -> BeamProgress:
        here, paid = self.here, self.opening[self.here, None]
        return BeamProgress(
            self.finished.scores[here] - paid,
            self.scores - paid,
            self.finished.count[here],
            self.finished.best_finished[here],
            self.length,
            self.uncounted[here],
        )

    def keep(self, rows: np.ndarray) -> None:
        """Keeps only these sources from now on."""
        self.rules.keep(rows)
        if self.coverage is not None:
            self.coverage.keep(rows)
        self.sources, self.done, self.scores = self.sources[rows], self.done[rows], self.scores[rows]
        self.tokens, self.parents = self.tokens[rows], self.parents[rows]
        self.here, self.row = self.sources, np.arange(len(rows))[:, None]
        self.done_count = int(np.count_nonzero(self.done))


def by_score(scores: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Some columns [B,K] of scores [B,C], the best first."""
    order = np.argsort(-np.take_along_axis(scores, columns, axis=1), axis=1, kind="stable")
    return np.take_along_axis(columns, order, axis=1)


def with_dead_ends(allowed: StepOutput, answer: StepOutput) -> StepOutput:
    """The normaliser; a beam without an allowed token takes the model's, which is never used."""
    if allowed is answer or not (dead := allowed.logits.max(axis=-1) == -np.inf).any():
        return allowed
    return StepOutput(np.where(dead[..., None], answer.logits, allowed.logits))


def best_continuations(
    candidates: Candidates, running: np.ndarray, normaliser: np.ndarray, row: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Candidates, beam scores and normalisers [B,K] -> scores, tokens, beams and logits [B,C] of continuations.

    The 2K best, best first, except some that could neither finish nor run on; fewer only if fewer exist (V = 1). `row`
    [B,1] numbers the sources.
    """
    batch, beam, count = candidates.tokens.shape
    logits = candidates.logits.astype(np.float64)  # at once: numpy is slower where types are mixed
    offset = running - normaliser  # [B, K]
    scores = (logits + offset[..., None]).reshape(batch, -1)  # [B, K*count]

    # Columns are ordered by beam, then by rank within it: a stable sort keeps that order among equal scores.
    best = np.argsort(-scores, axis=1, kind="stable")[:, : 2 * beam]
    tokens, logits = candidates.tokens.reshape(batch, -1), logits.reshape(batch, -1)
    return scores[row, best], tokens[row, best], best // count, logits[row, best]

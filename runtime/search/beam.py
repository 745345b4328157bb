"""Beam search with the semantics of Hugging Face `generate`, or of another library (semantics.py).

    logits [B,K,V] -> the best 2K continuations of every source --+-- end token --> the K best ended hypotheses
                                                                  +-- any other --> the K running beams -> next step

Beams only ever hold scores. What a hypothesis says is read back at the end from the trail of choices, so nothing grows
or is copied while decoding. Shapes: B sources still in the batch, K beams, C = 2K candidates, V vocab, N n-best,
T maximum length.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .banks import allotted_continuations
from .beam_styles import PROFILES, Standing
from .coverage import Coverage
from .leaving import staying_rows
from .options import SearchOptions
from .rules import Rules
from .step import Emitted, Hypothesis, Search, Special, Start, Step
from .step_output import Answer, Candidates, finite


def beam_search(
    step: Step,
    batch: int,
    special: Special,
    options: SearchOptions,
    texts: Sequence[Sequence[int]] = (),
    starts: Sequence[Start] = (),
) -> Search:
    """Decodes `batch` sources to up to `nbest` hypotheses each, best first; scores are length-normalised.

    `texts` are the sources' tokens, for rules that look at them, `starts` what each output begins with (none: what the
    options force). Of an alternative, the length and the score that count are those of what follows its own token,
    whose log-probability is added; one that does not exist has no hypothesis.

    With Hugging Face's semantics what comes out is what
    `generate(num_beams=K, num_return_sequences=nbest, max_length=max_length + 1)` gives for that source alone.
    Neighbours have no say: in Hugging Face, too, a source's hypotheses are frozen once its own stop condition holds,
    the loop just goes on around it. Here it leaves the batch; until then it emits, and is fed, end tokens. Equal scores
    rank by lower beam, then lower token.

    A source has fewer than `nbest` hypotheses where fewer than K sequences exist (a vocabulary no larger than the
    beam); Hugging Face fills up with copies whose sum of log-probabilities is -1e9.
    """
    semantics = PROFILES[options.semantics]
    beam = options.beam
    own = np.arange(beam)
    rules = Rules(options, special, texts, starts)
    coverage = Coverage(texts, options) if options.needs_attention else None
    skipped = np.array([0 if one.rank is None else len(one.prefix) + 1 for one in starts] or [0] * batch)
    opening = np.zeros(batch)  # what alternatives paid for their own token
    ended = _Ended(batch, beam)
    trail = np.zeros((2, options.max_length, batch, beam), dtype=np.int64)  # tokens and parents of every step
    prices = np.zeros((options.max_length, batch, beam))  # the tokens' log-probabilities
    looks = np.zeros((options.max_length, batch, beam), dtype=np.int64)  # by the beams that chose

    sources, row = np.arange(batch), np.arange(batch)[:, None]
    here: slice | np.ndarray = slice(None)  # the sources as an index, which makes views as long as nobody has left
    done = np.zeros(batch, dtype=bool)
    finished = 0  # how many are done
    tokens = np.full((batch, beam), special.start, dtype=np.int64)
    parents = np.tile(own, (batch, 1))
    running = np.full((batch, beam), -np.inf)
    running[:, :1] = 0.0  # the K beams are still one and the same: only the first may have children
    end = np.array(special.end)  # of the tokens' type: numbers of Python's own would be converted in every step
    length = 0
    while finished < len(done):
        answer = step(tokens, parents)
        length += 1
        last = length == options.max_length
        if coverage is not None:
            coverage.add(step.attention(), parents)
            looks[length - 1, here] = coverage.places
        if semantics.renormalises:
            allowed = rules.answer(answer, tokens, parents, length)
            normaliser = finite(_with_dead_ends(allowed, answer).normaliser, sources)
            plain = normaliser if allowed is answer else finite(answer.normaliser, sources)
        else:
            plain = normaliser = finite(answer.normaliser, sources)
            allowed = rules.answer(answer, tokens, parents, length, normaliser)
        allowed = rules.opened(allowed, normaliser, length)
        if semantics.forces_end and last:
            allowed = _only(special.end, allowed)
        if rules.said is None:
            scores, tokens, parents, logits = _best_continuations(allowed.candidates, running, normaliser, row)
        else:
            best = allowed.candidates.tokens
            scores, tokens, parents = allotted_continuations(rules.said, allowed.logits, best, running, normaliser)
        if allowed is not answer:  # rules may have put prices of their own on some
            logits = answer.logits_of(tokens, parents)
        gained = logits - plain[row, parents]  # [B, C]
        stops = np.ones(tokens.shape, dtype=bool) if last else tokens == end  # [B, C]

        if np.count_nonzero(stops) or semantics.shrinks or rules.said is not None:
            # Candidates past the first K are there to keep K beams running; they end unheard.
            rank = np.arange(stops.shape[1])
            heard = stops & ~done[:, None] & (rank < beam)
            room = beam - ended.count[here, None]  # [B, 1]
            if semantics.shrinks:
                heard &= rank < room
                stops |= rank >= room
            elif semantics.first_come:
                heard &= heard.cumsum(axis=1) <= room
            counted = np.maximum(length - skipped[here], 1)
            paid = opening[here, None]
            worth = (scores - paid) / counted[:, None] ** options.length_penalty + paid
            if coverage is not None:
                worth = worth + coverage.penalty()[row, parents]
            ended.add(here, np.where(heard, worth, -np.inf), length, parents, tokens, gained)

            scores = np.where(stops, -np.inf, scores)
            go_on = np.argsort(stops, axis=1, kind="stable")[:, :beam]  # those that do not stop, still best first
            if rules.said is not None:  # but for phrases, which had beams kept for them
                go_on = _by_score(scores, go_on)
            running, tokens, parents, gained = (array[row, go_on] for array in (scores, tokens, parents, gained))
        else:
            running, tokens, parents, gained = scores[:, :beam], tokens[:, :beam], parents[:, :beam], gained[:, :beam]
        if options.alternatives:
            apart = (skipped[here] == length) & (running[:, 0] > -np.inf)
            opening[here] = np.where(apart, running[:, 0], opening[here])
        done = np.ones_like(done) if last else done | np.isinf(running[:, 0])
        if ended.some:
            done |= semantics.settled(ended.standing(here, running, opening[here], length, skipped[here]), options)
        finished = int(np.count_nonzero(done))
        if finished:
            tokens[done], parents[done] = end, own
        trail[0, length - 1, here], trail[1, length - 1, here] = tokens, parents
        prices[length - 1, here] = gained
        yield Emitted(length - 1, sources, tokens, parents, answer, done)

        if finished and (rows := staying_rows(done)) is not None:
            step.keep(rows)
            rules.keep(rows)
            if coverage is not None:
                coverage.keep(rows)
            sources, done, running = sources[rows], done[rows], running[rows]
            tokens, parents = tokens[rows], parents[rows]
            here, row, finished = sources, np.arange(len(rows))[:, None], int(np.count_nonzero(done))

    return ended.hypotheses(trail[:, :length], prices, looks if options.alignments else None, options.kept)


def _by_score(scores: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Some columns [B,K] of scores [B,C], the best first."""
    order = np.argsort(-np.take_along_axis(scores, columns, axis=1), axis=1, kind="stable")
    return np.take_along_axis(columns, order, axis=1)


def _with_dead_ends(allowed: Answer, answer: Answer) -> Answer:
    """For the normaliser: a beam that may say nothing more has none of its own, and is in need of none."""
    if allowed is answer or not (dead := allowed.logits.max(axis=-1) == -np.inf).any():
        return allowed
    return Answer(np.where(dead[..., None], answer.logits, allowed.logits))


def _only(token: int, answer: Answer) -> Answer:
    """An answer of which only this token's logits are left."""
    result = np.full_like(answer.logits, -np.inf)
    result[..., token] = answer.logits[..., token]
    return Answer(result)


def _best_continuations(
    candidates: Candidates, running: np.ndarray, normaliser: np.ndarray, row: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Candidates, beam scores and normalisers [B,K] -> scores, tokens, beams and logits [B,C] of continuations.

    The best 2K, best first, but for some that could neither end nor run on; fewer only where there are not as many
    (V = 1). `row` [B,1] numbers the sources.
    """
    batch, beam, count = candidates.tokens.shape
    logits = candidates.logits.astype(np.float64)  # at once, as numpy takes longer to mix types
    offset = running - normaliser  # [B, K]
    scores = (logits + offset[..., None]).reshape(batch, -1)  # [B, K*count]

    # Columns stand by beam, and within it by rank: a stable sort leaves equals in the order the docstring promises.
    best = np.argsort(-scores, axis=1, kind="stable")[:, : 2 * beam]
    tokens, logits = candidates.tokens.reshape(batch, -1), logits.reshape(batch, -1)
    return scores[row, best], tokens[row, best], best // count, logits[row, best]


class _Ended:
    """The K best ended hypotheses of every source, best first, each known by its score and the place where it ended."""

    def __init__(self, batch: int, beam: int):
        self.scores = np.full((batch, beam), -np.inf)  # -inf: none yet
        self.places = np.zeros((batch, beam, 3), dtype=np.int64)  # length, the beam it continues, its last token
        self.prices = np.zeros((batch, beam))  # the last token's log-probability
        self.count = np.zeros(batch, dtype=np.int64)  # of all that have ended, the K best or not
        self.some = False  # whether there is any
        self.topped = np.zeros(batch, dtype=bool)  # whether the best candidate of a step has ever been among them

    def add(
        self,
        here: slice | np.ndarray,
        scores: np.ndarray,
        length: int,
        parents: np.ndarray,
        tokens: np.ndarray,
        prices: np.ndarray,
    ) -> None:
        """Candidates [B,C] of the sources that are `here`, best first; a score of -inf is no candidate."""
        new = scores > -np.inf
        if not new.any():
            return
        self.some = True
        self.count[here] += new.sum(axis=1)
        self.topped[here] |= new[:, 0]
        places = np.stack([np.full_like(tokens, length), parents, tokens], axis=-1)
        all_scores = np.concatenate([self.scores[here], scores], axis=1)
        all_places = np.concatenate([self.places[here], places], axis=1)
        all_prices = np.concatenate([self.prices[here], prices], axis=1)
        best = np.argsort(-all_scores, axis=1, kind="stable")[:, : self.scores.shape[1]]
        self.prices[here] = np.take_along_axis(all_prices, best, axis=1)
        self.scores[here] = np.take_along_axis(all_scores, best, axis=1)
        self.places[here] = np.take_along_axis(all_places, best[..., None], axis=1)

    def standing(
        self, here: slice | np.ndarray, running: np.ndarray, paid: np.ndarray, length: int, skipped: np.ndarray
    ) -> Standing:
        """How far the sources that are `here` have come, whose beams run at these scores [B,K].

        An alternative [B] has `paid` for the tokens up to its own, which are `skipped`.
        """
        scores = self.scores[here] - paid[:, None], running - paid[:, None]
        return Standing(*scores, self.count[here], self.topped[here], length, skipped)

    def hypotheses(
        self, trail: np.ndarray, prices: np.ndarray, looks: np.ndarray | None, nbest: int
    ) -> list[list[Hypothesis]]:
        """Walks the trail [2,T,B,K] of tokens and parents back from where each hypothesis ended.

        On the way it reads the tokens' `prices` [T,B,K], and where the beams that chose them had looked [T,B,K].
        """
        scores = self.scores[:, :nbest]
        lengths, beams, last = np.moveaxis(self.places[:, :nbest], -1, 0)  # [B, N] each
        _, steps, batch, _ = trail.shape
        rows = np.arange(batch)[:, None]
        words, looked = np.zeros((2, batch, nbest, steps), dtype=np.int64)
        paid = np.zeros((batch, nbest, steps))
        for position in reversed(range(steps)):
            tokens, parents = trail[:, position, rows, beams]  # [B, N] each
            final = position == lengths - 1
            words[..., position] = np.where(final, last, tokens)
            paid[..., position] = np.where(final, self.prices[:, :nbest], prices[position, rows, beams])
            beams = np.where(position < lengths - 1, parents, beams)
            if looks is not None:
                looked[..., position] = looks[position, rows, beams]
        return [
            [
                Hypothesis(
                    tuple(words[source, rank, : lengths[source, rank]].tolist()),
                    float(scores[source, rank]),
                    tuple(paid[source, rank, : lengths[source, rank]].tolist()),
                    () if looks is None else tuple(looked[source, rank, : lengths[source, rank]].tolist()),
                )
                for rank in np.flatnonzero(scores[source] > -np.inf)
            ]
            for source in range(batch)
        ]

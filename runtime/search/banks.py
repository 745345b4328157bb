"""Beams kept for phrases: dynamic beam allocation (Post & Vilar 2018).

A candidate's bank is how many tokens of the phrases it has said. Left to their scores, beams that put the phrases off
would crowd out those that say them; so every bank is given an equal share of the beams, best candidates first, and a
bank that has too few leaves its share to the others. Beside its best tokens every beam is offered those that begin a
phrase or go on with one. Shapes: B sources, K beams, V vocab, U symbols of the phrases, C candidates.
"""

from __future__ import annotations

import numpy as np

from .constraints import PhraseConstraint


def allotted_continuations(
    said: PhraseConstraint, logits: np.ndarray, best: np.ndarray, running: np.ndarray, normaliser: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """logits [B,K,V], beam scores and normalisers [B,K] -> scores, tokens and beams [B,C] of 2K continuations.

    `best` [B,K,K+1] are the best tokens of every beam. The first K, best first, are those that end and then the shares
    of all banks, the others are there to take the places of those that end.
    """
    batch, beam, count = best.shape
    offered = np.broadcast_to(said.table.alphabet, (batch, beam, len(said.table.alphabet)))
    tokens = np.concatenate((best, offered), axis=-1)  # [B, K, count + U]
    scores = np.take_along_axis(logits, tokens, axis=-1) + (running - normaliser)[..., None]
    twice = (offered[..., None] == best[:, :, None, :]).any(axis=-1)
    scores[..., count:][twice] = -np.inf

    beams = np.broadcast_to(np.arange(beam)[:, None], tokens.shape).reshape(batch, -1)
    scores, tokens = scores.reshape(batch, -1), tokens.reshape(batch, -1)
    order = np.argsort(-scores, axis=1, kind="stable")
    scores, tokens, beams = (np.take_along_axis(array, order, axis=1) for array in (scores, tokens, beams))
    missing = said.needed_after(tokens, beams)  # [B, C]: the fewer, the higher the bank

    # In turns: of every bank its best candidate, then its second, and so on; the highest bank goes first. Who ends
    # takes no beam away: an end counts if it is among the best K of its bank, as it would in a search without phrases.
    ends, never = tokens == said.end, np.iinfo(np.int64).max
    better = np.tril(missing[:, :, None] == missing[:, None, :], k=-1)  # [B, C, C]: in the same bank
    turn = (better & ~ends[:, None, :]).sum(axis=-1)
    claim = np.where(ends & (better.sum(axis=-1) >= beam), never, turn * (said.table.total + 1) + missing)
    claim = np.where(ends & (claim < never), -1, claim)
    claim = np.where(scores > -np.inf, claim, never)
    chosen = np.argsort(claim, axis=1, kind="stable")[:, : 2 * beam]
    chosen[:, :beam].sort(axis=1)  # candidates stand best first
    return (
        np.take_along_axis(scores, chosen, axis=1),
        np.take_along_axis(tokens, chosen, axis=1),
        np.take_along_axis(beams, chosen, axis=1),
    )

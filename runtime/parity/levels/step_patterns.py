"""What a decoder step is fed when steps are compared: the oracle's own choices, in the shapes real decodes have.

greedy       one beam, all rows at the same step
beams        K beams that change their parents every step: the cache is a tree
rows apart   one beam, every other row starts anew half way: rows stand at different positions and slots
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ...generate import padded
from ...numerics.budgets import ErrorTally, TensorResult
from ...session import Session
from ...text.sources import sample_of, tree_sources
from ...tree_cache import TreeStep

DRIVES = ("greedy", "rows apart", "beams")
DRIVEN_STEPS = 12  # a tree and two starts show in a few


def width_of(drive: str, beam: int) -> int:
    return beam if drive == "beams" else 1


def driven(trees: Sequence[TreeStep], drive: str, start: int, steps: int) -> Iterator[list[np.ndarray]]:
    """Feeds all trees alike, one step at a time; yields every tree's logits [B,K,V]. The first tree's decide what next.

    A source that has said its end goes on: nothing is decoded here, only compared.
    """
    lead = trees[0]
    batch, beams = len(lead.position), lead.beams
    rng = np.random.default_rng(0)
    tokens = np.full((batch, beams), start, dtype=np.int64)
    parents = np.zeros((batch, beams), dtype=np.int64)
    for step in range(steps):
        if drive == "rows apart" and step == steps // 2:
            again = np.arange(0, batch, 2)
            tokens[again] = start
            for tree in trees:
                tree.restart(again)
        answers = [tree(tokens, parents).logits for tree in trees]
        yield answers
        parents = rng.integers(beams, size=(batch, beams))
        best = np.argsort(-answers[0], axis=-1, kind="stable")[:, :, :beams]  # [B, K, K]
        tokens = best[np.arange(batch)[:, None], parents, np.arange(beams)]  # beam k takes its parent's k-th best


def compare_drives(
    oracle: Session,
    reference: Session,
    candidate: Session,
    sources: list[list[int]],
    longest: int,
    beam: int,
    batch: int,
) -> tuple[TensorResult, ...]:
    """The logits of what one beam in step cannot show: beams that change their parents, rows at different positions."""
    drives = ["rows apart", *(["beams"] if beam > 1 else [])]
    tallies = {drive: ErrorTally(candidate.precision) for drive in drives}
    steps = min(longest, DRIVEN_STEPS)
    for drive, tally in tallies.items():
        driving = sample_of(sources, tree_sources(oracle.config, width_of(drive, beam)))
        batches = -(-len(driving) // batch)
        for first in range(batches):
            rows = driving[first::batches]  # short ones and long ones together
            chosen = padded(rows, oracle.config.pad_id)
            trees = [
                TreeStep(session, session.encode(*chosen), len(rows), width_of(drive, beam), steps)
                for session in (oracle, reference, candidate)
            ]
            for answers in driven(trees, drive, oracle.config.start_id, steps):
                tally.add_logits(*(answer.reshape(-1, answer.shape[-1]) for answer in answers))
    return tuple(t.result("steps", f"logits, {drive}") for drive, t in tallies.items())

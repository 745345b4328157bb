"""Step patterns: the inputs with which decoder steps are compared, in the shapes of real decodes.

greedy           one beam, all rows at the same step
beams            K beams that switch parents in every step: the KV cache is a tree
staggered rows   one beam, every other row restarts half way: rows are at different positions and cache slots

The tokens are the oracle's own choices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ...encoder_inputs import encoder_inputs
from ...numerics.budgets import ErrorTally, TensorResult
from ...session import Session
from ...steps.tree_cache import TreeStep
from ...text.sources import sample_of, tree_sources

STEP_PATTERNS = ("greedy", "staggered rows", "beams")
STEPS = 12  # enough for a tree and a restart


def width_of(pattern: str, beam: int) -> int:
    return beam if pattern == "beams" else 1


def pattern_steps(trees: Sequence[TreeStep], pattern: str, start: int, steps: int) -> Iterator[list[np.ndarray]]:
    """Feeds all trees the same tokens, chosen from the first tree's logits; yields every tree's logits [B,K,V] by step.

    A source continues after its end token: steps are only compared here.
    """
    lead = trees[0]
    batch, beams = len(lead.position), lead.beams
    rng = np.random.default_rng(0)
    tokens = np.full((batch, beams), start, dtype=np.int64)
    parents = np.zeros((batch, beams), dtype=np.int64)
    for step in range(steps):
        if pattern == "staggered rows" and step == steps // 2:
            again = np.arange(0, batch, 2)
            tokens[again] = start
            for tree in trees:
                tree.restart(again)
        answers = [tree(tokens, parents).logits for tree in trees]
        yield answers
        parents = rng.integers(beams, size=(batch, beams))
        best = np.argsort(-answers[0], axis=-1, kind="stable")[:, :, :beams]  # [B, K, K]
        tokens = best[np.arange(batch)[:, None], parents, np.arange(beams)]  # beam k takes its parent's k-th best


def compare_step_patterns(
    oracle: Session,
    reference: Session,
    candidate: Session,
    sources: list[list[int]],
    longest: int,
    beam: int,
    batch: int,
) -> tuple[TensorResult, ...]:
    """The logits of the patterns that greedy search does not cover: switching beams, rows at different positions."""
    patterns = ["staggered rows", *(["beams"] if beam > 1 else [])]
    tallies = {pattern: ErrorTally(candidate.precision) for pattern in patterns}
    steps = min(longest, STEPS)
    for pattern, tally in tallies.items():
        chosen_sources = sample_of(sources, tree_sources(oracle.config, width_of(pattern, beam)))
        batches = -(-len(chosen_sources) // batch)
        for first in range(batches):
            rows = chosen_sources[first::batches]  # short and long ones together
            chosen = encoder_inputs(rows, oracle.config)
            trees = [
                TreeStep(session, session.encode(*chosen), len(rows), width_of(pattern, beam), steps)
                for session in (oracle, reference, candidate)
            ]
            for answers in pattern_steps(trees, pattern, oracle.config.start_id, steps):
                tally.add_logits(*(answer.reshape(-1, answer.shape[-1]) for answer in answers))
    return tuple(t.result("steps", f"logits, {pattern}") for pattern, t in tallies.items())

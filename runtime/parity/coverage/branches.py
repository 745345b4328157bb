"""Every branch of a form is run: the screened output projection outputs the best tokens without all logits.

Teacher-forced steps read only full logits. Here the same steps output their best tokens, one and as many as there
may be, and these are compared with the best logits of fp64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from seq2engine.export.ort_forms.interface import MOST

from ...encoder_inputs import encoder_inputs
from ...numerics.budgets import ErrorTally, TensorResult
from ...ort.session import OrtSession
from ...session import Session, StepForm
from ...steps.tree_cache import TreeStep
from .lookups import LEVEL

STEPS = 4


def branch_results(
    oracle: Session, reference: Session, candidate: Session, sources: Sequence[Sequence[int]]
) -> tuple[TensorResult, ...]:
    """The best logits of screened steps; none where a session has no such form."""
    if not isinstance(candidate, OrtSession) or not candidate.form.screened:
        return ()
    found = []
    for wanted in (1, min(MOST, candidate.config.target_vocab)):
        tally = ErrorTally(candidate.precision)
        chosen = encoder_inputs(sources, oracle.config)
        forms = (StepForm(), StepForm(), StepForm(candidates=wanted))
        trees = [
            TreeStep(session, session.encode(*chosen), len(sources), 1, STEPS, form)
            for session, form in zip((oracle, reference, candidate), forms, strict=True)
        ]
        tokens = np.full((len(sources), 1), oracle.config.start_id, dtype=np.int64)
        parents = np.zeros_like(tokens)
        for _ in range(STEPS):
            exact, rounded, given = (tree(tokens, parents) for tree in trees)
            best = best_logits(exact.logits[:, 0], rounded.logits[:, 0], wanted)
            shown = given.candidates.logits[:, 0, :wanted]
            tally.add(*best, shown.astype(np.float64))
            tokens = exact.logits.argmax(axis=-1)
        found.append(tally.result(LEVEL, f"best {wanted} logits, screened"))
    return tuple(found)


def best_logits(exact: np.ndarray, rounded: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest of each side [B,V] -> [B,C], each ranked separately: which token wins a tie is not an error."""
    return tuple(np.sort(logits.astype(np.float64), axis=1)[:, ::-1][:, :count] for logits in (exact, rounded))  # type: ignore[return-value]

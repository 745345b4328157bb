"""The tensors of the contract, compared over encoder and teacher-forced steps; and how far PyTorch itself errs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from seq2engine.common.progress import Progress, silent

from ...generate import generate, padded
from ...numerics.budgets import ErrorTally, TensorResult
from ...numerics.error_scale import error_spread
from ...numerics.teacher_forcing import ForcedRun, forced_tokens
from ...search.options import SearchOptions
from ...session import Session
from .decodes import mixed_batches
from .next_token import NextToken, NextTokenTally

# A step is judged by itself only while that many sources are not finished: ratios of single rows are a matter of luck.
FEWEST_ROWS = 8


def compare_tensors(
    oracle: Session,
    reference: Session,
    candidate: Session,
    sources: Sequence[Sequence[int]],
    options: SearchOptions,
    batch: int,
    progress: Progress = silent,
) -> tuple[tuple[TensorResult, ...], float, dict[str, NextToken]]:
    """The encoder's tensors and those of teacher-forced steps, in the order in which one error would cause the next;
    the spread of the errors that PyTorch usually makes in the logits of a step; and both sides' next tokens.
    """
    layers = [f"{part}.{i}" for i in range(oracle.config.decoder_layers) for part in "kv"]
    precision = candidate.precision
    encoder = {name: ErrorTally(precision) for name in ("encoder_states", *(f"cross_{layer}" for layer in layers))}
    caches = {f"self_{layer}": ErrorTally(precision) for layer in layers}
    by_step = [ErrorTally(precision) for _ in range(options.max_length)]
    spreads: list[np.ndarray] = []
    speakers = {f"{who} {precision}": NextTokenTally() for who in ("PyTorch", candidate.backend)}

    batches = mixed_batches(len(sources), batch)
    for done, rows in enumerate(batches):
        progress("parity: tensors", done / len(batches))
        chosen = [sources[row] for row in rows]
        targets = [found[0].tokens for found in generate(oracle, chosen, options)]
        fed, counts = forced_tokens(targets, oracle.config, options.start)
        runs = [ForcedRun(session, chosen, fed.shape[1]) for session in (oracle, reference, candidate)]
        _, real = padded(chosen, oracle.config.pad_id)
        for name, tally in encoder.items():
            tally.add(*(positions_of(run.tensor(name))[real] for run in runs))
        for step in range(fed.shape[1]):
            answers = [run.step(fed[:, step])[counts[:, step]] for run in runs]
            by_step[step].add_logits(*answers)
            spreads.append(error_spread(answers[0], answers[1]))
            for next_token, answer in zip(speakers.values(), answers[1:], strict=True):
                next_token.add(answers[0], answer)
        for name, tally in caches.items():
            # Slots are written in the order of the steps, and one beam leaves none dead; the rest was never written.
            tally.add(*(positions_of(run.tensor(name))[:, : fed.shape[1]][counts] for run in runs))
    progress("parity: tensors", 1.0)

    logits = ErrorTally(precision)
    for tally in by_step:
        logits.merge(tally)

    def results(level: str, tallies: dict[str, ErrorTally]) -> Iterator[TensorResult]:
        return (tally.result(level, name) for name, tally in tallies.items())

    steps = enumerate(by_step)
    found = (
        *results("encoder", encoder),
        *results("steps", {**caches, "logits": logits}),
        *(t.result("steps", "logits", step) for step, t in steps if t.rows >= FEWEST_ROWS),
    )
    said = {who: next_token.result() for who, next_token in speakers.items()}
    return found, float(np.median(np.concatenate(spreads))), said


def positions_of(tensor: np.ndarray) -> np.ndarray:
    """Position by position: [B,H,S,E] -> [B,S,H,E]; encoder states [B,S,D] are so already."""
    return tensor.swapaxes(1, 2) if tensor.ndim == 4 else tensor


def usual_spread(
    oracle: Session, reference: Session, sources: Sequence[Sequence[int]], options: SearchOptions, batch: int
) -> float:
    """The spread of the errors that PyTorch usually makes in the logits of a step."""
    spreads = []
    for rows in mixed_batches(len(sources), batch):
        chosen = [sources[row] for row in rows]
        targets = [said[0].tokens for said in generate(oracle, chosen, options)]
        fed, counts = forced_tokens(targets, oracle.config, options.start)
        runs = [ForcedRun(session, chosen, fed.shape[1]) for session in (oracle, reference)]
        for step in range(fed.shape[1]):
            spreads.append(error_spread(*(run.step(fed[:, step])[counts[:, step]] for run in runs)))
    return float(np.median(np.concatenate(spreads)))

"""How many threads PyTorch uses during a parity run: the fastest number, measured at its start.

Three sessions step one after another, and idle threads of PyTorch and ONNX Runtime spin on the cores that the others
need. On a busy machine two threads took up to five times the CPU time of one, and more wall-clock time; on an idle one
they are faster. So it is measured on a real step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from ..numerics.teacher_forcing import ForcedRuns
from ..session import Session

ROUNDS = 3  # the least time of each counts: other processes only add to it


def thread_counts(most: int) -> list[int]:
    """1, 2, 4, ... and the most."""
    return sorted({*(2**i for i in range(most.bit_length())), most})


def take_quickest_threads(sessions: Sequence[Session], sources: Sequence[Sequence[int]]) -> int:
    """Times a first step of all sessions with each count, up to what PyTorch has now, and leaves the quickest set."""
    counts = thread_counts(torch.get_num_threads())
    if len(counts) == 1:
        return counts[0]
    runs = ForcedRuns(sessions, sources, 1)
    everyone = np.arange(len(sources))
    tokens = np.full((len(sources), 1), sessions[0].config.start_id, dtype=np.int64)
    least = dict.fromkeys(counts, float("inf"))
    for warm in (False, *[True] * ROUNDS):
        for count in counts:
            torch.set_num_threads(count)
            began = time.perf_counter()
            runs(tokens, np.zeros_like(tokens))
            if warm:
                least[count] = min(least[count], time.perf_counter() - began)
            for run in runs.runs:
                run.tree.restart(everyone)
    quickest = min(counts, key=lambda count: least[count])
    torch.set_num_threads(quickest)
    return quickest

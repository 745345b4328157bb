"""Parallel workers for models and batches that are too small for them."""

from __future__ import annotations

import pytest

from seq2engine.runtime import threads
from seq2engine.runtime.ort import session

FEW_ROWS = {"fp32": 32, "w8a8": 2}  # of a worker, in place of what pays


def workers_for_few_rows(patch: pytest.MonkeyPatch) -> None:
    """Sessions that are opened from now on have workers for a tiny model, too."""
    patch.setattr(threads, "WORKER_WORK", 1)
    patch.setattr(
        session, "rows_of_worker", lambda config, count, precision, kernels=False: FEW_ROWS.get(precision, 128)
    )
